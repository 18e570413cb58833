"""scatter_add_ applies, undoes and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import assert_bits_equal
from sparrowrl.errors import LayoutError
from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.scatter import reference, scatter_add_


def test_applies_and_undoes(pair: Any) -> None:
    positions, steps = diff(pair.new, pair.old)
    live, want = pair.old.clone(), pair.old.clone()
    scatter_add_(live, positions, steps)
    reference.scatter_add_(want, positions, steps)
    assert_bits_equal(live, pair.new)
    assert_bits_equal(want, pair.new)
    scatter_add_(live, positions, -steps)
    assert_bits_equal(live, pair.old)


def test_any_order_of_positions(sparse_pair: Any) -> None:
    positions, steps = diff(sparse_pair.new, sparse_pair.old)
    order = torch.randperm(positions.numel(), generator=torch.Generator().manual_seed(1))
    live = sparse_pair.old.clone()
    scatter_add_(live, positions[order], steps[order])
    assert_bits_equal(live, sparse_pair.new)


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**63)])
def test_nothing_is_written_if_a_position_is_outside(bad: int) -> None:
    live = torch.arange(10, dtype=torch.int16)
    with pytest.raises(LayoutError, match="nothing was written"):
        scatter_add_(live, torch.tensor([3, bad]), torch.tensor([1, 1], dtype=torch.int16))
    assert_bits_equal(live, torch.arange(10, dtype=torch.int16))


def test_what_does_not_fit_is_refused() -> None:
    live, two, steps = torch.zeros(10, dtype=torch.int16), torch.tensor([1, 2]), torch.ones(2, dtype=torch.int16)
    for arguments in (
        (live[::2], two, steps),
        (live.view(torch.bfloat16), two, steps),
        (live, two, steps[:1]),
        (live, two.int(), steps),
        (live, two, steps.int()),
    ):
        with pytest.raises(LayoutError):
            scatter_add_(*arguments)
