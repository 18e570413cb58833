"""Tile bodies decoded, on the CPU. Nothing is read or written before it is known to be in bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import NDArray
from torch import Tensor

from sparrowrl.errors import CorruptData
from sparrowrl.kernels.compiled import compiled, i64, u64
from sparrowrl.kernels.pack.cpu import low_bits_of, words_of

ZERO = u64(0)
ONE = u64(1)
LAST = u64(63)


def unpack(
    counts: Tensor, buckets: Tensor, words: Tensor, elements: int, tile_log2: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.unpack.unpack."""
    shape = counts.numpy(), buckets.numpy(), elements, tile_log2, 8 * dtype.itemsize - 1
    changed, expected = _measure(*shape)
    if expected != words.numel():
        raise CorruptData(f"expected {expected} words of bodies, got {words.numel()}: fetch the segment again")
    # Bodies are read as lanes of 64 bits; one lane more lets a number be read that ends a lane.
    lanes = torch.zeros(words.numel() // 2 + 2, dtype=torch.int64)
    lanes.view(torch.int32)[: words.numel()] = words
    positions, steps = torch.empty(changed, dtype=torch.int64), torch.empty(changed, dtype=dtype)
    bad = _read(*shape, lanes.numpy().view(np.uint64), positions.numpy(), steps.numpy())
    if bad >= 0:
        raise CorruptData(f"expected tile {bad} as pack writes it, got other bits: fetch the segment again")
    return positions, steps


@compiled
def _measure(
    counts: NDArray[np.int32], buckets: NDArray[np.int32], elements: int, tile_log2: int, limit: int
) -> tuple[int, int]:
    """Return (changed elements, words) that these tiles have; words are -1 if there can be no such tiles."""
    changed = words = 0
    for tile in range(counts.size):
        n, s = i64(counts[tile]), i64(buckets[tile])
        size = min(1 << tile_log2, elements - (tile << tile_log2))
        if n < 0 or n > size or s < 0 or s > n * limit:
            return 0, -1
        words += words_of(size, n, s)
        changed += n
    return changed, words


@compiled
def _get(lanes: NDArray[np.uint64], at: int, length: int) -> Any:
    """Return the `length` (0 to 63) bits from `at` on."""
    lane, shift = at >> 6, u64(at) & LAST
    both = (lanes[lane] >> shift) | ((lanes[lane + 1] << ONE) << (LAST - shift))
    return both & ((ONE << u64(length)) - ONE)


@compiled
def _lane_of(lanes: NDArray[np.uint64], lane: int, begin: int, end: int) -> Any:
    """Return lane number `lane` without the bits before bit `begin` and from bit `end` on."""
    x = lanes[lane]
    if lane == begin >> 6:
        x &= ~ZERO << (u64(begin) & LAST)
    if lane == end >> 6:
        x &= (ONE << (u64(end) & LAST)) - ONE
    return x


@compiled
def _positions(
    lanes: NDArray[np.uint64],
    low: int,
    high: int,
    end: int,
    low_bits: int,
    start: int,
    size: int,
    out: NDArray[np.int64],
) -> bool:
    """Decode Elias-Fano: low bits from bit `low` on, high bits from `high` to `end`."""
    k = 0
    before = -1
    for lane in range(high >> 6, (end + 63) >> 6):
        x = _lane_of(lanes, lane, high, end)
        while x:
            if k == out.size:
                return False
            bit = (lane << 6) + i64(trailing_zeros(x)) - high
            p = (bit - k) << low_bits | i64(_get(lanes, low + k * low_bits, low_bits))
            if p <= before or p >= size:
                return False
            before = p
            out[k] = start + p
            k += 1
            x &= x - ONE
    return k == out.size


@compiled
def _steps(lanes: NDArray[np.uint64], sign: int, gamma: int, mantissa: int, limit: int, out: NDArray[Any]) -> bool:
    """Decode Elias gamma: `gamma` ends where `mantissa` begins, `mantissa` has as many bits as `gamma` has zeros."""
    buckets = mantissa - gamma - out.size
    k = 0
    total = 0
    for lane in range(gamma >> 6, (mantissa + 63) >> 6):
        x = _lane_of(lanes, lane, gamma, mantissa)
        while x:
            if k == out.size:
                return False
            now = (lane << 6) + i64(trailing_zeros(x)) - gamma - k
            bucket = now - total
            if bucket > limit or now > buckets:
                return False
            negative = _get(lanes, sign + k, 1)
            rest = _get(lanes, mantissa + total, bucket)
            if bucket == limit and (rest or not negative):
                return False
            magnitude = (ONE << u64(bucket)) | rest
            out[k] = i64(ZERO - magnitude if negative else magnitude)
            total = now
            k += 1
            x &= x - ONE
    return k == out.size and total == buckets


@compiled
def _read(
    counts: NDArray[np.int32],
    buckets: NDArray[np.int32],
    elements: int,
    tile_log2: int,
    limit: int,
    lanes: NDArray[np.uint64],
    positions: NDArray[np.int64],
    steps: NDArray[Any],
) -> int:
    """Fill positions and steps; return the first tile that is corrupt, or -1."""
    first = low = 0
    for tile in range(counts.size):
        n, s = i64(counts[tile]), i64(buckets[tile])
        if n == 0:
            continue
        start = tile << tile_log2
        size = min(1 << tile_log2, elements - start)
        low_bits = low_bits_of(size, n)
        high = low + n * low_bits
        sign = high + n + ((size - 1) >> low_bits)
        gamma = sign + n
        mantissa = gamma + n + s
        end = mantissa + s
        here = slice(first, first + n)
        if not _positions(lanes, low, high, sign, low_bits, start, size, positions[here]):
            return tile
        if not _steps(lanes, sign, gamma, mantissa, limit, steps[here]):
            return tile
        low = (end + 31) >> 5 << 5
        if _get(lanes, end, low - end):
            return tile
        first += n
    return -1
