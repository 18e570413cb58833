"""What tests of every floor share."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

_INT_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bits_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless shape, dtype and every bit agree; says where the first difference is."""
    assert got.dtype == expected.dtype, f"dtype: expected {expected.dtype}, got {got.dtype}"
    assert got.shape == expected.shape, f"shape: expected {tuple(expected.shape)}, got {tuple(got.shape)}"
    integer = _INT_OF_WIDTH[got.element_size()]
    left = got.detach().cpu().contiguous().view(integer).reshape(-1)
    right = expected.detach().cpu().contiguous().view(integer).reshape(-1)
    bad = (left != right).nonzero().reshape(-1)
    if bad.numel():
        first = int(bad[0])
        mask = (1 << (8 * got.element_size())) - 1
        expected_bits, got_bits = int(right[first]) & mask, int(left[first]) & mask
        raise AssertionError(
            f"{bad.numel()} of {left.numel()} elements differ; "
            f"first at {first}: expected {expected_bits:#x}, got {got_bits:#x}"
        )


def skip_before(version: str, what: str) -> None:
    """Skip a test of what vLLM, or its CPU build, can only do since a version."""
    import vllm
    from packaging.version import Version

    if Version(vllm.__version__) < Version(version):
        pytest.skip(f"vLLM {vllm.__version__}: {what} since {version}")


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until `condition()` holds; fails after `seconds` and says what was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)
