"""Placement: copies are learned from the loader; whatever else it does makes tensors opaque; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparrowrl.delta.layout import Layout, TensorSpec
from sparrowrl.errors import PlacementError
from sparrowrl.vllm_worker_ext.piece import Piece
from sparrowrl.vllm_worker_ext.placement import Placement, make_plan, place
from sparrowrl.vllm_worker_ext.tracing import trace_loader

Parameters = dict[str, nn.Parameter]
Load = Callable[[Parameters, str, Tensor], Any]


class Half(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(tensor, requires_grad=False)


class Model(nn.Module):
    """Two modules with a parameter each, a.w (4, 3) and b.w (5), and a loader that the test gives."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.a = Half(torch.arange(12.0).bfloat16().reshape(4, 3))
        self.b = Half(torch.ones(5).bfloat16())
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(dict(self.named_parameters()), name, tensor)


def layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def learn(model: nn.Module, of: Layout, derived: Iterable[nn.Module] = ()) -> Placement:
    trace = trace_loader(model, of)  # type: ignore[arg-type]
    return place(trace, make_plan(trace, ()), derived)


def opaque(model: nn.Module, of: Layout) -> set[str]:
    """Learn, and see that the model is as it was; the names of the tensors that are opaque."""
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    placement = learn(model, of)
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.data_ptr() == before[name][1] and torch.equal(p, before[name][2])
    for name, module in model.named_modules():
        assert {k: id(v) for k, v in module.__dict__.items()} == {k: id(v) for k, v in attributes[name].items()}
    return {of.tensors[n].name for n in placement.opaque}


def plain(p: Parameters, name: str, tensor: Tensor) -> None:
    p[f"{name}.w"].data.copy_(tensor)


BOTH = {"a": (4, 3), "b": (5,)}


def test_plain_copies_are_learned_and_nothing_is_written() -> None:
    model = Model(plain)
    assert opaque(model, layout(**BOTH)) == set()
    placement = learn(model, layout(**BOTH))
    assert placement.pieces == ((Piece((12,), 0, (1,), 0, 0, (1,)),), (Piece((5,), 0, (1,), 1, 0, (1,)),))


def test_fused_transposed_split_and_padded_regions() -> None:
    def load(p: Parameters, name: str, tensor: Tensor) -> None:
        a, b = p["a.w"].data, p["b.w"].data
        if name == "left":  # (2, 4): the transpose of the first two columns
            a[:, :2].copy_(tensor.t())
        elif name == "right":
            a.narrow(1, 2, 1).copy_(tensor)
        else:
            for source, target in zip(tensor.split(2), b[:3].split(2), strict=True):
                target[...] = source
            b[3:].fill_(1)

    placement = learn(Model(load), layout(left=(2, 4), right=(4, 1), short=(3,)))
    assert placement.pieces[0] == (Piece((2, 4), 0, (4, 1), 0, 0, (1, 3)),)
    assert placement.pieces[1] == (Piece((4,), 0, (1,), 0, 2, (3,)),)
    assert placement.pieces[2] == (Piece((2,), 0, (1,), 1, 0, (1,)), Piece((1,), 2, (1,), 1, 2, (1,)))
    chosen, positions = placement.pieces[0][0].locate(torch.tensor([1, 4, 7]))
    assert torch.arange(8)[chosen].tolist() == [0, 1, 2] and positions.tolist() == [3, 1, 10]


def composed(p: Parameters, name: str, tensor: Tensor) -> None:
    """What Mamba's loaders do: a copy, and then something computed from what was copied."""
    plain(p, name, tensor)
    if name == "a":
        p["a.w"].data.copy_(-torch.exp(p["a.w"].float()))


