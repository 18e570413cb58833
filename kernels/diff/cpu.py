"""What changed, on the CPU.

Old and new are compared in lanes of 64 bits. Whether a lane differs is hard to foretell for the processor, so no branch
asks it: a number is always written at the end of a list, which moves on only if that number belongs there. First the
lanes of a block that differ are listed, then, of these alone, the elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparrowrl.kernels.bits import wire_chunks
from sparrowrl.kernels.compiled import compiled, i64

# What is cast or made contiguous is copied in chunks of this many elements, which stay in the cache.
CHUNK = 1 << 18
# Lanes that are looked at together.
BLOCK = 512


def diff(new: Tensor, old: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.diff.diff."""
    total, offsets = old.numel(), tuple(range(8 // old.element_size()))
    # The output grows by what was seen so far. Pages that are never written cost no memory.
    positions = torch.empty(total // 64 + 8 * BLOCK, dtype=torch.int64)
    steps = torch.empty(positions.numel(), dtype=old.dtype)
    start = found = 0
    for bits in wire_chunks(new, wire_dtype, CHUNK):
        end = start + bits.numel()
        while start < end:
            left, right = bits[start - end :].numpy(), old[start:end].numpy()
            done, found = _diff(left, right, offsets, start, positions.numpy(), steps.numpy(), found)
            start += done
            if start < end:
                expected = found * total // max(start, 1)
                positions, steps = _grown(positions, found, expected), _grown(steps, found, expected)
    return positions[:found], steps[:found]


def _grown(t: Tensor, used: int, expected: int) -> Tensor:
    larger = torch.empty(max(used * 3 // 2, expected * 17 // 16) + 16 * BLOCK, dtype=t.dtype)
    larger[:used] = t[:used]
    return larger


@compiled
def _diff(
    new: NDArray[Any],
    old: NDArray[Any],
    offsets: tuple[int, ...],
    start: int,
    positions: NDArray[np.int64],
    steps: NDArray[Any],
    found: int,
) -> tuple[int, int]:
    """Compare until the end or until the output may be full; return (elements done, found).

    `offsets` counts the elements of a lane; a tuple, since its length is known when this is compiled.
    """
    per_lane = len(offsets)
    in_lanes = new.size // per_lane * per_lane
    new_lanes, old_lanes = new[:in_lanes].view(np.uint64), old[:in_lanes].view(np.uint64)
    room = positions.size - BLOCK * per_lane
    differing = np.empty(BLOCK, np.int64)
    for first in range(0, new_lanes.size, BLOCK):
        if found > room:
            return first * per_lane, found
        left, right = new_lanes[first : first + BLOCK], old_lanes[first : first + BLOCK]
        count = 0
        for i in range(left.size):
            differing[count] = first + i
            count += i64(left[i] != right[i])
        for i in range(count):
            for j in range(per_lane):
                k = differing[i] * per_lane + j
                positions[found] = start + k
                steps[found] = new[k] - old[k]
                found += i64(new[k] != old[k])
    if found > room:
        return in_lanes, found
    for k in range(in_lanes, new.size):
        positions[found] = start + k
        steps[found] = new[k] - old[k]
        found += i64(new[k] != old[k])
    return new.size, found
