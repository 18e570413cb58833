"""Regions of checkpoint tensors: found, and read back, as element by element."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.vllm_worker_ext.piece import Piece, marks


def brute_force(piece: Piece) -> dict[int, int]:
    """Checkpoint index -> runtime position, element by element."""
    places = {}
    for place in torch.cartesian_prod(*(torch.arange(n) for n in piece.sizes)).reshape(-1, len(piece.sizes)).tolist():
        source = piece.source + sum(i * s for i, s in zip(place, piece.source_strides, strict=True))
        places[source] = piece.target + sum(i * s for i, s in zip(place, piece.target_strides, strict=True))
    return places


@st.composite
def regions(draw: st.DrawFn) -> tuple[Piece, int]:
    """A piece of a view of a checkpoint tensor, copied to a permuted view; and how many runtime elements there are."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lows = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(1, n - low)) for n, low in zip(shape, lows, strict=True)]
    probe = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for dim, (low, size) in enumerate(zip(lows, sizes, strict=True)):
        probe = probe.narrow(dim, low, size)
    order = draw(st.permutations(range(len(shape))))
    skip = draw(st.integers(0, 3))
    room = torch.zeros(skip + probe.numel(), dtype=torch.bfloat16)
    target = room[skip:].view([sizes[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    piece = Piece.of_copy(0, target, probe)
    assert piece is not None
    return piece, room.numel()


@settings(max_examples=200, deadline=None)
@given(regions(), st.data())
def test_locate_and_rows_agree_with_brute_force(made: tuple[Piece, int], data: Any) -> None:
    piece, room = made
    places = brute_force(piece)
    end = max(places) + 3
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, end)))), dtype=torch.int64)
    chosen, positions = piece.locate(indices)
    inside = [i for i in indices.tolist() if i in places]
    assert indices[chosen].tolist() == inside
    assert positions.tolist() == [places[i] for i in inside]
    live = torch.randint(-9, 9, (room,), dtype=torch.int16)
    whole = torch.zeros(end + 1, dtype=torch.int16)
    expected = 0
    for index, position in places.items():
        whole[index] = live[position]
        expected += int(fingerprint(live[position : position + 1], 5, index))
    got = sum(int(fingerprint(bits, 5, *box)) for bits, *box in piece.rows(live))
    assert (got - expected) % (1 << 64) == 0


def test_a_source_that_repeats_an_element_is_no_piece() -> None:
    probe = torch.empty(4, 1, device="meta").expand(4, 3)
    assert Piece.of_copy(0, torch.empty(4, 3), probe) is None


def test_marks_say_what_is_covered_and_notice_an_overlap() -> None:
    found = marks(6, [((2,), (3,), 0), ((2, 1), (3, 1), 2)])
    assert found is not None and found.tolist() == [True, False, True, True, False, True]
    assert marks(6, [((3,), (1,), 0), ((2,), (1,), 2)]) is None
