"""Tile bodies, as Python integers: bit i of the integer is bit i of the body."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrowrl.kernels.pack import Packed


def pack(positions: Tensor, steps: Tensor, elements: int, tile_log2: int) -> Packed:
    """See sparrowrl.kernels.pack.pack."""
    counts, buckets, words = [], [], []
    for start in range(0, elements, 1 << tile_log2):
        size = min(1 << tile_log2, elements - start)
        inside = (positions >= start) & (positions < start + size)
        ps, ds = (positions[inside] - start).tolist(), steps[inside].tolist()
        s, bits, body = _tile(ps, ds, size) if ps else (0, 0, 0)
        counts.append(len(ps))
        buckets.append(s)
        words += [(body >> i) & 0xFFFF_FFFF for i in range(0, bits, 32)]
    as_int32 = [w - (1 << 32) if w >= 1 << 31 else w for w in words]
    return Packed(*(torch.tensor(x, dtype=torch.int32, device=steps.device) for x in (counts, buckets, as_int32)))


def _tile(ps: list[int], ds: list[int], size: int) -> tuple[int, int, int]:
    """Return (s, number of bits, body) of one tile."""
    n = len(ps)
    low_bits = (size // n).bit_length() - 1
    high_at = n * low_bits
    sign_at = high_at + n + ((size - 1) >> low_bits)
    gamma_at = sign_at + n
    magnitudes = [abs(d) for d in ds]
    s = sum(m.bit_length() - 1 for m in magnitudes)
    mantissa_at = gamma_at + n + s
    body = total = 0
    for k, (p, d, m) in enumerate(zip(ps, ds, magnitudes, strict=True)):
        bucket = m.bit_length() - 1
        body |= (p & ((1 << low_bits) - 1)) << (k * low_bits)
        body |= 1 << (high_at + (p >> low_bits) + k)
        body |= (d < 0) << (sign_at + k)
        body |= (m - (1 << bucket)) << (mantissa_at + total)
        total += bucket
        body |= 1 << (gamma_at + k + total)
    return s, mantissa_at + s, body
