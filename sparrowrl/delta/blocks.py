"""Blocks: what one segment says about one box of one tensor, before encoding and after decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparrowrl.delta.box import Box


@dataclass(frozen=True, slots=True, eq=False)
class SparseBlock:
    """The changed weights of a box.

    `positions` int64[n], ascending and distinct, in the box's own numbering; `steps` intw[n], new bits minus old bits
    modulo 2^(8w), none of them 0.
    """

    tensor: int
    box: Box
    positions: torch.Tensor
    steps: torch.Tensor

    @property
    def count(self) -> int:
        """Number of changed weights."""
        return self.positions.numel()


@dataclass(frozen=True, slots=True, eq=False)
class DenseBlock:
    """All weights of a box: `bits` intw[box.elements], in the box's own numbering."""

    tensor: int
    box: Box
    bits: torch.Tensor

    @property
    def count(self) -> int:
        """Number of weights."""
        return self.bits.numel()


Block = SparseBlock | DenseBlock
