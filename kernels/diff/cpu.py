"""What changed, on the CPU.

Old and new are compared in lanes of 64 bits, since most lanes are equal; the elements of a lane that differs are all
written at the end of the output, which moves on only past those that changed. So the one branch is rarely taken and
the loop runs at the speed of memory while little has changed.
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


def diff(new: Tensor, old: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.diff.diff."""
    total = old.numel()
    # The output grows by what was seen so far. Pages that are never written cost no memory.
    positions = torch.empty(total // 64 + 1024, dtype=torch.int64)
    steps = torch.empty(positions.numel(), dtype=old.dtype)
    start = found = 0
    for bits in wire_chunks(new, wire_dtype, CHUNK):
        left, right = bits.numpy(), old[start : start + bits.numel()].numpy()
        pair = left, right, _lanes(left), _lanes(right)
        done = 0
        while True:
            done, found = _diff(*pair, done, start, positions.numpy(), steps.numpy(), found)
            if done == bits.numel():
                break
            expected = found * total // max(start + done, 1)
            positions, steps = _grown(positions, found, expected), _grown(steps, found, expected)
        start += bits.numel()
    return positions[:found], steps[:found]


def _lanes(elements: NDArray[Any]) -> NDArray[np.uint64]:
    per_lane = 8 // elements.itemsize
    return elements[: elements.size // per_lane * per_lane].view(np.uint64)


def _grown(t: Tensor, used: int, expected: int) -> Tensor:
    larger = torch.empty(max(used * 3 // 2, expected * 17 // 16) + 1024, dtype=t.dtype)
    larger[:used] = t[:used]
    return larger


@compiled
def _diff(
    new: NDArray[Any],
    old: NDArray[Any],
    new_lanes: NDArray[np.uint64],
    old_lanes: NDArray[np.uint64],
    done: int,
    start: int,
    positions: NDArray[np.int64],
    steps: NDArray[Any],
    found: int,
) -> tuple[int, int]:
    """Go on from element `done` until the end or until the output may be full; return (done, found)."""
    per_lane = 8 // new.itemsize
    room = positions.size - per_lane
    for lane in range(done // per_lane, new_lanes.size):
        if new_lanes[lane] != old_lanes[lane]:
            if found > room:
                return lane * per_lane, found
            for k in range(lane * per_lane, lane * per_lane + per_lane):
                positions[found] = start + k
                steps[found] = new[k] - old[k]
                found += i64(new[k] != old[k])
    if found > room:
        return new_lanes.size * per_lane, found
    for k in range(new_lanes.size * per_lane, new.size):
        positions[found] = start + k
        steps[found] = new[k] - old[k]
        found += i64(new[k] != old[k])
    return new.size, found
