"""The same cases on a real GPU, through the public functions, against the CPU."""

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
from sparrowrl.kernels.diff import triton as diff_triton
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at
from sparrowrl.kernels.pack import pack
from sparrowrl.kernels.scatter import scatter_add_
from sparrowrl.kernels.unpack import unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not the GPU"),
]
BOXES = [(0, 1, 1), (2**40, 1, 7), (3, 4500, 9000), (3, 4096, 2**33), (1, 33, 35)]


def on_gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.cuda() for t in tensors)


def assert_all_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(t.is_cuda for t in got)
    for left, right in zip(got, want, strict=True):
        assert_bits_equal(left, right)


def test_diff_and_scatter(pair: Any) -> None:
    new, old = on_gpu(*pair)
    changes = diff(new, old)
    assert_all_equal(changes, diff(*pair))
    scatter_add_(old, *changes)
    assert_bits_equal(old, pair.new)
    scatter_add_(old, changes[0], -changes[1])
    assert_bits_equal(old, pair.old)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_views_that_begin_anywhere(sparse_pair: Any, offset: int) -> None:
    new, old = on_gpu(*sparse_pair)
    assert_all_equal(diff(new[offset:], old[offset:]), diff(sparse_pair.new[offset:], sparse_pair.old[offset:]))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_are_those_of_the_cpu(wire: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_triton, "CHUNK", 10_000)
    every_half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    new = torch.cat([every_half, torch.randn(5000), torch.randn(5000) * 1e-30]).reshape(2, -1).T
    old = torch.zeros(new.numel(), dtype=as_bits(torch.zeros(1, dtype=wire)).dtype)
    assert_all_equal(diff(new.cuda(), old.cuda(), wire), diff(new, old, wire))


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_fingerprint_of_boxes(sparse_pair: Any, box: tuple[int, int, int], seed: int) -> None:
    assert_bits_equal(fingerprint(sparse_pair.new.cuda(), seed, *box), fingerprint(sparse_pair.new, seed, *box))


def test_fingerprint_of_every_kind(pair: Any) -> None:
    assert_bits_equal(fingerprint(pair.new.cuda(), 7), fingerprint(pair.new, 7))
    positions, _ = diff(*pair)
    got = fingerprint_at(*on_gpu(pair.new, positions, positions << 40), 7)
    assert_bits_equal(got, fingerprint_at(pair.new, positions, positions << 40, 7))


@pytest.mark.parametrize("tile_log2", [8, 12, 20])
def test_pack_and_unpack(pair: Any, tile_log2: int) -> None:
    changes, elements = diff(*pair), pair.new.numel()
    packed = pack(*changes, elements, tile_log2)
    assert_all_equal(pack(*on_gpu(*changes), elements, tile_log2), packed)
    assert_all_equal(unpack(*on_gpu(*packed), elements, tile_log2, pair.new.dtype), changes)


def test_hostile_bytes_are_refused() -> None:
    positions = torch.tensor([1, 5, 6, 200, 255, 256, 299])
    steps = torch.tensor([1, -1, 127, -128, 2, -3, 64], dtype=torch.int8)
    packed = pack(positions, steps, 300, 8)
    for part in range(3):
        for i in range(packed[part].numel()):
            for bit in range(0, 31, 3):
                hostile = [t.clone() for t in packed]
                hostile[part][i] ^= 1 << bit
                try:
                    want = unpack(*hostile, 300, 8, torch.int8)
                except CorruptData:
                    with pytest.raises(CorruptData):
                        unpack(*on_gpu(*hostile), 300, 8, torch.int8)
                else:
                    assert_all_equal(unpack(*on_gpu(*hostile), 300, 8, torch.int8), want)


def test_nothing_is_written_if_a_position_is_outside() -> None:
    live, positions, steps = on_gpu(torch.zeros(10, dtype=torch.int16), torch.tensor([3, 10]), torch.tensor([1, 1]))
    with pytest.raises(LayoutError):
        scatter_add_(live, positions, steps.to(torch.int16))
    assert not bool(live.any())


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """Real addresses beyond 32 bits: 2.2 billion elements, about 15 GB."""
    elements = (1 << 31) + 100_003
    old = torch.zeros(elements, dtype=torch.int16, device="cuda")
    positions = torch.tensor([0, (1 << 31) - 1, 1 << 31, elements - 1], device="cuda")
    steps = torch.tensor([1, -2, 3, -(2**15)], dtype=torch.int16, device="cuda")
    new = old.clone()
    scatter_add_(new, positions, steps)
    changes = diff(new, old)
    assert_bits_equal(changes[0], positions)
    assert_bits_equal(changes[1], steps)
    packed = pack(*changes, elements, 16)
    for got, want in zip(unpack(*packed, elements, 16, torch.int16), changes, strict=True):
        assert_bits_equal(got, want)
    before, after = fingerprint(old, 1), fingerprint(new, 1)
    update = fingerprint_at(new, positions, positions, 1) - fingerprint_at(old, positions, positions, 1)
    assert_bits_equal(before + update, after)
