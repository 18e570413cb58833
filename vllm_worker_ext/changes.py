"""Changes of live weights: what a block of a delta or anchor means for one rank's tensors, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrowrl.delta.blocks import Block, SparseBlock
from sparrowrl.delta.layout import U64_MASK, Layout
from sparrowrl.errors import FingerprintMismatch
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at, fingerprint_each
from sparrowrl.kernels.fingerprint.reference import signed
from sparrowrl.kernels.scatter import scatter_add_
from sparrowrl.vllm_worker_ext.piece import Piece
from sparrowrl.vllm_worker_ext.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New values of some weights of one tensor in one live storage.

    `where` are their runtime positions (a slice, or int64[n]) and `indices` their flat checkpoint indices (the first
    one, if `where` is a slice). Either `steps` intw[n] are added to what is there, or `bits` intw[n] replace it. A
    change of an `alias` is what its memory's owner, which writes it, does to it.
    """

    tensor: int
    live: int
    where: slice | Tensor
    indices: int | Tensor
    steps: Tensor | None
    bits: Tensor | None
    alias: bool = False

    @property
    def count(self) -> int:
        """How many weights change."""
        numbers = self.steps if self.steps is not None else self.bits
        assert numbers is not None
        return numbers.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Changes of one live storage that are written, proved and undone as one, whatever tensors they belong to.

    `before` and `after` are the sums over its weights, as a fingerprint of seed 0 by runtime position makes them, that
    must be read back when it is undone, or done.
    """

    tensors: frozenset[int]
    live: int
    where: slice | Tensor
    steps: Tensor | None
    bits: Tensor | None
    before: int
    after: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(t.nbytes for t in (self.where, self.steps, self.bits) if isinstance(t, Tensor))

    def do(self, live: Tensor) -> Tensor | None:
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
        """Take `do` back."""
        if old is not None:
            live[self.where] = old
        else:
            assert self.steps is not None and isinstance(self.where, Tensor)
            scatter_add_(live, self.where, -self.steps)

    def check(self, live: Tensor, expected: int, layout: Layout) -> None:
        """Raise FingerprintMismatch unless the live bits sum to `expected`."""
        got = _sum(live[self.where] if isinstance(self.where, slice) else live, self.where)
        if got != expected:
            names = ", ".join(layout.tensors[n].name for n in sorted(self.tensors)[:3])
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            raise FingerprintMismatch(
                f"{names}{more}: expected the changed weights to sum to {expected:#x}, read back {got:#x}"
            )


def changes_of(block: Block, placement: Placement) -> Iterator[Change]:
    """What the block changes here: one change for each piece of its tensor that it meets, and those of aliases.

    A block of an alias changes nothing: what comes of it is decided by the block of its owner.
    """
    if block.tensor in placement.aliases:
        return
    aliases = [alias for alias, owner in placement.aliases.items() if owner == block.tensor]
    for piece in placement.pieces[block.tensor]:
        change = _of_piece(block, piece, placement.live[piece.live].device)
        if change.count:
            yield change
            for alias in aliases:
                yield replace(change, tensor=alias, alias=True)


def _of_piece(block: Block, piece: Piece, device: torch.device) -> Change:
    if isinstance(block, SparseBlock):
        indices = block.box.flat(block.positions)
        chosen, where = piece.locate(indices)
        steps = block.steps[chosen].to(device)
        return Change(block.tensor, piece.live, where.to(device), indices[chosen].to(device), steps, None)
    if piece.contiguous and block.box.contiguous:
        first = max(piece.source, block.box.start)
        last = max(min(piece.source + piece.elements, block.box.end), first)
        target = piece.target + first - piece.source
        bits = block.bits[first - block.box.start : last - block.box.start].to(device)
        return Change(block.tensor, piece.live, slice(target, target + last - first), first, None, bits)
    indices = block.box.flat(torch.arange(block.count, device=block.bits.device))
    chosen, where = piece.locate(indices)
    bits = block.bits[chosen].to(device)
    return Change(block.tensor, piece.live, where.to(device), indices[chosen].to(device), None, bits)


def parts(changes: list[Change], placement: Placement) -> tuple[dict[int, int], dict[int, int]]:
    """What the changed weights add to the fingerprints, by tensor number: as they are now, and as they will be."""
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    scattered: dict[tuple[int, bool], list[Change]] = {}
    for change in changes:
        if isinstance(change.where, slice):
            seed, live = placement.layout.seeds[change.tensor], placement.live[change.live]
            assert isinstance(change.indices, int) and change.bits is not None
            _add(before, change.tensor, int(fingerprint(live[change.where], seed, change.indices)))
            _add(after, change.tensor, int(fingerprint(change.bits, seed, change.indices)))
        else:
            scattered.setdefault((change.live, change.steps is None), []).append(change)
    for (number, _), some in scattered.items():
        live = placement.live[number]
        indices = torch.cat([change.indices for change in some])  # type: ignore[misc]
        counts = torch.tensor([change.count for change in some], device=live.device)
        seeds = torch.tensor([signed(placement.layout.seeds[change.tensor]) for change in some], device=live.device)
        where, steps, bits = _joined(some)
        old, new = live[where], _new(live, where, steps, bits)
        for totals, numbers in ((before, old), (after, new)):
            sums = fingerprint_each(numbers, indices, counts, seeds).tolist()
            for change, value in zip(some, sums, strict=True):
                _add(totals, change.tensor, value)
    return before, after


def _add(totals: dict[int, int], tensor: int, value: int) -> None:
    totals[tensor] = (totals.get(tensor, 0) + value) & U64_MASK


def _joined(some: list[Change]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Positions, and steps or bits, of changes of scattered elements that are all of one kind."""
    where = torch.cat([change.where for change in some])  # type: ignore[misc]
    if some[0].steps is None:
        return where, None, torch.cat([change.bits for change in some])  # type: ignore[misc]
    return where, torch.cat([change.steps for change in some]), None  # type: ignore[misc]


def as_writes(changes: Iterable[Change], live: tuple[Tensor, ...]) -> list[Write]:
    """The same changes, those of scattered positions joined by storage."""
    joined: dict[tuple[int, bool], list[Change]] = {}
    writes: list[Write] = []
    for change in (change for change in changes if not change.alias):
        if isinstance(change.where, slice):
            writes.append(_write([change], change.where, None, change.bits, live[change.live]))
        else:
            joined.setdefault((change.live, change.steps is None), []).append(change)
    for (number, _), some in joined.items():
        writes.append(_write(some, *_joined(some), live[number]))
    return writes


def _write(some: list[Change], where: slice | Tensor, steps: Tensor | None, bits: Tensor | None, live: Tensor) -> Write:
    new = _new(live, where, steps, bits)
    before, after = _sum(live[where], where, here=True), _sum(new, where, here=True)
    tensors = frozenset(change.tensor for change in some)
    return Write(tensors, some[0].live, where, steps, bits, before, after)


def _new(live: Tensor, where: slice | Tensor, steps: Tensor | None, bits: Tensor | None) -> Tensor:
    new = bits if steps is None else live[where] + steps
    assert new is not None
    return new


def _sum(bits: Tensor, where: slice | Tensor, here: bool = False) -> int:
    """The fingerprint, by runtime position: of all `bits` (`here`, or a slice), or of those at `where`."""
    if isinstance(where, slice):
        return int(fingerprint(bits, 0, where.start)) & U64_MASK
    at = torch.arange(bits.numel(), device=bits.device) if here else where
    return int(fingerprint_at(bits, at, where, 0)) & U64_MASK
