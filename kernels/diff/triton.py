"""What changed, on a GPU.

Old and new are read whole once, which leaves a bit per element; what changed is then read again by these bits, so that
each block can write its part in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrowrl.kernels.bits import wire_chunks

jit: Callable[[Callable[..., None]], Any] = triton.jit

# What is cast or made contiguous is copied in chunks of this many elements.
CHUNK = 1 << 26
# Elements of a block.
BLOCK = 2048


def diff(new: Tensor, old: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.diff.diff."""
    parts = []
    start = 0
    for bits in wire_chunks(new, wire_dtype, CHUNK):
        parts.append(_diff(bits, old[start : start + bits.numel()], start))
        start += bits.numel()
    if not parts:
        return old.new_empty(0, dtype=torch.int64), old.new_empty(0)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([positions for positions, _ in parts]), torch.cat([steps for _, steps in parts])


def _diff(new: Tensor, old: Tensor, start: int) -> tuple[Tensor, Tensor]:
    size, device = new.numel(), new.device
    blocks = triton.cdiv(size, BLOCK)
    marks = torch.empty(triton.cdiv(size, 32), dtype=torch.int32, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    mark[(blocks,)](new, old, marks, counts, size, BLOCK // 32)
    ends = counts.cumsum(0)
    found = int(ends[-1])
    positions = torch.empty(found, dtype=torch.int64, device=device)
    steps = torch.empty(found, dtype=new.dtype, device=device)
    if found:
        compact[(blocks,)](new, old, marks, ends - counts, positions, steps, size, start, BLOCK)
    return positions, steps


@jit
def mark(
    new: tl.tensor, old: tl.tensor, marks: tl.tensor, counts: tl.tensor, size: tl.tensor, WORDS: tl.constexpr
) -> None:
    """Set bit i of `marks` if element i differs; store how many of each block do."""
    block = tl.program_id(0).to(tl.int64)
    word = block * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 32)[None, :]
    i = word[:, None] * 32 + lane
    inside = i < size
    differs = tl.load(new + i, mask=inside, other=0) != tl.load(old + i, mask=inside, other=0)
    bits = differs.to(tl.int32)
    tl.store(marks + word, tl.sum(bits << lane, axis=1), mask=word * 32 < size)
    tl.store(counts + block, tl.sum(bits))


@jit
def compact(
    new: tl.tensor,
    old: tl.tensor,
    marks: tl.tensor,
    begins: tl.tensor,
    positions: tl.tensor,
    steps: tl.tensor,
    size: tl.tensor,
    start: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Store start + i and the step of each marked element i; those of a block from its place in `begins` on."""
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(marks + (i >> 5), mask=i < size, other=0)
    bit = (word >> (i & 31).to(tl.int32)) & 1
    marked = bit != 0
    to = tl.load(begins + block) + tl.cumsum(bit, 0) - bit
    step = tl.load(new + i, mask=marked, other=0) - tl.load(old + i, mask=marked, other=0)
    tl.store(positions + to, start + i, mask=marked)
    tl.store(steps + to, step, mask=marked)
