"""Apply steps, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

jit: Callable[[Callable[..., None]], Any] = triton.jit

BLOCK = 1024


def scatter_add_(live: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See sparrowrl.kernels.scatter.scatter_add_; positions are within `live`."""
    add[(triton.cdiv(positions.numel(), BLOCK),)](live, positions, steps, positions.numel(), BLOCK)


@jit
def add(live: tl.tensor, positions: tl.tensor, steps: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Add steps[k] to live[positions[k]]."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    to = live + tl.load(positions + k, mask=inside, other=0)
    value = tl.load(to, mask=inside, other=0) + tl.load(steps + k, mask=inside, other=0)
    tl.store(to, value, mask=inside)
