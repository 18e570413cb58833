"""One delta out of a chain of deltas, tensor by tensor.

Steps add up modulo 2^(8w) and those that come to zero drop out. Where the chain holds an element whole (a dense block),
the merged delta does too: what came before no longer matters, and later steps are added to those bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from sparrowrl.delta.apply import apply_block, box_view
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.layout import Layout
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.segment import SegmentPacker, decode_segment, tensors_in
from sparrowrl.errors import CorruptData, VersionNotFound
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.kernels.diff import diff

if TYPE_CHECKING:
    from sparrowrl.delta.journal import Journal


def merge(journal: Journal, base: int, target: int) -> tuple[Manifest, list[bytes]]:
    """The delta from `base` to `target` and its segments, in host memory; the same bytes whatever chain leads there.

    `changed` counts the weights that the merged delta carries; for a tensor with dense blocks that is an upper bound.
    Holds two integers per element of one tensor at a time. Raises VersionNotFound if no chain of deltas leads from
    `base` to `target` (an anchor may stand between), CorruptData if one does not fit the next.
    """
    _, deltas = journal.route(target, {base})
    if not deltas:
        raise VersionNotFound(f"merge {base} -> {target}: expected a target after the base; nothing to merge")
    manifests = [journal.manifest(delta.target, delta.name) for delta in deltas]
    for before, after in pairwise(manifests):
        if before.target_state != after.base_state or before.layout != after.layout:
            raise CorruptData(f"merge {base} -> {target}: {after.base} -> {after.target} does not fit the delta before")
    layout = journal.layout(manifests[0].layout)
    packer, segments, carried = SegmentPacker(layout), list[bytes](), dict[int, int]()
    for number, blocks in _by_tensor(journal, deltas, manifests, layout):
        total = _Total(layout, number)
        for block in blocks:
            total.add(block)
        for merged in total.blocks():
            carried[number] = carried.get(number, 0) + merged.count
            segments += packer.add(merged)
    segments += packer.flush()
    return _manifest(manifests, carried, segments), segments


class _Total:
    """What a chain does to one tensor: per element the sum of the steps or, where `whole`, the bits."""

    def __init__(self, layout: Layout, number: int) -> None:
        spec = layout.tensors[number]
        self._number = number
        self._sum = torch.zeros(spec.numel, dtype=INT_OF_WIDTH[spec.width])
        self._whole: torch.Tensor | None = None

    def add(self, block: Block) -> None:
        apply_block(self._sum, block)
        if isinstance(block, DenseBlock):
            if self._whole is None:
                self._whole = torch.zeros(self._sum.numel(), dtype=torch.bool)
            box_view(self._whole, block.box).fill_(True)

    def blocks(self) -> Iterator[Block]:
        """The merged blocks, none of them empty."""
        for start, end, whole in self._runs():
            box = Box(start, end - start, end - start, 1)
            if whole:
                yield DenseBlock(self._number, box, self._sum[start:end])
                continue
            part = self._sum[start:end]
            positions, steps = diff(part, torch.zeros_like(part))
            if positions.numel():
                yield SparseBlock(self._number, box, positions, steps)

    def _runs(self) -> list[tuple[int, int, bool]]:
        """The longest ranges [start, end) of elements that are all held whole, or all not."""
        if self._whole is None:
            return [(0, self._sum.numel(), False)]
        edges = [0, *(torch.diff(self._whole.view(torch.int8)).nonzero().reshape(-1) + 1).tolist(), self._sum.numel()]
        first = bool(self._whole[0])
        return [(a, b, first ^ bool(k % 2)) for k, (a, b) in enumerate(pairwise(edges))]


def _by_tensor(
    journal: Journal, deltas: list[ArtifactRef], manifests: list[Manifest], layout: Layout
) -> Iterator[tuple[int, Iterator[Block]]]:
    """Each tensor that the chain touches and its blocks, oldest delta first. A segment is decoded once, and forgotten
    after the last tensor that needs it.
    """
    places: dict[int, list[tuple[ArtifactRef, SegmentRef]]] = {}
    users: dict[tuple[ArtifactRef, SegmentRef], int] = {}
    for delta, manifest in zip(deltas, manifests, strict=True):
        for segment in manifest.segments:
            numbers = tensors_in(journal.segment(delta.target, delta.name, segment), layout)
            users[delta, segment] = len(numbers)
            for number in numbers:
                places.setdefault(number, []).append((delta, segment))
    decoded: dict[tuple[ArtifactRef, SegmentRef], list[Block]] = {}

    def blocks_of(number: int) -> Iterator[Block]:
        for place in places[number]:
            if place not in decoded:
                delta, segment = place
                decoded[place] = decode_segment(journal.segment(delta.target, delta.name, segment), layout)
            yield from (block for block in decoded[place] if block.tensor == number)
            users[place] -= 1
            if not users[place]:
                del decoded[place]

    for number in sorted(places):
        yield number, blocks_of(number)


def _manifest(manifests: list[Manifest], carried: dict[int, int], segments: list[bytes]) -> Manifest:
    first, last = manifests[0], manifests[-1]
    latest = {tensor.number: tensor.fingerprint for manifest in manifests for tensor in manifest.tensors}
    if missing := carried.keys() - latest.keys():
        raise CorruptData(
            f"delta {first.base} -> {last.target}: tensor {min(missing)} is in a segment, not in a manifest"
        )
    return Manifest(
        run=last.run,
        kind="delta",
        codec="fast",
        base=first.base,
        target=last.target,
        base_state=first.base_state,
        target_state=last.target_state,
        layout=last.layout,
        created_ms=last.created_ms,
        changed=sum(carried.values()),
        tensors=tuple(TensorChange(number, carried[number], latest[number]) for number in sorted(carried)),
        segments=tuple(SegmentRef.of(segment) for segment in segments),
    )
