"""Tile bodies: the written layout, both paths, and hostile bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_bits_equal
from sparrowrl.errors import CorruptData, LayoutError
from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.pack import Packed, pack
from sparrowrl.kernels.pack import reference as pack_reference
from sparrowrl.kernels.unpack import reference as unpack_reference
from sparrowrl.kernels.unpack import unpack

DTYPES = [torch.int8, torch.int16, torch.int32, torch.int64]


def round_trip(positions: Tensor, steps: Tensor, elements: int, tile_log2: int) -> None:
    packed = pack(positions, steps, elements, tile_log2)
    for got, want in zip(packed, pack_reference.pack(positions, steps, elements, tile_log2), strict=True):
        assert_bits_equal(got, want)
    for decode in (unpack, unpack_reference.unpack):
        for got, want in zip(decode(*packed, elements, tile_log2, steps.dtype), (positions, steps), strict=True):
            assert_bits_equal(got, want)


def test_one_tile_by_hand() -> None:
    """U = 256, positions 3 and 200, steps 1 and -2: l = 7, s = 1, 23 bits."""
    packed = pack(torch.tensor([3, 200]), torch.tensor([1, -2], dtype=torch.int16), 256, 8)
    low, high, sign, gamma, mantissa = 3 | 72 << 7, 0b101, 0b10, 0b101, 0
    assert packed.counts.tolist() == [2]
    assert packed.buckets.tolist() == [1]
    assert packed.words.tolist() == [low | high << 14 | sign << 17 | gamma << 19 | mantissa << 22]


@pytest.mark.parametrize("tile_log2", [8, 12, 20])
def test_every_width_and_kind_of_change(pair: Any, tile_log2: int) -> None:
    round_trip(*diff(pair.new, pair.old), pair.new.numel(), tile_log2)


@pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 255, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_tiles_of_any_size(size: int, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    for step in (1, -1, limits.min, limits.max):
        round_trip(torch.arange(size), torch.full((size,), step, dtype=dtype), size, 8)
    round_trip(torch.tensor([size - 1]), torch.tensor([limits.min], dtype=dtype), size, 8)


def test_positions_beyond_32_bits() -> None:
    elements = (1 << 33) + 5
    positions = torch.tensor([0, (1 << 31) + 7, (1 << 32) + 1, elements - 1])
    steps = torch.tensor([1, -1, 300, -5], dtype=torch.int16)
    packed = pack(positions, steps, elements, 20)
    got_positions, got_steps = unpack(*packed, elements, 20, torch.int16)
    assert_bits_equal(got_positions, positions)
    assert_bits_equal(got_steps, steps)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    dtype = draw(st.sampled_from(DTYPES))
    limits = torch.iinfo(dtype)
    elements = draw(st.integers(1, 700))
    positions = sorted(draw(st.sets(st.integers(0, elements - 1), max_size=elements)))
    step = st.one_of(st.sampled_from([1, -1, limits.min, limits.max]), st.integers(limits.min, limits.max))
    steps = draw(st.lists(step.filter(bool), min_size=len(positions), max_size=len(positions)))
    return torch.tensor(positions, dtype=torch.int64), torch.tensor(steps, dtype=dtype), elements


@given(changes())
@settings(max_examples=100, deadline=None)
def test_any_changes(case: tuple[Tensor, Tensor, int]) -> None:
    round_trip(*case, 8)


@given(changes(), st.data())
@settings(max_examples=300, deadline=None)
def test_hostile_bytes_are_refused_by_both_paths_alike(case: tuple[Tensor, Tensor, int], data: st.DataObject) -> None:
    """Whatever is accepted is exactly what pack writes, so no two encodings mean the same."""
    positions, steps, elements = case
    parts = [t.clone() for t in pack(positions, steps, elements, 8)]
    for _ in range(data.draw(st.integers(1, 3))):
        part = parts[data.draw(st.sampled_from([0, 1, 2, 2, 2, 2]))]
        if part.numel():
            where = data.draw(st.integers(0, part.numel() - 1))
            part[where] ^= data.draw(st.sampled_from([1 << b for b in range(31)] + [-(1 << 31), 3, 5]))
    if data.draw(st.booleans()):
        parts[2] = torch.cat([parts[2], torch.zeros(1, dtype=torch.int32)]) if len(steps) % 2 else parts[2][:-1]
    try:
        want = unpack_reference.unpack(*parts, elements, 8, steps.dtype)
    except CorruptData:
        with pytest.raises(CorruptData):
            unpack(*parts, elements, 8, steps.dtype)
    else:
        for got, expected in zip(unpack(*parts, elements, 8, steps.dtype), want, strict=True):
            assert_bits_equal(got, expected)


def body(*sections: tuple[int, int]) -> Tensor:
    """Join (value, bits) from the least significant bit on, into int32 words."""
    value = at = 0
    for number, bits in sections:
        value |= number << at
        at += bits
    words = [(value >> i) & 0xFFFF_FFFF for i in range(0, at, 32)]
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


HOSTILE = {
    "positions descend": (2, 0, body((9, 7), (8, 7), (0b011, 3), (0, 2), (0b11, 2))),
    "positions repeat": (2, 0, body((9, 7), (9, 7), (0b011, 3), (0, 2), (0b11, 2))),
    "too few high bits": (2, 0, body((1, 7), (2, 7), (0b001, 3), (0, 2), (0b11, 2))),
    "too many high bits": (2, 0, body((1, 7), (2, 7), (0b111, 3), (0, 2), (0b11, 2))),
    "too few gamma bits": (2, 0, body((1, 7), (2, 7), (0b011, 3), (0, 2), (0b01, 2))),
    "too many gamma bits": (2, 1, body((1, 7), (2, 7), (0b011, 3), (0, 2), (0b111, 3), (0, 1))),
    "gamma ends early": (2, 1, body((1, 7), (2, 7), (0b011, 3), (0, 2), (0b011, 3), (0, 1))),
    "padding": (2, 0, body((1, 7), (2, 7), (0b011, 3), (0, 2), (0b11, 2), (1, 1))),
    "step of +128": (1, 7, body((1, 8), (1, 1), (0, 1), (1 << 7, 8), (0, 7))),
    "step of -129": (1, 7, body((1, 8), (1, 1), (1, 1), (1 << 7, 8), (1, 7))),
    "bucket beyond the width": (1, 8, body((1, 8), (1, 1), (1, 1), (1 << 8, 9), (0, 8))),
    "a word too many": (1, 0, torch.cat([body((1, 8), (1, 1), (0, 1), (1, 1)), torch.zeros(1, dtype=torch.int32)])),
    "a word too few": (1, 0, torch.zeros(0, dtype=torch.int32)),
    "more changes than elements": (257, 0, torch.zeros(40, dtype=torch.int32)),
    "negative count": (-1, 0, torch.zeros(0, dtype=torch.int32)),
    "negative buckets": (1, -1, torch.zeros(1, dtype=torch.int32)),
    "buckets without changes": (0, 1, torch.zeros(1, dtype=torch.int32)),
}


@pytest.mark.parametrize("decode", [unpack, unpack_reference.unpack])
@pytest.mark.parametrize("name", HOSTILE)
def test_each_inconsistency_is_refused(name: str, decode: Any) -> None:
    n, s, words = HOSTILE[name]
    with pytest.raises(CorruptData):
        decode(torch.tensor([n], dtype=torch.int32), torch.tensor([s], dtype=torch.int32), words, 256, 8, torch.int8)


def test_nothing_is_read_behind_the_words() -> None:
    """Few gamma bits, far apart: steps whose mantissas would be far behind the end."""
    gamma = sum(1 << i for i in range(60, 250, 60))
    high = sum(1 << 2 * k for k in range(250))
    words = body((high, 250 + 255), (0, 250), (gamma, 250))
    n, s = torch.tensor([250], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(CorruptData):
        unpack(n, s, words, 256, 8, torch.int64)


@pytest.mark.slow
def test_compiled_code_stays_in_bounds(tmp_path: Path) -> None:
    """All other tests of this file once more, with every index checked."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_last_tile_ends_where_the_elements_end() -> None:
    packed = pack(torch.tensor([99]), torch.tensor([1], dtype=torch.int8), 100, 8)
    flipped = Packed(packed.counts, packed.buckets, packed.words ^ 0b111)
    with pytest.raises(CorruptData):
        unpack(*flipped, 100, 8, torch.int8)


def test_headers_that_do_not_fit_are_refused() -> None:
    packed = pack(torch.tensor([1]), torch.tensor([1], dtype=torch.int8), 300, 8)
    for elements, tile_log2 in ((256, 8), (513, 8), (-1, 8), (300, 7), (300, 21)):
        with pytest.raises(CorruptData):
            unpack(*packed, elements, tile_log2, torch.int8)
    with pytest.raises(LayoutError):
        unpack(*packed, 300, 8, torch.bfloat16)


def test_pack_refuses_what_it_cannot_write() -> None:
    one = torch.ones(2, dtype=torch.int16)
    for positions, steps in (
        (torch.tensor([1, 1]), one),
        (torch.tensor([2, 1]), one),
        (torch.tensor([-1, 1]), one),
        (torch.tensor([1, 300]), one),
        (torch.tensor([1, 2]), one * 0),
        (torch.tensor([1, 2]), one[:1]),
        (torch.tensor([1, 2]).int(), one),
        (torch.tensor([1, 2]), one.float()),
    ):
        with pytest.raises(LayoutError):
            pack(positions, steps, 300, 8)
    for tile_log2 in (7, 21):
        with pytest.raises(LayoutError):
            pack(torch.tensor([1, 2]), one, 300, tile_log2)
