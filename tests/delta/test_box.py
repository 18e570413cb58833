"""Boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.errors import CorruptData, FormatError


def indices(box: Box) -> list[int]:
    return [box.start + r * box.stride + c for r in range(box.rows) for c in range(box.row_length)]


@st.composite
def grid_boxes(draw: st.DrawFn, stride: int) -> Box:
    """A rectangle in a matrix of `stride` columns, or a run of elements."""
    if draw(st.booleans()):
        length = draw(st.integers(0, 20))
        return Box(draw(st.integers(0, 60)), length, length, 1)
    left = draw(st.integers(0, stride - 1))
    row_length = draw(st.integers(1, stride - left))
    return Box(draw(st.integers(0, 6)) * stride + left, row_length, stride, draw(st.integers(1, 5)))


@given(grid_boxes(7))
def test_flat_and_end(box: Box) -> None:
    expected = indices(box)
    assert box.flat(torch.arange(box.elements)).tolist() == expected
    assert box.elements == len(expected)
    assert not expected or box.end == expected[-1] + 1


@given(grid_boxes(7), st.data())
def test_cut_gives_the_same_elements_in_the_same_order(box: Box, data: st.DataObject) -> None:
    if box.elements < 2:
        return
    near = data.draw(st.integers(1, box.elements - 1))
    first, second, at = box.cut(near)
    assert indices(first) + indices(second) == indices(box)
    assert first.elements == at and 0 < at < box.elements
    assert at == near or (at % box.row_length == 0 and not box.contiguous)


@given(st.lists(grid_boxes(7), max_size=8))
def test_first_overlap_finds_one_if_there_is_one(boxes: list[Box]) -> None:
    every = [index for box in boxes for index in indices(box)]
    pair = first_overlap(boxes)
    assert (pair is None) == (len(set(every)) == len(every))
    if pair is not None:
        assert set(indices(pair[0])) & set(indices(pair[1]))


@given(st.integers(1, 12), st.integers(1, 9), st.randoms(use_true_random=False))
def test_column_shards_of_many_ranks_do_not_overlap(ranks: int, rows: int, random: object) -> None:
    boxes = [Box(rank * 5, 5, ranks * 5, rows) for rank in range(ranks)]
    pieces = [part for box in boxes for part in (box.cut(box.elements // 2)[:2] if rows > 1 else [box])]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    assert first_overlap(pieces) is None
    assert first_overlap([*pieces, Box(ranks * 5 * rows - 1, 1, 1, 1)]) is not None


def test_many_interleaved_boxes_are_checked_quickly_and_strides_may_not_differ() -> None:
    columns = [Box(column, 1, 20_000, 10**6) for column in range(20_000)]
    assert first_overlap(columns) is None
    with pytest.raises(CorruptData, match="one stride"):
        first_overlap([Box(0, 1, 3, 3), Box(1, 1, 4, 3)])


@pytest.mark.parametrize(
    "numbers",
    [
        (-1, 1, 1, 1), (0, -1, 1, 1), (0, 2, 1, 1), (0, 1, 1, 0), (0, 1, 1, -5), (2**49, 1, 1, 1), (0, 1, 2**60, 2),
        (5, 3, 6, 2), (0, 1.0, 1, 1), (0, True, 1, 1), (0, 1, 1, None),
    ],
)  # fmt: skip
def test_numbers_that_make_no_box(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(FormatError):
        Box(*numbers)
