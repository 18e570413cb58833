"""Tile bodies, on a GPU: each change sets its own bits in words that begin as zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.pack import Packed

jit: Callable[[Callable[..., Any]], Any] = triton.jit

BLOCK = 512


def pack(positions: Tensor, steps: Tensor, elements: int, tile_log2: int) -> Packed:
    """See sparrowrl.kernels.pack.pack."""
    changed, device = positions.numel(), positions.device
    tiles = -(-elements // (1 << tile_log2))
    _check(positions, steps, elements)
    firsts = torch.searchsorted(positions, torch.arange(tiles + 1, device=device) << tile_log2)
    totals = torch.zeros(changed + 1, dtype=torch.int64, device=device)
    blocks = triton.cdiv(changed, BLOCK)
    if changed:
        magnitude_logs[(blocks,)](steps, totals[1:], changed, BLOCK)
        totals = totals.cumsum(0)
    counts, buckets = firsts.diff(), totals[firsts].diff()
    low_bits, bits = tile_shape(counts, buckets, elements, tile_log2)
    ends = ((bits + 31) >> 5).cumsum(0)
    words = torch.zeros(int(ends[-1]) if tiles else 0, dtype=torch.int32, device=device)
    tile_table = torch.stack([firsts[:-1], counts, buckets, low_bits, (ends - ((bits + 31) >> 5)) << 5])
    if changed:
        write[(blocks,)](positions, steps, totals, tile_table, words, changed, tiles, elements, tile_log2, BLOCK)
    return Packed(counts.to(torch.int32), buckets.to(torch.int32), words)


def tile_shape(counts: Tensor, buckets: Tensor, elements: int, tile_log2: int) -> tuple[Tensor, Tensor]:
    """Return (l, bits of the body) of each tile, int64[tiles], for valid counts and buckets, int64[tiles]."""
    begins = torch.arange(counts.numel(), device=counts.device) << tile_log2
    sizes = (elements - begins).clamp(max=1 << tile_log2)
    low_bits = torch.frexp((sizes // counts.clamp(min=1)).double()).exponent.long() - 1
    bits = counts * low_bits + counts + ((sizes - 1) >> low_bits) + 2 * counts + 2 * buckets
    return low_bits, torch.where(counts > 0, bits, 0)


def _check(positions: Tensor, steps: Tensor, elements: int) -> None:
    if positions.numel() == 0:
        return
    good = (
        (positions[1:] > positions[:-1]).all() & (positions[0] >= 0) & (positions[-1] < elements) & (steps != 0).all()
    )
    if not bool(good):
        raise LayoutError(f"expected distinct ascending positions below {elements} and no zero step: mend the caller")


@jit
def floor_log2(x: tl.tensor) -> tl.tensor:
    """Return floor(log2 x) as int64 of x > 0, uint64."""
    log = tl.zeros_like(x).to(tl.int64)
    for i in tl.static_range(6):
        more = (x >> (32 >> i)) != 0
        log += tl.where(more, 32 >> i, 0)
        x = tl.where(more, x >> (32 >> i), x)
    return log


@jit
def magnitude(step: tl.tensor) -> tl.tensor:
    """Return |step| as uint64."""
    wide = step.to(tl.int64)
    return tl.where(wide < 0, -wide, wide).to(tl.uint64)


@jit
def magnitude_logs(steps: tl.tensor, logs: tl.tensor, changed: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Store floor(log2 |step|) of each step, as int64."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < changed
    tl.store(logs + k, floor_log2(magnitude(tl.load(steps + k, mask=inside, other=1))), mask=inside)


@jit
def put(words: tl.tensor, at: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Or `value`, uint64, into the bits from `at` on, where `mask`."""
    word = at >> 5
    shift = (at & 31).to(tl.uint64)
    over = (value >> 32) << shift | (value & 0xFFFFFFFF) << shift >> 32
    here, second, third = (value << shift).to(tl.int32), over.to(tl.int32), (over >> 32).to(tl.int32)
    tl.atomic_or(words + word, here, mask=mask & (here != 0), sem="relaxed")
    tl.atomic_or(words + (word + 1), second, mask=mask & (second != 0), sem="relaxed")
    tl.atomic_or(words + (word + 2), third, mask=mask & (third != 0), sem="relaxed")


@jit
def set_bit(words: tl.tensor, at: tl.tensor, mask: tl.tensor) -> None:
    """Set bit `at` where `mask`."""
    bit = (tl.full(at.shape, 1, tl.int32) << (at & 31).to(tl.int32)).to(tl.int32)
    tl.atomic_or(words + (at >> 5), bit, mask=mask, sem="relaxed")


@jit
def write(
    positions: tl.tensor,
    steps: tl.tensor,
    totals: tl.tensor,
    tile_table: tl.tensor,
    words: tl.tensor,
    changed: tl.tensor,
    tiles: tl.tensor,
    elements: tl.tensor,
    tile_log2: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write all sections; the rows of `tile_table` are: first change, n, s, l, first bit."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < changed
    p = tl.load(positions + k, mask=inside, other=0)
    tile = p >> tile_log2
    start = tile << tile_log2
    p -= start
    # The size of a tile only matters as (size - 1) >> l.
    last = tl.minimum(start + (tl.full((1,), 1, tl.int64) << tile_log2), elements) - 1 - start
    row = tile_table + tile
    tiles_wide = tl.zeros((1,), tl.int64) + tiles
    first = tl.load(row, mask=inside, other=0)
    n = tl.load(row + tiles_wide, mask=inside, other=0)
    s = tl.load(row + 2 * tiles_wide, mask=inside, other=0)
    low_bits = tl.load(row + 3 * tiles_wide, mask=inside, other=0)
    low = tl.load(row + 4 * tiles_wide, mask=inside, other=0)
    high = low + n * low_bits
    sign = high + n + (last >> low_bits)
    gamma = sign + n
    mantissa = gamma + n + s
    j = k - first
    put(words, low + j * low_bits, (p - (p >> low_bits << low_bits)).to(tl.uint64), inside)
    set_bit(words, high + (p >> low_bits) + j, inside)
    step = tl.load(steps + k, mask=inside, other=1)
    set_bit(words, sign + j, inside & (step < 0))
    origin = tl.load(totals + first, mask=inside, other=0)
    before = tl.load(totals + k, mask=inside, other=0) - origin
    size = magnitude(step)
    bucket = floor_log2(size)
    set_bit(words, gamma + j + before + bucket, inside)
    rest = size - (tl.full((BLOCK,), 1, tl.uint64) << bucket.to(tl.uint64))
    put(words, mantissa + before, rest, inside)
