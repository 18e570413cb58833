"""Fingerprints, as plain torch: int64 arithmetic wraps, which is arithmetic modulo 2^64."""

from __future__ import annotations

import torch
from torch import Tensor


def fingerprint(bits: Tensor, seed: int, start: int, row_length: int, stride: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint."""
    k = torch.arange(bits.numel(), device=bits.device)
    return _terms(start + k // row_length * stride + k % row_length, bits, seed).sum()


def fingerprint_at(live: Tensor, positions: Tensor, indices: Tensor, seed: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint_at."""
    return _terms(indices, live[positions], seed).sum()


def fingerprint_each(bits: Tensor, indices: Tensor, counts: Tensor, seeds: Tensor) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint_each."""
    running = _terms(indices, bits, seeds.repeat_interleave(counts)).cumsum(0)
    ends = torch.nn.functional.pad(running, (1, 0))[counts.cumsum(0)]
    return ends - torch.nn.functional.pad(ends[:-1], (1, 0)) if ends.numel() else ends


def _terms(indices: Tensor, bits: Tensor, seed: int | Tensor) -> Tensor:
    width = bits.element_size()
    unsigned = bits.long() if width == 8 else bits.long() & ((1 << 8 * width) - 1)
    z = (signed(seed) if isinstance(seed, int) else seed) + (indices + 1) * signed(0x9E3779B97F4A7C15) + unsigned
    z = (z ^ _shifted_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted_right(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shifted_right(z, 31)


def _shifted_right(z: Tensor, by: int) -> Tensor:
    """Shift as unsigned: zeros come in at the top."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def signed(value: int) -> int:
    """Return the int64 with the bits of `value`, a u64."""
    return value - (1 << 64) if value >= 1 << 63 else value
