"""Boxes: the rectangular parts of a tensor that blocks cover (docs/format.md sections 1 and 5)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sparrowrl.delta import limits
from sparrowrl.errors import CorruptData


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `start + r * stride + c` of a flat tensor, 0 <= r < rows, 0 <= c < row_length.

    Element k of the box, in its own numbering, is the one with r = k // row_length and c = k % row_length. Raises
    CorruptData if the numbers make no box: something negative, no row, rows that overlap or cross a multiple of the
    stride.
    """

    start: int
    row_length: int
    stride: int
    rows: int

    def __post_init__(self) -> None:
        for name in ("start", "row_length", "stride"):
            limits.check_int(f"box {name}", getattr(self, name), 0, limits.TENSOR_ELEMENTS + 1)
        limits.check_int("box rows", self.rows, 1, limits.TENSOR_ELEMENTS + 1)
        if self.stride < self.row_length:
            raise CorruptData(f"box: expected a stride of at least the row length {self.row_length}, got {self.stride}")
        if not self.contiguous and self.start % self.stride + self.row_length > self.stride:
            raise CorruptData(f"box: expected rows within multiples of the stride, got {self}")

    @classmethod
    def whole(cls, numel: int) -> Box:
        """The box that is a whole tensor of `numel` elements."""
        return cls(0, numel, numel, 1)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other without a gap."""
        return self.rows == 1 or self.stride == self.row_length

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.row_length * self.rows

    @property
    def end(self) -> int:
        """One more than the largest flat index."""
        return self.start + (self.rows - 1) * self.stride + self.row_length

    def flat(self, k: torch.Tensor) -> torch.Tensor:
        """Flat indices (int64) of the elements numbered `k` (int64) in the box."""
        if self.contiguous:
            return k + self.start if self.start else k
        row = torch.div(k, self.row_length, rounding_mode="floor")
        return k + row * (self.stride - self.row_length) + self.start

    def cut(self, near: int) -> tuple[Box, Box, int]:
        """Two boxes that make up this one, and the number k where the second starts.

        k is `near` (0 < near < elements) or, where only a multiple of the row length gives boxes, the nearest of those.
        """
        if self.contiguous:
            rest = self.elements - near
            return Box(self.start, near, near, 1), Box(self.start + near, rest, rest, 1), near
        above = min(max(round(near / self.row_length), 1), self.rows - 1)
        first = Box(self.start, self.row_length, self.stride, above)
        second = Box(self.start + above * self.stride, self.row_length, self.stride, self.rows - above)
        return first, second, above * self.row_length


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that share an element, or None if there are none.

    Raises CorruptData if boxes with gaps have different strides, which docs/format.md forbids within one tensor.
    """
    if len(boxes) < 2:
        return None
    strides = {box.stride for box in boxes if not box.contiguous}
    if len(strides) > 1:
        raise CorruptData(f"boxes of one tensor: expected one stride, got {sorted(strides)[:4]}")
    if strides:
        return _sweep(boxes, strides.pop())
    ordered = sorted((box for box in boxes if box.elements), key=lambda box: box.start)
    for before, after in pairwise(ordered):
        if before.end > after.start:
            return before, after
    return None


def _sweep(boxes: Sequence[Box], stride: int) -> tuple[Box, Box] | None:
    """`first_overlap` of rectangles in a matrix of `stride` columns: go down the rows and keep who is there."""
    events: list[tuple[int, int, int, int, Box]] = []
    for box in boxes:
        for top, bottom, left, right in _rectangles(box, stride):
            events.append((top, 1, left, right, box))
            events.append((bottom, 0, left, right, box))
    events.sort(key=lambda event: event[:2])
    lefts: list[int] = []
    there: list[tuple[int, Box]] = []
    for _, opens, left, right, box in events:
        place = bisect_left(lefts, left)
        if not opens:
            del lefts[place], there[place]
            continue
        if place < len(lefts) and lefts[place] < right:
            return box, there[place][1]
        if place and there[place - 1][0] > left:
            return there[place - 1][1], box
        lefts.insert(place, left)
        there.insert(place, (right, box))
    return None


def _rectangles(box: Box, stride: int) -> Iterable[tuple[int, int, int, int]]:
    """The box as rectangles (top, bottom, left, right) in a matrix of `stride` columns; ends are exclusive."""
    if not box.elements:
        return
    top, left = divmod(box.start, stride)
    if not box.contiguous:
        yield top, top + box.rows, left, left + box.row_length
        return
    bottom, right = divmod(box.end, stride)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left:
        yield top, top + 1, left, stride
        top += 1
    if top < bottom:
        yield top, bottom, 0, stride
    if right:
        yield bottom, bottom + 1, 0, right
