"""Changes of live weights: what a block of a delta or anchor means for one rank's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrowrl.delta.blocks import Block, SparseBlock
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at
from sparrowrl.kernels.scatter import scatter_add_
from sparrowrl.vllm_worker_ext.placement import Piece, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New values of some weights of one tensor in one live storage.

    `where` are their runtime positions (a slice, or int64[n]) and `indices` their flat checkpoint indices (the first
    one, if `where` is a slice). Either `steps` intw[n] are added to what is there, or `bits` intw[n] replace it. A
    change of an `alias` is written by the tensor that owns the memory; here it is only proved.
    """

    tensor: int
    live: int
    where: slice | Tensor
    indices: int | Tensor
    steps: Tensor | None
    bits: Tensor | None
    alias: bool

    @property
    def count(self) -> int:
        """How many weights change."""
        numbers = self.steps if self.steps is not None else self.bits
        assert numbers is not None
        return numbers.numel()

    def write(self, live: Tensor) -> Tensor | None:
        """Change the live bits intw[N]; returns what `undo` needs besides: old bits, where new ones replaced them."""
        if self.steps is not None:
            assert isinstance(self.where, Tensor)
            scatter_add_(live, self.where, self.steps)
            return None
        assert self.bits is not None
        old = live[self.where].clone()
        live[self.where] = self.bits
        return old

    def undo(self, live: Tensor, old: Tensor | None) -> None:
        """Take `write` back."""
        if old is not None:
            live[self.where] = old
        else:
            assert self.steps is not None and isinstance(self.where, Tensor)
            scatter_add_(live, self.where, -self.steps)

    def proof(self, live: Tensor, seed: int) -> Tensor:
        """The part of the tensor's fingerprint that these weights make up as they are now: 0-d int64."""
        if isinstance(self.where, Tensor):
            assert isinstance(self.indices, Tensor)
            return fingerprint_at(live, self.where, self.indices, seed)
        assert isinstance(self.indices, int)
        return fingerprint(live[self.where], seed, self.indices)

    def expected_proof(self, live: Tensor, seed: int) -> Tensor:
        """What `proof` will be after `write`, computed beside the live weights."""
        new = live[self.where] + self.steps if self.steps is not None else self.bits
        assert new is not None
        if isinstance(self.indices, int):
            return fingerprint(new, seed, self.indices)
        return fingerprint_at(new, torch.arange(new.numel(), device=new.device), self.indices, seed)


def changes_of(block: Block, placement: Placement) -> Iterator[Change]:
    """What the block changes here: one change for each piece of its tensor that it meets."""
    for piece in placement.pieces[block.tensor]:
        change = _of_piece(block, piece, block.tensor in placement.aliases)
        if change.count:
            yield change


def _of_piece(block: Block, piece: Piece, alias: bool) -> Change:
    if isinstance(block, SparseBlock):
        indices = block.box.flat(block.positions)
        chosen, where = piece.locate(indices)
        return Change(block.tensor, piece.live, where, indices[chosen], block.steps[chosen], None, alias)
    if piece.contiguous and block.box.contiguous:
        first = max(piece.source, block.box.start)
        last = max(min(piece.source + piece.elements, block.box.end), first)
        target = piece.target + first - piece.source
        bits = block.bits[first - block.box.start : last - block.box.start]
        return Change(block.tensor, piece.live, slice(target, target + last - first), first, None, bits, alias)
    indices = block.box.flat(torch.arange(block.count, device=block.bits.device))
    chosen, where = piece.locate(indices)
    return Change(block.tensor, piece.live, where, indices[chosen], None, block.bits[chosen], alias)


def sums(changes: list[Change], proofs: list[Tensor]) -> dict[int, int]:
    """Fingerprint parts added up by tensor number, modulo 2^64."""
    totals: dict[int, int] = {}
    values = torch.stack(proofs).tolist() if proofs else []
    for change, value in zip(changes, values, strict=True):
        totals[change.tensor] = (totals.get(change.tensor, 0) + int(value)) % (1 << 64)
    return totals
