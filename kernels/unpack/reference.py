"""Tile bodies decoded, as Python integers: bit i of the integer is bit i of the body."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sparrowrl.errors import CorruptData
from sparrowrl.kernels.pack.reference import pack


def unpack(
    counts: Tensor, buckets: Tensor, words: Tensor, elements: int, tile_log2: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.unpack.unpack. What was decoded is encoded again: it must give the input."""
    positions: list[int] = []
    steps: list[int] = []
    rest = sum((w & 0xFFFF_FFFF) << (32 * i) for i, w in enumerate(words.tolist()))
    limit = 8 * dtype.itemsize - 1
    for tile, (n, s) in enumerate(zip(counts.tolist(), buckets.tolist(), strict=True)):
        start = tile << tile_log2
        size = min(1 << tile_log2, elements - start)
        if not (0 <= n <= size and 0 <= s <= n * limit):
            raise CorruptData(f"tile {tile}: expected 0 <= n <= {size} and 0 <= s <= {limit} n, got {n} and {s}")
        if n:
            ps, ds, bits = _tile(rest, n, s, size)
            positions += [start + p for p in ps]
            steps += ds
            rest >>= -(-bits // 32) * 32
    if not all(-(1 << limit) <= d < 1 << limit for d in steps):
        raise CorruptData(f"expected steps of {limit + 1} bits")
    if any(p >= q for p, q in pairwise(positions)):
        raise CorruptData("expected positions that ascend")
    ps_tensor, ds_tensor = torch.tensor(positions, dtype=torch.int64), torch.tensor(steps, dtype=dtype)
    again = pack(ps_tensor, ds_tensor, elements, tile_log2)
    if not all(torch.equal(x, y.cpu()) for x, y in zip(again, (counts, buckets, words), strict=True)):
        raise CorruptData("expected what pack writes, got other bits")
    return ps_tensor.to(words.device), ds_tensor.to(words.device)


def _tile(body: int, n: int, s: int, size: int) -> tuple[list[int], list[int], int]:
    """Return (positions, steps, number of bits) of the tile at the beginning of `body`."""
    low_bits = (size // n).bit_length() - 1
    high_at = n * low_bits
    sign_at = high_at + n + ((size - 1) >> low_bits)
    gamma_at = sign_at + n
    mantissa_at = gamma_at + n + s
    highs = _set_bits(body >> high_at, sign_at - high_at)
    gammas = _set_bits(body >> gamma_at, mantissa_at - gamma_at)
    if not len(highs) == len(gammas) == n:
        raise CorruptData(f"expected {n} set bits, got {len(highs)} and {len(gammas)}")
    ps, ds, before = [], [], 0
    for k in range(n):
        total = gammas[k] - k
        low = (body >> (k * low_bits)) & ((1 << low_bits) - 1)
        ps.append((highs[k] - k) << low_bits | low)
        bucket = total - before
        magnitude = 1 << bucket | (body >> (mantissa_at + before)) & ((1 << bucket) - 1)
        ds.append(-magnitude if (body >> (sign_at + k)) & 1 else magnitude)
        before = total
    return ps, ds, mantissa_at + s


def _set_bits(plane: int, length: int) -> list[int]:
    return [i for i in range(length) if (plane >> i) & 1]
