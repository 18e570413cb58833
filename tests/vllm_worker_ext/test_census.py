"""What ranks hold together: all of it, and each weight counted once."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from sparrowrl.delta.layout import Layout, TensorSpec
from sparrowrl.errors import FingerprintMismatch, PlacementError
from sparrowrl.vllm_worker_ext.census import take

LAYOUT = Layout([TensorSpec("k", "BF16", (4, 3)), TensorSpec("norm", "BF16", (5,))])
WHOLE_K, WHOLE_NORM = ((12,), (1,), 0), ((5,), (1,), 0)
UPPER, LOWER = ((6,), (1,), 0), ((6,), (1,), 6)
MORE = ((8,), (1,), 0)
LEFT, RIGHT = ((4,), (3,), 0), ((4, 2), (3, 1), 1)
NOTHING: list[object] = []


def holding(*rows: object) -> bytes:
    return msgpack.packb([row if isinstance(row, list) else [row] for row in rows])


def parts(*rows: tuple[int, int]) -> list[NDArray[np.uint64]]:
    return [np.array(row, dtype=np.uint64) for row in rows]


def test_slices_add_up_and_copies_count_once() -> None:
    census = take(LAYOUT, [holding(UPPER, WHOLE_NORM), holding(LOWER, WHOLE_NORM)], ())
    assert census.totals(parts((1, 7), (2, 7))).tolist() == [3, 7] and not census.partial
    big = (1 << 64) - 1
    assert census.totals(parts((big, big), (2, big))).tolist() == [1, big]


def test_more_ranks_than_heads() -> None:
    ranks = [holding(UPPER, WHOLE_NORM)] * 2 + [holding(LOWER, WHOLE_NORM)] * 2
    census = take(LAYOUT, ranks, ())
    assert census.totals(parts((1, 7), (1, 7), (2, 7), (2, 7))).tolist() == [3, 7]
    with pytest.raises(FingerprintMismatch, match="k: expected rank 3 to hold the same as rank 2"):
        census.totals(parts((1, 7), (1, 7), (2, 7), (5, 7)))


def test_columns_and_stages_of_a_pipeline() -> None:
    census = take(LAYOUT, [holding(LEFT, NOTHING), holding(RIGHT, NOTHING), holding(NOTHING, WHOLE_NORM)], ())
    assert census.totals(parts((1, 99), (2, 99), (99, 7))).tolist() == [3, 7]


def test_a_tensor_that_nobody_holds_is_refused_or_listed() -> None:
    with pytest.raises(PlacementError, match="norm: expected a place"):
        take(LAYOUT, [holding(WHOLE_K, NOTHING)], ["nor"])
    assert take(LAYOUT, [holding(WHOLE_K, NOTHING)], ["x", "no*"]).unused == {1}


def test_what_is_held_in_part_is_said() -> None:
    assert take(LAYOUT, [holding(UPPER, WHOLE_NORM)], ()).partial == {0}


def test_a_part_beside_the_whole_is_said() -> None:
    """One rank keeps a mirror of it, and another does not: then all must."""
    assert take(LAYOUT, [holding(UPPER, WHOLE_NORM), holding(WHOLE_K, WHOLE_NORM)], ()).partial == {0}


def test_overlapping_but_different_holdings_are_refused() -> None:
    with pytest.raises(PlacementError, match="k: expected ranks to hold the same"):
        take(LAYOUT, [holding(UPPER, WHOLE_NORM), holding(MORE, WHOLE_NORM)], ())
