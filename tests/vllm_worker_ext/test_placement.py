"""Placement: learned from the loader, refused by name where it is not a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparrowrl.delta.layout import Layout, TensorSpec
from sparrowrl.errors import PlacementError
from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.vllm_worker_ext.placement import Piece, check_live, learn_placement

Load = Callable[[dict[str, nn.Parameter], str, Tensor], None]


class Model(nn.Module):
    """Two parameters and a loader that the test gives."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(12.0).bfloat16().reshape(4, 3), requires_grad=False)
        self.b = nn.Parameter(torch.ones(5).bfloat16(), requires_grad=False)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(dict(self.named_parameters()), name, tensor)


def layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def plain(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    parameters[name].data.copy_(tensor)


def test_plain_copies_are_learned_and_nothing_is_written() -> None:
    model = Model(plain)
    before = {name: p.clone() for name, p in model.named_parameters()}
    placement = learn_placement(model, layout(a=(4, 3), b=(5,)))
    assert placement.pieces == ((Piece((12,), 0, (1,), 0, 0, (1,)),), (Piece((5,), 0, (1,), 1, 0, (1,)),))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_fused_transposed_and_padded_regions() -> None:
    def load(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
        a, b = parameters["a"].data, parameters["b"].data
        if name == "left":  # (2, 4): the transpose of the first two columns
            a[:, :2].copy_(tensor.t())
        elif name == "right":
            a.narrow(1, 2, 1).copy_(tensor)
        else:
            b[:3].copy_(tensor)
            b[3:].fill_(1)

    placement = learn_placement(Model(load), layout(left=(2, 4), right=(4, 1), short=(3,)))
    assert placement.pieces[0] == (Piece((2, 4), 0, (4, 1), 0, 0, (1, 3)),)
    assert placement.pieces[1] == (Piece((4,), 0, (1,), 0, 2, (3,)),)
    chosen, positions = placement.pieces[0][0].locate(torch.tensor([1, 4, 7]))
    assert torch.arange(8)[chosen].tolist() == [0, 1, 2] and positions.tolist() == [3, 1, 10]


REFUSED: dict[str, tuple[str, Load, dict[str, tuple[int, ...]]]] = {
    "computed": ("computes", lambda p, n, t: p[n].data.copy_(t + 1), {"a": (4, 3), "b": (5,)}),
    "cast": ("computes", lambda p, n, t: p[n].data.copy_(t.float()), {"a": (4, 3), "b": (5,)}),
    "added": ("does aten.add_", lambda p, n, t: p[n].data.add_(t), {"a": (4, 3), "b": (5,)}),
    "left out": ("leaves it out", lambda p, n, t: None, {"a": (4, 3)}),
    "half": ("leaves some out", lambda p, n, t: p[n].data[:2].copy_(t[:2]), {"a": (4, 3)}),
    "twice": ("some have two", lambda p, n, t: (plain(p, n, t), plain(p, n, t)), {"a": (4, 3)}),
    "unknown": ("KeyError", plain, {"c": (2,)}),
    "wrong shape": ("a:", plain, {"a": (4, 3, 2)}),
    "not from the checkpoint": ("b:", plain, {"a": (4, 3)}),
    "replaced": ("replaced", lambda p, n, t: setattr(p[n], "data", torch.zeros(t.shape)), {"a": (4, 3), "b": (5,)}),
    "padding of another value": ("padding", lambda p, n, t: (plain(p, n, t), p["b"].data.fill_(7)), {"a": (4, 3)}),
    "one place for two": ("one place", lambda p, n, t: p["a"].data.copy_(t), {"a": (4, 3), "c": (4, 3)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    words, load, shapes = REFUSED[case]
    with pytest.raises(PlacementError, match=words):
        learn_placement(Model(load), layout(**shapes))


def test_another_dtype_is_refused() -> None:
    model = Model(plain)
    model.b = nn.Parameter(torch.ones(5), requires_grad=False)
    with pytest.raises(
        PlacementError, match=r"b: expected the engine to hold it as torch\.bfloat16, got torch\.float32"
    ):
        learn_placement(model, layout(a=(4, 3), b=(5,)))


def test_memory_that_is_shared_makes_an_alias() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(lambda p, n, t: plain(p, n, t) if n != "head" else None)
            self.head = self.a

    placement = learn_placement(Tied(), layout(a=(4, 3), b=(5,), head=(4, 3)))
    assert placement.aliases == {2} and placement.pieces[2] == placement.pieces[0] and len(placement.live) == 2


def test_packed_weights_are_noticed() -> None:
    model = Model(plain)
    model.b = nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(PlacementError, match="repacked"):
        learn_placement(model, layout(a=(4, 3), b=(5,)))
    layer = nn.Linear(2, 2)
    layer.cpu_linear = lambda x, w, b: x  # type: ignore[assignment]
    with pytest.raises(PlacementError, match="repacked"):
        check_live(nn.Sequential(layer))  # type: ignore[arg-type]


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
    from sparrowrl.vllm_worker_ext.placement import _piece

    return _piece("t", 0, target, probe), room.numel()


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
