"""Cases for every path of every kernel, and memory that is never clean."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

INT_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = ["empty", "one_equal", "one_changed", "none", "all", "sparse", "half", "far", "extremes", "clustered"]
_SIZES = {"empty": 0, "one_equal": 1, "one_changed": 1, "all": 2501}


class Pair(NamedTuple):
    """New and old bits, intw[n]."""

    new: Tensor
    old: Tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns: code that relies on clean memory fails."""
    clean = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        t = clean(*args, **kwargs)
        t.view(torch.uint8).fill_(0xA5) if t.numel() and t.is_contiguous() else None
        return t

    monkeypatch.setattr(torch, "empty", poisoned)


def make_pair(width: int, kind: str) -> Pair:
    """Build one case; sizes are odd so that lanes, blocks and tiles end in the middle."""
    generator = torch.Generator().manual_seed(1000 * width + KINDS.index(kind))
    dtype, limits = INT_OF_WIDTH[width], torch.iinfo(INT_OF_WIDTH[width])
    size = _SIZES.get(kind, 5003)

    def anything(count: int) -> Tensor:
        return torch.randint(limits.min, limits.max, (count,), dtype=dtype, generator=generator)

    old = anything(size)
    density = {"sparse": 0.012, "half": 0.5, "far": 0.03}.get(kind, 0.0)
    changed = torch.rand(size, generator=generator) < density
    if kind in ("all", "one_changed"):
        changed[:] = True
    if kind == "clustered":
        changed[700:1400] = True
        changed[-1] = True
    steps = torch.ones(size, dtype=dtype)
    steps[torch.rand(size, generator=generator) < 0.5] = -1
    if kind in ("far", "all"):
        steps = anything(size) | 1
    if kind == "extremes":
        changed[::97] = True
        extremes = torch.tensor([limits.min, limits.max, limits.min + 1, 1, -1, limits.max // 2 + 1], dtype=dtype)
        steps = extremes.repeat(size // 6 + 1)[:size]
    return Pair(torch.where(changed, old + steps, old), old)


@pytest.fixture(params=[(w, k) for w in INT_OF_WIDTH for k in KINDS], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    """Every width with every kind of change."""
    return make_pair(*request.param)


@pytest.fixture(params=list(INT_OF_WIDTH))
def sparse_pair(request: pytest.FixtureRequest) -> Pair:
    """Every width, sparsely changed."""
    return make_pair(request.param, "sparse")
