"""A region of one checkpoint tensor and its place in one live storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of one checkpoint tensor and its place in one live storage.

    Element (i, j, ...) of a region of `sizes` has the flat checkpoint index `source + i * source_strides[0] + ...` and
    the runtime position `target + i * target_strides[0] + ...`, both counted in elements. Dimensions go from the
    greatest source stride to the least, and those that can be are merged, so that a contiguous region has one, of
    stride 1.
    """

    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    live: int
    target: int
    target_strides: tuple[int, ...]

    @classmethod
    def of_copy(cls, live: int, target: Tensor, source: Tensor) -> Piece | None:
        """The piece of one copy between views of one shape; None if the source has an element twice."""
        every = zip(source.shape, source.stride(), target.stride(), strict=True)
        dims = sorted((d for d in every if d[0] > 1), key=lambda d: -d[1]) or [(1, 1, 1)]
        merged: list[tuple[int, int, int]] = [dims[0]]
        for size, s, t in dims[1:]:
            outer_size, outer_s, outer_t = merged[-1]
            if outer_s == s * size and outer_t == t * size:
                merged[-1] = (outer_size * size, s, t)
            else:
                merged.append((size, s, t))
        if merged[-1][1] < 1 or any(outer < s * size for (_, outer, _), (size, s, _) in pairwise(merged)):
            return None
        sizes, source_strides, target_strides = (tuple(column) for column in zip(*merged, strict=True))
        return cls(
            sizes, int(source.storage_offset()), source_strides, live, int(target.storage_offset()), target_strides
        )

    @classmethod
    def whole(cls, elements: int, live: int) -> Piece:
        """A whole tensor at the beginning of a storage."""
        return cls((elements,), 0, (1,), live, 0, (1,))

    @property
    def elements(self) -> int:
        """How many weights the region has."""
        return torch.Size(self.sizes).numel()

    @property
    def contiguous(self) -> bool:
        """Whether runtime position is checkpoint index plus a constant."""
        return self.source_strides == self.target_strides == (1,)

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The region of the checkpoint tensor: sizes, strides, offset."""
        return self.sizes, self.source_strides, self.source

    def locate(self, indices: Tensor) -> tuple[slice | Tensor, Tensor]:
        """Which of the ascending flat checkpoint indices int64[n] lie in this region, and their runtime positions."""
        if self.contiguous:
            ends = torch.tensor([self.source, self.source + self.elements], device=indices.device)
            first, last = torch.searchsorted(indices, ends).tolist()
            chosen = slice(first, last)
            return chosen, indices[chosen] + (self.target - self.source)
        rest = indices - self.source
        inside = rest >= 0
        positions = torch.full_like(rest, self.target)
        for size, s, t in zip(self.sizes, self.source_strides, self.target_strides, strict=True):
            step = rest.div(s, rounding_mode="floor")
            inside &= step < size
            rest = rest - step * s
            positions += step * t
        chosen_at = (inside & (rest == 0)).nonzero().reshape(-1)
        return chosen_at, positions[chosen_at]

    def rows(self, live: Tensor) -> Iterator[tuple[Tensor, int, int, int]]:
        """The live bits as contiguous 1-D tensors, each with the box (start, row_length, stride) of its indices."""
        inner = self.source_strides[-1]
        if len(self.sizes) > 2 or (len(self.sizes) == 2 and inner != 1):
            for i in range(self.sizes[0]):
                yield from self._outer(i).rows(live)
            return
        bits = live.as_strided(self.sizes, self.target_strides, self.target).reshape(-1).contiguous()
        if len(self.sizes) == 2:
            yield bits, self.source, self.sizes[1], self.source_strides[0]
        else:
            yield bits, self.source, (self.elements if inner == 1 else 1), (self.elements if inner == 1 else inner)

    def _outer(self, i: int) -> Piece:
        source, target = self.source + i * self.source_strides[0], self.target + i * self.target_strides[0]
        return Piece(self.sizes[1:], source, self.source_strides[1:], self.live, target, self.target_strides[1:])


def marks(numel: int, regions: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> Tensor | None:
    """bool[numel] of the elements in one of the regions (sizes, strides, offset); None if two regions overlap."""
    found = torch.zeros(numel, dtype=torch.bool)
    for sizes, strides, offset in regions:
        region = found.as_strided(sizes, strides, offset)
        if region.any():
            return None
        region.fill_(True)
    return found
