"""Tile bodies decoded, on a GPU. Nothing is read or written before it is known to be in bounds.

The high plane and the gamma plane are decoded by one operation: where is the k-th set bit? After that every change is
decoded alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrowrl.errors import CorruptData
from sparrowrl.kernels.pack.triton import tile_shape

jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Bits of a plane that a program looks at together, and changes of a block.
SELECT_BLOCK = 1024
BLOCK = 512


def unpack(
    counts: Tensor, buckets: Tensor, words: Tensor, elements: int, tile_log2: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.unpack.unpack."""
    n, s, limit, tiles = counts.long(), buckets.long(), 8 * dtype.itemsize - 1, counts.numel()
    starts = torch.arange(tiles, device=n.device) << tile_log2
    sizes = (elements - starts).clamp(max=1 << tile_log2)
    _require(((n >= 0) & (n <= sizes) & (s >= 0) & (s <= n * limit)).all(), "counts and buckets that a tile can have")
    low_bits, bits = tile_shape(n, s, elements, tile_log2)
    ends = ((bits + 31) >> 5).cumsum(0)
    expected = int(ends[-1]) if tiles else 0
    if words.numel() != expected:
        raise CorruptData(f"expected {expected} words of bodies, got {words.numel()}: fetch the segment again")
    low = (ends << 5) - ((bits + 31) >> 5 << 5)
    high = low + n * low_bits
    gamma = low + bits - n - 2 * s
    firsts = n.cumsum(0) - n
    changed = int(n.sum())
    highs = _select(words, high, gamma - n - high, firsts, n, changed)
    gammas = _select(words, gamma, n + s, firsts, n, changed)
    # The last bit of a gamma plane is set, and nothing is behind the mantissas.
    used = n > 0
    _require((gammas[(firsts + n - 1)[used]] == (n + s - 1)[used]).all(), "as many gamma bits as buckets say")
    last = words[(ends - 1)[used]].long() & 0xFFFF_FFFF
    _require((last >> ((bits[used] - 1 & 31) + 1) == 0).all(), "zero padding")
    tile_table = torch.stack([firsts, n, s, low_bits, low, starts, sizes])
    return _decode(words, highs, gammas, tile_table, dtype)


def _require(good: Tensor, what: str) -> None:
    if not bool(good):
        raise CorruptData(f"expected {what}, got other bits: fetch the segment again")


def _select(words: Tensor, begins: Tensor, lengths: Tensor, firsts: Tensor, counts: Tensor, changed: int) -> Tensor:
    """Return int32[changed]: where in its plane the k-th set bit of each tile is."""
    out = torch.empty(changed, dtype=torch.int32, device=words.device)
    found = torch.zeros(counts.numel(), dtype=torch.int32, device=words.device)
    if changed:
        lengths = torch.where(counts > 0, lengths, 0)
        select[(counts.numel(),)](words, begins, lengths, firsts, counts, out, found, SELECT_BLOCK)
    _require((found == counts).all(), "a set bit for each change")
    return out


