"""The CPU path and the reference of diff agree, and both are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_bits_equal
from sparrowrl.errors import LayoutError
from sparrowrl.kernels.bits import as_bits, cast_to_wire
from sparrowrl.kernels.diff import cpu, diff, reference
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at
from sparrowrl.kernels.scatter import scatter_add_

CASTS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def check(new: Tensor, old: Tensor, wire: torch.dtype | None = None) -> None:
    """Old plus steps gives new; positions and steps are the reference's."""
    positions, steps = diff(new, old, wire)
    want_positions, want_steps = reference.diff(new, old, wire or new.dtype)
    assert_bits_equal(positions, want_positions)
    assert_bits_equal(steps, want_steps)
    applied = old.clone()
    applied[positions] += steps
    assert_bits_equal(applied, as_bits(cast_to_wire(new, wire or new.dtype)).reshape(-1))
    assert bool((steps != 0).all())


def test_every_width_and_kind_of_change(pair: Any) -> None:
    check(pair.new, pair.old)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_views_that_begin_between_lanes(sparse_pair: Any, offset: int) -> None:
    check(sparse_pair.new[offset:], sparse_pair.old[offset:])
    check(sparse_pair.new[offset:], sparse_pair.old[: -offset or None])


def test_new_in_any_strides() -> None:
    new = torch.randn(37, 12, 5).to(torch.bfloat16)
    for view in (new.transpose(0, 2), new[:, ::3], new[1:, :, 2], new[::2].permute(1, 2, 0), new.expand(2, 37, 12, 5)):
        old = as_bits(view.contiguous()).reshape(-1).clone()
        old[::7] += 1
        check(view, old)


def test_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK", 40)
    new = torch.randn(9, 7, 11)
    for view in (new, new.permute(2, 0, 1), new.transpose(0, 1), new[0], new[:1, :, ::2]):
        old = as_bits(view.to(torch.bfloat16).contiguous()).reshape(-1).clone()
        old[::5] -= 3
        check(view, old, torch.bfloat16)


def test_output_grows() -> None:
    old = torch.zeros(1_000_003, dtype=torch.int16)
    new = old.clone()
    new[600_000:] = 5
    check(new, old)
    check(old + 1, old)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """Pages that only zeros are read from take no memory."""
    elements = (1 << 31) + 100_003
    old, new = torch.zeros(elements, dtype=torch.int8), torch.zeros(elements, dtype=torch.int8)
    positions = torch.tensor([0, (1 << 31) - 1, 1 << 31, elements - 1])
    steps = torch.tensor([1, -2, 3, -128], dtype=torch.int8)
    scatter_add_(new, positions, steps)
    got_positions, got_steps = diff(new, old)
    assert_bits_equal(got_positions, positions)
    assert_bits_equal(got_steps, steps)
    update = fingerprint_at(new, positions, positions, 1) - fingerprint_at(old, positions, positions, 1)
    assert_bits_equal(fingerprint(old, 1) + update, fingerprint(new, 1))


def test_negative_zero_nan_payloads_and_subnormals_are_bits() -> None:
    old = torch.tensor([0.0, -0.0, 0.0, float("nan"), float("inf"), 1e-45])
    new_bits = as_bits(old).clone()
    new_bits[0] = -(2**31)
    new_bits[3] = 0x7FC0_0001
    new_bits[5] = 2
    positions, steps = diff(new_bits.view(torch.float32), as_bits(old))
    assert positions.tolist() == [0, 3, 5]
    assert steps.tolist() == [-(2**31), 1, 1]
    assert diff(old, as_bits(old).clone())[0].numel() == 0


@pytest.mark.parametrize("wire", CASTS)
def test_cast_agrees_with_rounding_of_every_float16(wire: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    old = torch.zeros(every.numel(), dtype=as_bits(torch.zeros(1, dtype=wire)).dtype)
    check(every, old, wire)


@pytest.mark.parametrize("wire", CASTS)
@pytest.mark.parametrize("size", [1, 3, 8, 33, 1024])
def test_cast_nan_is_the_positive_quiet_one(wire: torch.dtype, size: int) -> None:
    nan_bits = [0x7FC0_0000, 0xFFC0_0000 - 2**32, 0x7F80_0001, 0xFFFF_FFFF - 2**32]
    for bits in nan_bits:
        got = as_bits(cast_to_wire(torch.full((size,), bits, dtype=torch.int32).view(torch.float32), wire))
        want = {1: 0x7F if wire == torch.float8_e4m3fn else 0x7E, 2: 0x7FC0 if wire == torch.bfloat16 else 0x7E00}
        assert_bits_equal(got, torch.full_like(got, want[wire.itemsize]))


@pytest.mark.parametrize("others", [0.0, 3e38, float("inf"), -float("inf")])
def test_one_cast_nan_among_others(others: float) -> None:
    new = torch.full((3001,), others)
    new[1700] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    got = as_bits(cast_to_wire(new, torch.bfloat16))
    want = as_bits(torch.full((3001,), others).to(torch.bfloat16)).clone()
    want[1700] = 0x7FC0
    assert_bits_equal(got, want)


def test_one_byte_floats_are_cast_too() -> None:
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        new = torch.tensor([1.5, float("nan"), -0.0]).to(narrow)
        expected = torch.tensor([0x3FC0, 0x7FC0, -0x8000], dtype=torch.int16)
        assert_bits_equal(as_bits(cast_to_wire(new, torch.bfloat16)), expected)


def test_same_dtype_is_not_touched() -> None:
    payload = torch.tensor([0x7F81, -1], dtype=torch.int16).view(torch.bfloat16)
    assert cast_to_wire(payload, torch.bfloat16) is payload


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
    limits = torch.iinfo(dtype)
    values = st.integers(limits.min, limits.max)
    old = data.draw(st.lists(values, max_size=70))
    changes = data.draw(st.dictionaries(st.integers(0, max(len(old) - 1, 0)), values)) if old else {}
    new = [changes.get(i, x) for i, x in enumerate(old)]
    check(torch.tensor(new, dtype=dtype), torch.tensor(old, dtype=dtype))


def test_what_does_not_fit_is_refused() -> None:
    new = torch.zeros(4, dtype=torch.bfloat16)
    for old in (
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int16),
        torch.zeros(8, dtype=torch.int16)[::2],
    ):
        with pytest.raises(LayoutError):
            diff(new, old)
    with pytest.raises(LayoutError):
        as_bits(torch.zeros(2, dtype=torch.complex128))
