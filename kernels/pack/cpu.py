"""Tile bodies, on the CPU: one pass measures the tiles, one writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.cpython.unsafe.numbers import leading_zeros
from numpy.typing import NDArray
from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.compiled import compiled, i64, u64
from sparrowrl.kernels.pack import Packed

ONE = u64(1)
SIX = u64(6)
LAST = u64(63)


def pack(positions: Tensor, steps: Tensor, elements: int, tile_log2: int) -> Packed:
    """See sparrowrl.kernels.pack.pack."""
    tiles = -(-elements // (1 << tile_log2))
    counts, buckets = torch.zeros(tiles, dtype=torch.int32), torch.zeros(tiles, dtype=torch.int32)
    arrays = positions.numpy(), steps.numpy(), counts.numpy(), buckets.numpy(), elements, tile_log2
    words = _measure(*arrays)
    if words < 0:
        raise LayoutError(f"expected distinct ascending positions below {elements} and no zero step: mend the caller")
    # Bodies are written as lanes of 64 bits; one lane more lets a number that ends a lane spill without a check.
    lanes = torch.zeros(words // 2 + 2, dtype=torch.int64)
    _write(*arrays, lanes.numpy().view(np.uint64))
    return Packed(counts, buckets, lanes.view(torch.int32)[:words])


@compiled
def _bucket(step: int) -> Any:
    """Return floor(log2 |step|)."""
    magnitude = u64(step) if step > 0 else u64(0) - u64(step)
    return 63 - i64(leading_zeros(magnitude))


@compiled
def low_bits_of(size: int, n: int) -> Any:
    """Return l of a tile of `size` elements with n > 0 changes."""
    return 63 - i64(leading_zeros(u64(size // n)))


@compiled
def words_of(size: int, n: int, s: int) -> Any:
    """Return the words of the body of a tile."""
    if n == 0:
        return 0
    low_bits = low_bits_of(size, n)
    return (n * low_bits + n + ((size - 1) >> low_bits) + n + n + s + s + 31) >> 5


@compiled
def _measure(
    positions: NDArray[np.int64],
    steps: NDArray[Any],
    counts: NDArray[np.int32],
    buckets: NDArray[np.int32],
    elements: int,
    tile_log2: int,
) -> int:
    """Fill counts and buckets; return the number of words, or -1 if the input is not as promised."""
    before = -1
    for k in range(positions.size):
        p = positions[k]
        if p <= before or p >= elements or steps[k] == 0:
            return -1
        before = p
        counts[p >> tile_log2] += 1
        buckets[p >> tile_log2] += _bucket(i64(steps[k]))
    words = 0
    for tile in range(counts.size):
        size = min(1 << tile_log2, elements - (tile << tile_log2))
        words += words_of(size, i64(counts[tile]), i64(buckets[tile]))
    return words


@compiled
def _put(lanes: NDArray[np.uint64], at: int, value: np.uint64) -> None:
    """Or `value` into the bits from `at` on; a value without bits above what was kept free for it."""
    lane, shift = at >> 6, u64(at) & LAST
    lanes[lane] |= value << shift
    lanes[lane + 1] |= (value >> ONE) >> (LAST - shift)


@compiled
def _set(lanes: NDArray[np.uint64], at: int) -> None:
    lanes[at >> 6] |= ONE << (u64(at) & LAST)


@compiled
def _write(
    positions: NDArray[np.int64],
    steps: NDArray[Any],
    counts: NDArray[np.int32],
    buckets: NDArray[np.int32],
    elements: int,
    tile_log2: int,
    lanes: NDArray[np.uint64],
) -> None:
    first = at = 0
    for tile in range(counts.size):
        n = i64(counts[tile])
        if n == 0:
            continue
        start = tile << tile_log2
        size = min(1 << tile_log2, elements - start)
        low_bits = low_bits_of(size, n)
        low_mask = (1 << low_bits) - 1
        high = at + n * low_bits
        sign = high + n + ((size - 1) >> low_bits)
        gamma = sign + n
        mantissa = gamma + n + i64(buckets[tile])
        total = 0
        for k in range(n):
            p = positions[first + k] - start
            _put(lanes, at + k * low_bits, u64(p & low_mask))
            _set(lanes, high + (p >> low_bits) + k)
            step = i64(steps[first + k])
            magnitude = u64(step)
            if step < 0:
                magnitude = u64(0) - magnitude
                _set(lanes, sign + k)
            bucket = _bucket(step)
            if bucket:
                _put(lanes, mantissa + total, magnitude ^ (ONE << u64(bucket)))
                total += bucket
            _set(lanes, gamma + k + total)
        first += n
        at = (mantissa + total + 31) >> 5 << 5