def _decode(
    words: Tensor, highs: Tensor, gammas: Tensor, tile_table: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    changed, tiles, device = highs.numel(), tile_table.shape[1], words.device
    positions = torch.empty(changed, dtype=torch.int64, device=device)
    steps = torch.empty(changed, dtype=dtype, device=device)
    if changed:
        blocks = triton.cdiv(changed, BLOCK)
        bad = torch.empty(blocks, dtype=torch.int32, device=device)
        tile_of = torch.repeat_interleave(torch.arange(tiles, device=device), tile_table[1], output_size=changed)
        bits = 8 * dtype.itemsize
        decode[(blocks,)](
            words, highs, gammas, tile_of, tile_table, positions, steps, bad, changed, tiles, words.numel(), bits, BLOCK
        )
        _require((bad == 0).all() & (positions[1:] > positions[:-1]).all(), "positions that ascend and steps that fit")
    return positions, steps


@jit
def select(
    words: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    found: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Store where the set bits of one tile's plane are, counted from its begin, and how many there are."""
    tile = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + tile)
    length = tl.load(lengths + tile).to(tl.int32)
    first = tl.load(firsts + tile)
    count = tl.load(counts + tile)
    seen = tl.full((), 0, tl.int32)
    for at in range(0, length, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < length
        word = tl.load(words + ((begin + i) >> 5), mask=inside, other=0)
        bit = (word >> ((begin + i) & 31).to(tl.int32)) & 1
        k = seen + tl.cumsum(bit, 0) - bit
        tl.store(out + (first + k), i, mask=(bit != 0) & (k < count))
        seen += tl.sum(bit)
    tl.store(found + tile, seen)


@jit
def get(words: tl.tensor, at: tl.tensor, length: tl.tensor, size: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the `length` (0 to 63) bits from `at` on, as uint64; `size` is the number of words."""
    word = at >> 5
    shift = (at & 31).to(tl.uint64)
    w0 = tl.load(words + word, mask=mask & (word < size), other=0).to(tl.uint64) & 0xFFFFFFFF
    w1 = tl.load(words + (word + 1), mask=mask & (word + 1 < size), other=0).to(tl.uint64) & 0xFFFFFFFF
    w2 = tl.load(words + (word + 2), mask=mask & (word + 2 < size), other=0).to(tl.uint64) & 0xFFFFFFFF
    value = (w0 | w1 << 32) >> shift | w2 << 32 << (32 - shift)
    one = tl.full(at.shape, 1, tl.uint64)
    return value & ((one << length.to(tl.uint64)) - one)


@jit
def decode(
    words: tl.tensor,
    highs: tl.tensor,
    gammas: tl.tensor,
    tile_of: tl.tensor,
    tile_table: tl.tensor,
    positions: tl.tensor,
    steps: tl.tensor,
    bad: tl.tensor,
    changed: tl.tensor,
    tiles: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decode each change; the rows of `tile_table` are: first change, n, s, l, first bit, first element, elements."""
    block = tl.program_id(0).to(tl.int64)
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < changed
    row = tile_table + tl.load(tile_of + k, mask=inside, other=0)
    tiles_wide = tl.zeros((1,), tl.int64) + tiles
    j = k - tl.load(row, mask=inside, other=0)
    n = tl.load(row + tiles_wide, mask=inside, other=0)
    s = tl.load(row + 2 * tiles_wide, mask=inside, other=0)
    low_bits = tl.load(row + 3 * tiles_wide, mask=inside, other=0)
    low = tl.load(row + 4 * tiles_wide, mask=inside, other=0)
    start = tl.load(row + 5 * tiles_wide, mask=inside, other=0)
    elements = tl.load(row + 6 * tiles_wide, mask=inside, other=0)
    sign = low + n * low_bits + n + ((elements - 1) >> low_bits)
    mantissa = sign + 2 * n + s

    high = tl.load(highs + k, mask=inside, other=0) - j
    p = high << low_bits | get(words, low + j * low_bits, low_bits, size, inside).to(tl.int64)
    tl.store(positions + k, start + p, mask=inside)

    total = tl.load(gammas + k, mask=inside, other=0) - j
    before = tl.load(gammas + (k - 1), mask=inside & (j > 0), other=0) - j + 1
    before = tl.where(j > 0, before, 0)
    bucket = total - before
    fits = bucket < WIDTH
    rest = get(words, mantissa + before, tl.minimum(bucket, 63), size, inside & fits)
    negative = get(words, sign + j, tl.full((BLOCK,), 1, tl.int64), size, inside) != 0
    fits = fits & ((bucket < WIDTH - 1) | (negative & (rest == 0)))
    value = (rest | (tl.full((BLOCK,), 1, tl.uint64) << tl.minimum(bucket, 63).to(tl.uint64))).to(tl.int64)
    tl.store(steps + k, tl.where(negative, -value, value).to(steps.dtype.element_ty), mask=inside)
    tl.store(bad + block, tl.sum((inside & ((p >= elements) | ~fits)).to(tl.int32)))
