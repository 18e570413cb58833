"""What the ranks of an engine hold together: every weight somewhere, and every weight counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgpack
import numpy as np
from numpy.typing import NDArray

from sparrowrl.delta.layout import Layout
from sparrowrl.errors import FingerprintMismatch, PlacementError
from sparrowrl.vllm_worker_ext.piece import marks
from sparrowrl.vllm_worker_ext.placement import Placement

Region = tuple[tuple[int, ...], tuple[int, ...], int]
Parts = NDArray[np.uint64]  # for each tensor of the layout, what one rank's weights add to its fingerprint


@dataclass(frozen=True, slots=True)
class Census:
    """Which of the ranks' parts make up each tensor.

    `counted` bool[ranks, tensors]: whose parts add up to the fingerprint. `like` int[ranks, tensors]: the counted rank
    that holds the same weights, -1 for a rank that holds nothing of the tensor. `partial` are tensors of which the
    ranks hold something, but not everything, or of which one rank holds all (in a mirror, say) and another a part.
    `unused` are those of which nobody holds anything, as the user knows.
    """

    layout: Layout
    counted: NDArray[np.bool_]
    like: NDArray[np.int64]
    partial: frozenset[int]
    unused: frozenset[int]

    def totals(self, parts: Sequence[Parts]) -> Parts:
        """The fingerprints u64[tensors] that the ranks' parts add up to.

        Raises FingerprintMismatch if ranks that hold the same weights do not have the same part.
        """
        table = np.stack(parts)
        same = self._alike(table)
        if not same.all():
            rank, tensor = (int(i) for i in np.argwhere(~same)[0])
            raise FingerprintMismatch(
                f"{self.layout.tensors[tensor].name}: expected rank {rank} to hold the same as rank "
                f"{self.like[rank, tensor]}, got other weights"
            )
        return self._sum(table)

    def wrong(self, parts: Sequence[Parts], wanted: Sequence[int]) -> list[int]:
        """The tensors whose parts do not add up to the `wanted` fingerprints, or are not alike where they should be."""
        table = np.stack(parts)
        different = ~self._alike(table).all(axis=0) | (self._sum(table) != np.array(wanted, dtype=np.uint64))
        different[sorted(self.unused)] = False
        return [int(n) for n in np.flatnonzero(different)]

    def _alike(self, table: Parts) -> NDArray[np.bool_]:
        return np.where(self.like >= 0, np.take_along_axis(table, np.maximum(self.like, 0), 0) == table, True)

    def _sum(self, table: Parts) -> Parts:
        totals: Parts = np.where(self.counted, table, np.uint64(0)).sum(axis=0, dtype=np.uint64)
        return totals


def holdings(placement: Placement) -> bytes:
    """What one rank holds of each tensor, for `take`: the regions, sorted."""
    rows = [sorted(piece.region for piece in some) for some in placement.pieces]
    return bytes(msgpack.packb(rows))


def take(layout: Layout, ranks: Sequence[bytes], unused: Sequence[str]) -> Census:
    """Put the ranks' holdings together.

    `unused` are patterns (fnmatch) of tensors that no rank needs to hold. Raises PlacementError that names a tensor
    that no rank holds, or of which two ranks hold parts that overlap and are not the same.
    """
    tables: list[list[list[Region]]] = [_read(data) for data in ranks]
    counted = np.zeros((len(ranks), len(layout)), dtype=np.bool_)
    like = np.full((len(ranks), len(layout)), -1, dtype=np.int64)
    partial, left_out = set(), set()
    for n, spec in enumerate(layout.tensors):
        first: dict[tuple[Region, ...], int] = {}
        for rank, table in enumerate(tables):
            if table[n]:
                like[rank, n] = first.setdefault(tuple(table[n]), rank)
                counted[rank, n] = like[rank, n] == rank
        if not spec.numel:
            continue
        if not first:
            if not any(fnmatchcase(spec.name, pattern) for pattern in unused):
                raise PlacementError(
                    f"{spec.name}: expected a place in the engine's tensors, but its loader leaves it out; if the "
                    "engine has no use for it, say so in SPARROWRL_UNUSED"
                )
            left_out.add(n)
        elif list(first) != [whole := (((spec.numel,), (1,), 0),)]:
            covered = marks(spec.numel, [region for some in first for region in some])
            if covered is None and whole in first:
                partial.add(n)
            elif covered is None:
                raise PlacementError(f"{spec.name}: expected ranks to hold the same weights or none in common")
            elif not covered.all():
                partial.add(n)
    return Census(layout, counted, like, frozenset(partial), frozenset(left_out))


def _read(data: bytes) -> list[list[Region]]:
    return [[(tuple(s), tuple(t), o) for s, t, o in row] for row in msgpack.unpackb(data)]