class Fused:
    """Takes both tensors before it writes anything."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def __call__(self, p: Parameters, name: str, tensor: Tensor) -> None:
        self.seen[name] = tensor
        if len(self.seen) == 2:
            p["a.w"].data.copy_(torch.cat([self.seen["high"], self.seen["low"]]))
            p["b.w"].data.copy_(self.seen["high"].flatten()[:5])


def through_a_buffer(p: Parameters, name: str, tensor: Tensor) -> None:
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
    buffer.copy_(tensor)
    p[f"{name}.w"].data.copy_(buffer)


def by_data(p: Parameters, name: str, tensor: Tensor) -> None:
    p[f"{name}.w"].data.copy_(tensor if tensor.sum() > 0 else tensor * 2)


OPAQUE: dict[str, tuple[Load, dict[str, tuple[int, ...]], set[str]]] = {
    "computed": (lambda p, n, t: p[f"{n}.w"].data.copy_(t + 1 if n == "a" else t), BOTH, {"a"}),
    "cast": (lambda p, n, t: p[f"{n}.w"].data.copy_(t.float() if n == "a" else t), BOTH, {"a"}),
    "added": (lambda p, n, t: p[f"{n}.w"].data.add_(t), BOTH, {"a", "b"}),
    "composed": (composed, BOTH, {"a"}),
    "joined": (Fused(), {"high": (3, 3), "low": (1, 3)}, {"high", "low"}),
    "twice in one place": (lambda p, n, t: (plain(p, n, t), plain(p, n, t)), BOTH, {"a", "b"}),
    "in two places": (lambda p, n, t: (plain(p, "a", t), p["b.w"].data.copy_(t[0, 0].expand(5))), {"a": (4, 3)}, {"a"}),
    "spread": (lambda p, n, t: p[f"{n}.w"].data.copy_(t), {"a": (1, 3), "b": (5,)}, {"a"}),
    "padding of another value": (lambda p, n, t: (plain(p, n, t), p["b.w"].data[4:].fill_(7)), BOTH, {"a", "b"}),
    "another memory": (lambda p, n, t: setattr(p[f"{n}.w"], "data", t.clone()), BOTH, {"a", "b"}),
    "through a buffer": (through_a_buffer, BOTH, {"a", "b"}),
    "looks at the data": (by_data, BOTH, {"a", "b"}),
}


@pytest.mark.parametrize("case", OPAQUE)
def test_whatever_is_no_copy_makes_its_tensors_opaque(case: str) -> None:
    load, shapes, expected = OPAQUE[case]
    assert opaque(Model(load), layout(**shapes)) == expected


def test_another_dtype_is_opaque() -> None:
    model = Model(plain)
    model.b = Half(torch.ones(5, dtype=torch.float32))
    assert opaque(model, layout(**BOTH)) == {"b"}


def test_a_loader_that_makes_new_parameters_or_attributes() -> None:
    class Caching(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                plain(dict(self.named_parameters()), name, tensor)
                if name == "a":
                    self.b.cache = tensor.float()
                else:
                    self.b.w = nn.Parameter(tensor, requires_grad=False)

    assert opaque(Caching(plain), layout(**BOTH)) == {"a", "b"}


def test_what_shares_a_module_with_an_opaque_tensor_is_opaque_too() -> None:
    model = Model(lambda p, n, t: p[f"{n}"].data.copy_(t * 2 if n == "a.w" else t))
    model.a.bias = nn.Parameter(torch.zeros(2).bfloat16(), requires_grad=False)
    assert opaque(model, layout(**{"a.w": (4, 3), "a.bias": (2,), "b.w": (5,)})) == {"a.w", "a.bias"}


def test_mirrors_hold_opaque_tensors_in_their_own_shape() -> None:
    placement = learn(Model(OPAQUE["computed"][0]), layout(**BOTH))
    (name, mirror), *rest = placement.mirrored()
    assert (name, mirror.shape, mirror.dtype, rest) == ("a", (4, 3), torch.bfloat16, [])
    mirror[1, 1] = 1.0
    assert placement.live[placement.pieces[0][0].live][4] == 0x3F80


def test_tensors_that_are_no_parameters_are_watched_and_left_as_they_are() -> None:
    """Plain attributes, also within dictionaries, written in place or made anew."""

    def load(p: Parameters, name: str, tensor: Tensor) -> None:
        plain(p, name, tensor)
        if name == "a":
            model.a.copied.copy_(tensor)
            model.a.made["cache"] = tensor.float()
        else:
            torch._foreach_mul_([model.b.scaled, model.b.w.data], 2)
            model.b.scaled.copy_(tensor * 2)

    model = Model(load)
    model.a.copied, model.a.made = torch.ones(4, 3).bfloat16(), {"other": torch.ones(1)}
    model.b.scaled = torch.ones(5).bfloat16()
    assert opaque(model, layout(**BOTH)) == {"a", "b"}
    assert torch.equal(model.a.copied, torch.ones(4, 3)) and model.a.made == {"other": torch.ones(1)}
    assert torch.equal(model.b.scaled, torch.ones(5))


def test_a_tensor_that_the_loader_does_not_read_is_held_by_nobody() -> None:
    """Even where something irregular is done when it comes."""

    def load(p: Parameters, name: str, tensor: Tensor) -> None:
        if name == "unknown":
            p["b.w"].data.mul_(2)
        else:
            plain(p, name, tensor)

    placement = learn(Model(load), layout(**BOTH, unknown=(3,)))
    assert placement.opaque == {1} and placement.pieces[2] == ()


REFUSED: dict[str, tuple[str, Load, dict[str, tuple[int, ...]]]] = {
    "unknown": ("c: .* KeyError", plain, {"c": (2,)}),
    "wrong shape": (r"a: expected a region of shape \(4, 3\)", plain, {"a": (4, 3, 2)}),
    "not from the checkpoint": ("b.w: expected every element", plain, {"a": (4, 3)}),
    "one place for two": (
        "one checkpoint weight in each",
        lambda p, n, t: plain(p, "a", t),
        {"a": (4, 3), "c": (4, 3)},
    ),
}


def test_one_place_for_two_in_a_buffer_is_refused() -> None:
    model = Model(lambda p, n, t: (model.a.table if n in "st" else p[f"{n}.w"].data).copy_(t))
    model.a.register_buffer("table", torch.zeros(2).bfloat16())
    with pytest.raises(PlacementError, match="s: expected one checkpoint weight in each"):
        learn(model, layout(**BOTH, s=(2,), t=(2,)))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    words, load, shapes = REFUSED[case]
    with pytest.raises(PlacementError, match=words):
        learn(Model(load), layout(**shapes))


def test_parameters_of_a_derived_module_need_no_checkpoint() -> None:
    model = Model(plain)
    learn(model, layout(a=(4, 3)), [model.b])


def test_memory_that_is_shared_makes_an_alias() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(lambda p, n, t: plain(p, n, t) if n in "ab" else None)
            self.head = self.a

    placement = learn(Tied(), layout(**{"a": (4, 3), "b": (5,), "head.w": (4, 3)}))
    assert placement.aliases == {2: 0} and placement.pieces[2] == placement.pieces[0] and len(placement.live) == 2


def test_a_buffer_may_alias_a_parameter_and_may_be_loaded() -> None:
    model = Model(lambda p, n, t: (model.a.statistics if n == "s" else p[f"{n}.w"].data).copy_(t))
    model.a.register_buffer("view", model.a.w.data.view(3, 4), persistent=False)
    model.a.register_buffer("statistics", torch.zeros(2).bfloat16())
    placement = learn(model, layout(**BOTH, s=(2,)))
    assert placement.opaque == set() and [len(some) for some in placement.pieces] == [1, 1, 1]
    assert placement.pieces[0][0].live != placement.pieces[2][0].live
