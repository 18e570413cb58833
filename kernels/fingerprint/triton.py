"""Fingerprints, on a GPU: a sum per block, then the sum of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrowrl.kernels.fingerprint.reference import signed

jit: Callable[[Callable[..., Any]], Any] = triton.jit

BLOCK = 4096
GOLDEN: Any = tl.constexpr(0x9E3779B97F4A7C15)


def fingerprint(bits: Tensor, seed: int, start: int, row_length: int, stride: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint."""
    count = bits.numel()
    sums = torch.zeros(triton.cdiv(count, BLOCK), dtype=torch.int64, device=bits.device)
    if count:
        long_rows = row_length >= BLOCK
        of_box[(sums.numel(),)](bits, sums, count, signed(seed), start, row_length, stride, long_rows, BLOCK)
    return sums.sum()


def fingerprint_at(live: Tensor, positions: Tensor, indices: Tensor, seed: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint_at; positions are within `live`."""
    count = positions.numel()
    sums = torch.zeros(triton.cdiv(count, BLOCK), dtype=torch.int64, device=live.device)
    if count:
        of_elements[(sums.numel(),)](live, positions, indices, sums, count, signed(seed), BLOCK)
    return sums.sum()


@jit
def block_sum(point: tl.tensor, bits: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the sum of the mixes of point + bits where `inside`."""
    width: tl.constexpr = bits.dtype.primitive_bitwidth
    unsigned = bits.to(tl.uint64)
    if width < 64:
        unsigned = unsigned & ((1 << width) - 1)
    z = point.to(tl.uint64) + unsigned
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return tl.sum(tl.where(inside, z.to(tl.int64), 0))


@jit
def of_box(
    bits: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    seed: tl.tensor,
    start: tl.tensor,
    row_length: tl.tensor,
    stride: tl.tensor,
    LONG_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sum of each block; LONG_ROWS: no row is shorter than a block."""
    block = tl.program_id(0).to(tl.int64)
    first = block * BLOCK
    i = tl.arange(0, BLOCK)
    inside = first + i < count
    # Only one division is of 64 bits, and that one is done once for the block.
    row = first // row_length
    column = first - row * row_length
    if LONG_ROWS:
        down = (column + i >= row_length).to(tl.int64)
    else:
        down = ((column + i).to(tl.int32) // row_length).to(tl.int64)
    # All else is linear: what depends on the block alone is multiplied once.
    base = (seed + tl.zeros((1,), tl.int64)).to(tl.uint64) + (start + row * stride + column + 1).to(tl.uint64) * GOLDEN
    jump = (stride - row_length + tl.zeros((1,), tl.int64)).to(tl.uint64) * GOLDEN
    point = base + i.to(tl.uint64) * GOLDEN + down.to(tl.uint64) * jump
    values = tl.load(bits + (first + i), mask=inside, other=0)
    tl.store(sums + block, block_sum(point, values, inside))


@jit
def of_elements(
    live: tl.tensor,
    positions: tl.tensor,
    indices: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sum of each block of positions."""
    block = tl.program_id(0).to(tl.int64)
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    index = tl.load(indices + k, mask=inside, other=0)
    values = tl.load(live + tl.load(positions + k, mask=inside, other=0), mask=inside, other=0)
    point = (seed + tl.zeros((1,), tl.int64)).to(tl.uint64) + (index + 1).to(tl.uint64) * GOLDEN
    tl.store(sums + block, block_sum(point, values, inside))
