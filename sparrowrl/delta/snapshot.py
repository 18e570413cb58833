"""A trainer rank's copy of the bits that it last published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from sparrowrl.delta.apply import fingerprint_of, wire_bits
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import U64_MASK, Layout
from sparrowrl.delta.segment import choose, may_be_dense
from sparrowrl.delta.shard import FlatShard, LocalShard, local_shard
from sparrowrl.errors import LayoutError
from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.fingerprint import fingerprint_at, tensor_seed
from sparrowrl.kernels.scatter import scatter_add_

NamedTensors = Iterable[tuple[str, torch.Tensor | FlatShard]]


@dataclass(slots=True, eq=False)
class Part:
    """This rank's part of a tensor: `bits` intw[box.elements], None if an earlier rank publishes the same part."""

    box: Box
    first: bool
    bits: torch.Tensor | None
    fingerprint: int


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """How this rank's part of a tensor changed: how many weights, its fingerprint (u64) before and after."""

    number: int
    block: Block
    changed: int
    before: int
    after: int


class Snapshot:
    """The bits, in wire dtype and on the shards' devices, of the parts of `layout` that this rank publishes."""

    def __init__(self, named: NamedTensors, wire_dtype: torch.dtype | None, rank: int) -> None:
        """Copies the bits and sums the fingerprints.

        Raises LayoutError for no tensors, two of one name, or a dtype or placement that cannot be published.
        """
        self._wire_dtype = wire_dtype
        self._rank = rank
        self._moves: list[tuple[int, SparseBlock | LocalShard, int]] = []
        specs, parts = [], dict[str, Part]()
        for name, tensor in _pairs(named):
            shard = local_shard(name, tensor, wire_dtype, rank)
            specs.append(shard.spec)
            bits = wire_bits(shard.local, shard.spec.torch_dtype)
            total = fingerprint_of(bits, tensor_seed(name), shard.box)
            parts[name] = Part(shard.box, shard.first, bits.clone() if shard.first else None, total)
        if not specs:
            raise LayoutError("expected the model's tensors, got none; was this iterator used up before?")
        self.layout = Layout(specs)
        self.parts = [parts[spec.name] for spec in self.layout.tensors]

    def changes(self, named: NamedTensors) -> Iterator[Change]:
        """Compare new weights with the snapshot, which stays as it is; tensors without a change are left out.

        Raises LayoutError, perhaps only at the end, if the tensors are not those of the layout: each once, with their
        shapes, dtypes and shardings.
        """
        self._moves.clear()
        seen = set[int]()
        for name, tensor in _pairs(named):
            number = self.layout.number(name)
            if number in seen:
                raise LayoutError(f"expected distinct tensor names, got {name!r} twice")
            seen.add(number)
            shard = local_shard(name, tensor, self._wire_dtype, self._rank)
            part = self.parts[number]
            if shard.spec != self.layout.tensors[number] or (shard.box, shard.first) != (part.box, part.first):
                was = self.layout.tensors[number]
                raise LayoutError(
                    f"{name}: expected {was.dtype} {list(was.shape)} held as {part.box}, as when publishing began, got "
                    f"{shard.spec.dtype} {list(shard.spec.shape)} as {shard.box}; make a new Publisher"
                )
            if part.bits is not None:
                yield from self._compare(number, part.bits, shard)
        if len(seen) < len(self.layout):
            missing = [spec.name for number, spec in enumerate(self.layout.tensors) if number not in seen]
            raise LayoutError(f"expected all {len(self.layout)} tensors, {len(missing)} are missing: {missing[:5]}")

    def move(self) -> None:
        """Go to the state that `changes` last saw; the weights must not have changed since."""
        for number, how, fingerprint in self._moves:
            part = self.parts[number]
            assert part.bits is not None
            if isinstance(how, SparseBlock):
                scatter_add_(part.bits, how.positions, how.steps)
            else:
                part.bits.copy_(wire_bits(how.local, how.spec.torch_dtype))
            part.fingerprint = fingerprint
        self._moves.clear()

    def stay(self) -> None:
        """Forget what `changes` last saw."""
        self._moves.clear()

    def whole(self) -> Iterator[DenseBlock]:
        """All that this rank publishes, as dense blocks over the snapshot's own memory."""
        for number, part in enumerate(self.parts):
            if part.bits is not None and part.bits.numel():
                yield DenseBlock(number, part.box, part.bits)

    def _compare(self, number: int, old: torch.Tensor, shard: LocalShard) -> Iterator[Change]:
        positions, steps = diff(shard.local, old, shard.spec.torch_dtype)
        if not positions.numel():
            return
        before, seed = self.parts[number].fingerprint, self.layout.seeds[number]
        sparse = SparseBlock(number, shard.box, positions, steps)
        block: Block = sparse
        if may_be_dense(sparse):
            block = choose(sparse, wire_bits(shard.local, shard.spec.torch_dtype))
        if isinstance(block, DenseBlock):
            after = fingerprint_of(block.bits, seed, shard.box)
            self._moves.append((number, shard, after))
        else:
            indices = shard.box.flat(positions)
            gone = fingerprint_at(old, positions, indices, seed)
            come = fingerprint_at(old[positions] + steps, torch.arange(len(steps), device=old.device), indices, seed)
            after = (before + int(come - gone)) & U64_MASK
            self._moves.append((number, sparse, after))
        yield Change(number, block, positions.numel(), before, after)


def _pairs(named: NamedTensors) -> NamedTensors:
    if isinstance(named, Mapping):
        raise LayoutError("expected pairs of name and tensor, as of model.named_parameters(), got a dict: add .items()")
    return named
