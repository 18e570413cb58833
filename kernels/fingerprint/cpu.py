"""Fingerprints, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparrowrl.kernels.compiled import compiled, u64

GOLDEN = u64(0x9E3779B97F4A7C15)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def fingerprint(bits: Tensor, seed: int, start: int, row_length: int, stride: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint."""
    return _scalar(_fingerprint(_unsigned(bits), u64(seed), start, row_length, stride))


def fingerprint_at(live: Tensor, positions: Tensor, indices: Tensor, seed: int) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint_at; positions are within `live`."""
    return _scalar(_fingerprint_at(_unsigned(live), positions.numpy(), indices.numpy(), u64(seed)))


def fingerprint_each(bits: Tensor, indices: Tensor, counts: Tensor, seeds: Tensor) -> Tensor:
    """See sparrowrl.kernels.fingerprint.fingerprint_each."""
    sums = torch.zeros(counts.numel(), dtype=torch.int64)
    _fingerprint_each(_unsigned(bits), indices.numpy(), counts.numpy(), seeds.numpy(), sums.numpy())
    return sums


def _unsigned(bits: Tensor) -> NDArray[Any]:
    return bits.numpy().view(_UNSIGNED[bits.element_size()])


def _scalar(total: np.uint64) -> Tensor:
    return torch.tensor(u64(total).astype(np.int64).item(), dtype=torch.int64)


@compiled
def _mix(z: np.uint64) -> Any:
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


@compiled
def _fingerprint(bits: NDArray[Any], seed: np.uint64, start: int, row_length: int, stride: int) -> Any:
    total = u64(0)
    for first in range(0, bits.size, row_length):
        index = start + first // row_length * stride
        point = seed + u64(index + 1) * GOLDEN
        for k in range(first, min(first + row_length, bits.size)):
            total += _mix(point + u64(bits[k]))
            point += GOLDEN
    return total


@compiled
def _fingerprint_at(
    live: NDArray[Any], positions: NDArray[np.int64], indices: NDArray[np.int64], seed: np.uint64
) -> Any:
    total = u64(0)
    for k in range(positions.size):
        total += _mix(seed + u64(indices[k] + 1) * GOLDEN + u64(live[positions[k]]))
    return total


@compiled
def _fingerprint_each(
    bits: NDArray[Any],
    indices: NDArray[np.int64],
    counts: NDArray[np.int64],
    seeds: NDArray[np.int64],
    sums: NDArray[np.int64],
) -> None:
    k = 0
    for group in range(counts.size):
        total = u64(0)
        for _ in range(counts[group]):
            total += _mix(u64(seeds[group]) + u64(indices[k] + 1) * GOLDEN + u64(bits[k]))
            k += 1
        sums[group] = np.int64(total)
