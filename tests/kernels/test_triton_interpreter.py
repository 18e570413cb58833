"""The Triton kernels under the interpreter, against the reference:

    TRITON_INTERPRET=1 pytest tests/kernels/test_triton_interpreter.py

in a process of its own, since the variable must be set before the kernels are imported.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_bits_equal
from sparrowrl.errors import CorruptData, LayoutError
from sparrowrl.kernels.bits import as_bits
from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.diff import reference as diff_reference
from sparrowrl.kernels.fingerprint import reference as fingerprint_reference
from sparrowrl.kernels.pack import pack
from sparrowrl.kernels.unpack import unpack

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a process of its own with TRITON_INTERPRET=1", allow_module_level=True)

from sparrowrl.kernels.diff import triton as diff_triton
from sparrowrl.kernels.fingerprint import triton as fingerprint_triton
from sparrowrl.kernels.pack import triton as pack_triton
from sparrowrl.kernels.scatter import triton as scatter_triton
from sparrowrl.kernels.unpack import triton as unpack_triton

BOXES = [(0, 5003, 5003), (2**40, 1, 7), (3, 4500, 9000), (3, 4096, 2**33), (1, 33, 35)]


def assert_all_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for left, right in zip(got, want, strict=True):
        assert_bits_equal(left, right)


def test_diff(pair: Any) -> None:
    got = diff_triton.diff(pair.new, pair.old, pair.new.dtype)
    assert_all_equal(got, diff_reference.diff(pair.new, pair.old, pair.new.dtype))


def test_diff_joins_chunks_and_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_triton, "CHUNK", 100)
    new = torch.randn(9, 7, 11)
    for view in (new, new.permute(2, 0, 1), new[:, ::2]):
        old = as_bits(view.to(torch.bfloat16).contiguous()).reshape(-1).clone()
        old[::5] -= 3
        got = diff_triton.diff(view, old, torch.bfloat16)
        assert_all_equal(got, diff_reference.diff(view, old, torch.bfloat16))


def test_scatter(pair: Any) -> None:
    positions, steps = diff(pair.new, pair.old)
    live = pair.old.clone()
    if positions.numel():
        scatter_triton.scatter_add_(live, positions, steps)
        assert_bits_equal(live, pair.new)
        scatter_triton.scatter_add_(live, positions, -steps)
    assert_bits_equal(live, pair.old)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_fingerprint_of_boxes(sparse_pair: Any, box: tuple[int, int, int], seed: int) -> None:
    want = fingerprint_reference.fingerprint(sparse_pair.new, fingerprint_reference.signed(seed), *box)
    assert_bits_equal(fingerprint_triton.fingerprint(sparse_pair.new, seed, *box), want)


def test_fingerprint(pair: Any) -> None:
    whole = (0, max(pair.new.numel(), 1), max(pair.new.numel(), 1))
    want = fingerprint_reference.fingerprint(pair.new, 5, *whole)
    assert_bits_equal(fingerprint_triton.fingerprint(pair.new, 5, *whole), want)
    positions, _ = diff(pair.new, pair.old)
    got = fingerprint_triton.fingerprint_at(pair.new, positions, positions << 40, 1 << 63)
    want = fingerprint_reference.fingerprint_at(pair.new, positions, positions << 40, -(1 << 63))
    assert_bits_equal(got, want)


@pytest.mark.parametrize("tile_log2", [8, 12])
def test_pack_and_unpack(pair: Any, tile_log2: int) -> None:
    changes = diff(pair.new, pair.old)
    packed = pack(*changes, pair.new.numel(), tile_log2)
    assert_all_equal(pack_triton.pack(*changes, pair.new.numel(), tile_log2), packed)
    assert_all_equal(unpack_triton.unpack(*packed, pair.new.numel(), tile_log2, pair.new.dtype), changes)


def test_positions_beyond_32_bits() -> None:
    """Packed and decoded positions are 64-bit; no memory of that size is needed."""
    elements = (1 << 33) + 5
    positions = torch.tensor([0, (1 << 31) + 7, (1 << 32) + 1, elements - 1])
    steps = torch.tensor([1, -1, 300, -5], dtype=torch.int16)
    packed = pack(positions, steps, elements, 20)
    used = packed.counts.nonzero().reshape(-1).tolist()
    assert len(used) == 4
    assert_all_equal(pack_triton.pack(positions, steps, elements, 20), packed)
    zeros = torch.zeros(1, dtype=torch.int16)
    compacted = diff_triton.diff(zeros + 1, zeros, torch.int16)
    assert_all_equal(compacted, (torch.tensor([0]), zeros + 1))


def test_hostile_bytes_are_refused_as_by_the_cpu_path() -> None:
    """Flip every bit of counts, buckets and words in turn."""
    positions = torch.tensor([1, 5, 6, 200, 255, 256, 299])
    steps = torch.tensor([1, -1, 127, -128, 2, -3, 64], dtype=torch.int8)
    packed = pack(positions, steps, 300, 8)
    refused = 0
    for part in range(3):
        for i in range(packed[part].numel()):
            for bit in range(32):
                hostile = [t.clone() for t in packed]
                hostile[part][i] ^= 1 << bit if bit < 31 else -(1 << 31)
                try:
                    want = unpack(*hostile, 300, 8, torch.int8)
                except CorruptData:
                    refused += 1
                    with pytest.raises(CorruptData):
                        unpack_triton.unpack(*hostile, 300, 8, torch.int8)
                else:
                    assert_all_equal(unpack_triton.unpack(*hostile, 300, 8, torch.int8), want)
    assert refused > 100
    for words in (packed.words[:-1], torch.cat([packed.words, packed.words[:1] * 0])):
        with pytest.raises(CorruptData):
            unpack_triton.unpack(packed.counts, packed.buckets, words, 300, 8, torch.int8)
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(CorruptData):
        unpack_triton.unpack(empty, empty, packed.words, 0, 8, torch.int8)


def test_pack_refuses_what_it_cannot_write() -> None:
    one = torch.ones(2, dtype=torch.int16)
    for positions, steps in (([1, 1], one), ([2, 1], one), ([-1, 1], one), ([1, 300], one), ([1, 2], one * 0)):
        with pytest.raises(LayoutError):
            pack_triton.pack(torch.tensor(positions), steps, 300, 8)
