"""Random models with random loaders: a delta gives the bytes of a fresh load, or the engine says that it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import assert_bits_equal
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import U64_MASK, Layout, TensorSpec, state_id
from sparrowrl.errors import SparrowError
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.transport.node import NextArtifact
from sparrowrl.vllm_worker_ext import attachment, processing
from sparrowrl.vllm_worker_ext.agreement import Agreement
from sparrowrl.vllm_worker_ext.changes import as_writes, changes_of, parts
from sparrowrl.vllm_worker_ext.staging import Held, Staged

pytestmark = pytest.mark.vllm

Weights = dict[str, Tensor]
ROWS, COLUMNS = 4, 3
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Target:
    """One place that the loader writes: what it is, what is done to get its contents, and when."""

    place: str
    recipe: str
    when: str
    dtype: str


PLACES = ("parameter", "parameter", "parameter", "part", "buffer", "attribute", "item", "tied", "viewed")
PLAIN = ("whole", "rows", "columns", "transposed", "narrowed", "strided")
OTHER = (
    *("cast", "scaled", "negated", "in place", "through a buffer", "new memory", "new parameter", "spread", "joined"),
    *("padded", "zeroed", "diagonal", "twice", "by value", "as integers", "foreach", "picked", "summed", "cached"),
)
# `once`: by the first call; `thrice`: by the first three; `with the first`: if a tensor of the first target came too.
WHENS = ("at once", "at once", "at once", "at the end", "with the first", "once", "thrice")


class Part(nn.Module):
    """What one target needs: a parameter, or another tensor."""

    def __init__(self, target: Target, other: Part | None) -> None:
        super().__init__()
        dtype = DTYPES[target.dtype]
        initial = torch.zeros(ROWS, COLUMNS, dtype=dtype)
        self.attribute: Tensor | None = None
        self.items: dict[str, Tensor] = {}
        if target.place == "buffer":
            self.register_buffer("w", initial)
        elif target.place == "attribute":
            self.attribute = initial
        elif target.place == "item":
            self.items["w"] = initial
        elif target.place == "part":
            self.w = nn.Parameter(torch.zeros(2 * ROWS, COLUMNS, dtype=dtype)[ROWS:], requires_grad=False)
        elif target.place == "tied" and other is not None and isinstance(other._parameters.get("w"), nn.Parameter):
            self.w = other.w
        elif target.place == "viewed":
            self.w = nn.Parameter(initial, requires_grad=False)
            self.register_buffer("view", self.w.data.view(COLUMNS, ROWS), persistent=False)
        else:
            self.w = nn.Parameter(initial, requires_grad=False)

    def tensor(self) -> Tensor:
        if self.attribute is not None:
            return self.attribute
        if self.items:
            return self.items["w"]
        w = self.w
        return w.data if isinstance(w, nn.Parameter) else w

    def put(self, tensor: Tensor) -> None:
        if self.attribute is not None:
            self.attribute = tensor
        elif self.items:
            self.items["w"] = tensor
        elif isinstance(self._parameters.get("w"), nn.Parameter):
            self.w.data = tensor
        else:
            self._buffers["w"] = tensor


class Model(nn.Module):
    def __init__(self, targets: tuple[Target, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for target in targets:
            self.parts.append(Part(target, self.parts[-1] if len(self.parts) else None))  # type: ignore[arg-type]
        self._targets = targets
        self._stash: dict[str, Tensor] = {}
        self._done: set[str] = set()
        self._calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._calls += 1
        late: list[tuple[Target, Callable[[], None]]] = []
        seen: set[str] = set()
        for name, tensor in weights:
            number = int(name.split(".")[1])
            if self._targets[number].place == "tied" and name.startswith("parts."):
                continue
            target = self._targets[number]
            if target.recipe == "joined":
                self._stash[name] = tensor
            seen.add(name)
            part: Part = self.parts[number]  # type: ignore[assignment]
            work = partial(self._load, part, target, name, tensor)
            if target.when in ("at the end", "with the first"):
                late.append((target, work))
            elif target.when == "once":
                if name not in self._done:
                    self._done.add(name)
                    work()
            elif target.when != "thrice" or self._calls <= 3:
                work()
        for target, work in late:
            if target.when == "at the end" or any(name.startswith("t.0.") for name in seen):
                work()

    def _load(self, part: Part, target: Target, name: str, t: Tensor) -> None:
        w = part.tensor()
        recipe, half, prefix = target.recipe, ROWS // 2, name.rsplit(".", 1)[0]
        which = name.rsplit(".", 1)[1]
        if recipe == "rows":
            (w[:half] if which == "a" else w[half:]).copy_(t)
        elif recipe == "columns":
            (w[:, :1] if which == "a" else w[:, 1:]).copy_(t)
        elif recipe == "transposed":
            w.copy_(t.t())
        elif recipe == "narrowed":
            w.copy_(t.narrow(0, 1, ROWS))
        elif recipe == "strided":
            w[::2].copy_(t[:half])
            w[1::2].copy_(t[half:])
        elif recipe == "scaled":
            w.copy_(t * 2)
        elif recipe == "negated":
            w.copy_(-torch.exp(t.float()))
        elif recipe == "in place":
            w.copy_(t)
            w.mul_(2)
        elif recipe == "through a buffer":
            buffer = torch.empty_like(w)
            buffer.copy_(t)
            w.copy_(buffer)
        elif recipe == "new memory":
            part.put(t.clone())
        elif recipe == "new parameter":
            if "w" in part._parameters:
                part.w = nn.Parameter(t.clone(), requires_grad=False)
            else:
                part.put(t * 1)
        elif recipe == "joined":
            other = self._stash.get(f"{prefix}.{'b' if which == 'a' else 'a'}")
            if other is not None:
                w.copy_(torch.cat([t, other] if which == "a" else [other, t]))
        elif recipe == "padded":
            w[:half].copy_(t)
            w[half:].fill_(0)
        elif recipe == "twice":
            w.copy_(t)
            w.copy_(t)
        elif recipe == "by value":
            w.copy_(t if float(t.float().sum()) > 0 else t * 2)
        elif recipe == "as integers":
            w.view(torch.int8).copy_(t.view(torch.int8))
        elif recipe == "foreach":
            torch._foreach_copy_([w[:half], w[half:]], [t[:half], t[half:]])
        elif recipe == "zeroed":
            w.zero_()
            w.add_(t)
        elif recipe == "diagonal":
            w.zero_()
            w[:COLUMNS].diagonal().copy_(t.diagonal())
        elif recipe == "picked":
            w.copy_(t[torch.tensor([3, 1, 0, 2], device=t.device)])
        elif recipe == "summed":
            w.copy_(t)
            part.register_buffer("total", w.float().sum(0))
        elif recipe == "cached":
            w.copy_(t)
            part.scale = w[0, 0] * 2
        else:  # whole, cast, spread
            w.copy_(t)


def specs(targets: tuple[Target, ...], publish_tied: bool) -> Iterator[TensorSpec]:
    for number, target in enumerate(targets):
        dtype = target.dtype
        if target.recipe == "cast":
            dtype = {"BF16": "F32", "F32": "BF16", "F16": "BF16"}[dtype]
        whole: dict[str, tuple[int, ...]] = {"a": (ROWS, COLUMNS)}
        shapes = {
            "rows": {"a": (ROWS // 2, COLUMNS), "b": (ROWS // 2, COLUMNS)},
            "joined": {"a": (ROWS // 2, COLUMNS), "b": (ROWS // 2, COLUMNS)},
            "columns": {"a": (ROWS, 1), "b": (ROWS, COLUMNS - 1)},
            "transposed": {"a": (COLUMNS, ROWS)},
            "narrowed": {"a": (ROWS + 2, COLUMNS)},
            "spread": {"a": (1, COLUMNS)},
            "padded": {"a": (ROWS // 2, COLUMNS)},
        }.get(target.recipe, whole)
        if target.place == "tied" and number:
            if publish_tied:
                yield TensorSpec(f"parts.{number}.w", target.dtype, (ROWS, COLUMNS))
            continue
        for which, shape in shapes.items():
            yield TensorSpec(f"t.{number}.{which}", dtype, shape)


def values(layout: Layout, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {spec.name: (torch.randn(spec.shape, generator=random) * 2).to(spec.torch_dtype) for spec in layout.tensors}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(INT_OF_WIDTH[tensor.element_size()])


def load(targets: tuple[Target, ...], weights: Weights) -> Model:
    """As vLLM loads a model, watched."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model(targets)
    record_metadata_for_reloading(model)
    watch = processing._Watch(model)
    with torch.no_grad():
        model.load_weights(weights.items())
    watch.interception.remove()
    watch.record()
    return model


def everything(model: Model) -> Weights:
    found: Weights = {}
    for number, part in enumerate(model.parts):
        kept = {"attribute": part.attribute, "scale": getattr(part, "scale", None), **part.items}
        for name, tensor in {**part._parameters, **part._buffers, **kept}.items():  # type: ignore[dict-item]
            if isinstance(tensor, Tensor):
                found[f"{number}.{name}"] = tensor.detach()
    return found


class Engine:
    """A receiver's work without its files: one rank."""

    def __init__(self, model: Model, layout: Layout, weights: Weights, folder: Path) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        self.layout, self.model = layout, model
        self.own = attachment.learn(model, config, layout, Agreement(folder, 0, 1, 1.0), "e", "e", ())
        attachment.fill_mirrors(self.own, config, model)
        self.held = Held(True, 0, b"", self.fingerprints(weights), self.own.live_parts())
        wrong = self.own.census.wrong([self.held.parts], self.held.fingerprints)
        if wrong:
            raise SparrowError("not version 0")
        attachment.prove_reload(self.own)

    def fingerprints(self, weights: Weights) -> tuple[int, ...]:
        return tuple(
            int(fingerprint(bits(weights[spec.name]), seed)) & U64_MASK
            for spec, seed in zip(self.layout.tensors, self.layout.seeds, strict=True)
        )

    def switch(self, old: Weights, new: Weights, dense: bool) -> None:
        staged = Staged(NextArtifact("k", "delta", 0, 1))
        for block in blocks(self.layout, old, new, dense):
            added = list(changes_of(block, self.own.placement))
            for totals, more in zip((staged.before, staged.after), parts(added, self.own.placement), strict=True):
                for n, value in more.items():
                    totals[n] = (totals.get(n, 0) + value) & U64_MASK
            staged.changes += added
        wanted = self.fingerprints(new)
        changed = [n for n in range(len(wanted)) if wanted[n] != self.held.fingerprints[n]]
        staged.manifest = SimpleNamespace(  # type: ignore[assignment]
            kind="delta",
            target=1,
            target_state=state_id(self.layout, wanted),
            tensors=[SimpleNamespace(number=n, fingerprint=wanted[n]) for n in changed],
        )
        assert staged.manifest is not None
        staged.parts = staged._own_parts(staged.manifest, self.own.placement, self.held)
        staged.agree([staged.parts], self.own.census, self.held)
        live = self.own.placement.live
        for write in as_writes(staged.changes, live):
            write.do(live[write.live])
            write.check(live[write.live], write.after, self.layout)
        self.own.carry()
        self.held = Held(True, 1, b"", staged.fingerprints, staged.parts)
        assert (self.own.live_parts() == staged.parts).all()
        self.own.check_carried()


def blocks(layout: Layout, old: Weights, new: Weights, dense: bool) -> Iterator[Block]:
    for n, spec in enumerate(layout.tensors):
        before, after = bits(old[spec.name]), bits(new[spec.name])
        at = (before != after).nonzero().reshape(-1)
        if at.numel() and dense:
            yield DenseBlock(n, Box.whole(spec.numel), after)
        elif at.numel():
            yield SparseBlock(n, Box.whole(spec.numel), at, (after - before)[at])


def changed(old: Weights, seed: int) -> Weights:
    """Some weights of some tensors are other bits."""
    random = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in old.items():
        width = tensor.element_size()
        noise = torch.randint(256, (tensor.numel() * width,), generator=random, dtype=torch.uint8)
        other = noise.view(tensor.dtype).reshape(tensor.shape)
        share = float(torch.rand((), generator=random))
        where = torch.rand(tensor.shape, generator=random) < (share if share > 0.4 else 0.0)
        new[name] = torch.where(where, other, tensor)
    return new


targets_strategy = st.lists(
    st.builds(
        Target,
        st.sampled_from(PLACES),
        st.sampled_from(PLAIN) | st.sampled_from(OTHER),
        st.sampled_from(WHENS),
        st.sampled_from(sorted(DTYPES)),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
# What loaders of this file raise where a recipe does not fit its place, at the first load.
IMPOSSIBLE = (RuntimeError, TypeError, KeyError, AttributeError)


def tied(targets: tuple[Target, ...], weights: Weights) -> None:
    """Let published heads be what they are tied to, where that is published as it is."""
    for number in range(len(targets)):
        head, source = weights.get(f"parts.{number}.w"), weights.get(f"t.{number - 1}.a")
        if head is not None and source is not None and source.shape == head.shape:
            weights[f"parts.{number}.w"] = source.to(head.dtype)


def target(place: str, recipe: str = "whole", when: str = "at once") -> Target:
    return Target(place, recipe, when, "BF16")


REFUSED, NOTICED = "refused: PlacementError", "noticed: PlacementError"
# Each of these once was served with other weights than the trainer's, and called exact.
FOUND: dict[str, tuple[str, tuple[Target, ...]]] = {
    "a buffer that is loaded once": (REFUSED, (target("parameter", "by value"), target("buffer", "whole", "once"))),
    "an attribute that is loaded once": (
        REFUSED,
        (target("parameter", "by value"), target("attribute", "whole", "once")),
    ),
    "a loader that tires": (NOTICED, (target("parameter", "by value"), target("parameter", "whole", "thrice"))),
    "other memory": (REFUSED, (target("parameter", "new memory", "thrice"),)),
    "another buffer": (REFUSED, (target("buffer", "new memory", "thrice"),)),
    "a cache": (NOTICED, (target("parameter", "by value"), target("attribute", "cached", "thrice"))),
    "fills in the name of another": (
        REFUSED,
        (target("parameter", "zeroed", "at the end"), target("buffer", "whole", "once")),
    ),
    "taken but not written": (REFUSED, (target("buffer", "joined", "once"),)),
    "written in place outside parameters": ("opaque", (target("attribute", "scaled"), target("item", "scaled"))),
    "a head that is no longer tied": ("noticed: FingerprintMismatch", (target("parameter"), target("tied"))),
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(targets_strategy, st.booleans(), st.integers(0, 1000), st.booleans())
def test_a_delta_gives_what_a_fresh_load_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    targets: tuple[Target, ...],
    publish_tied: bool,
    seed: int,
    dense: bool,
) -> None:
    assume(any(True for _ in specs(targets, publish_tied)))
    event(outcome(targets, publish_tied, seed, dense, tmp_path, monkeypatch))


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.parametrize("dense", [False, True])
def test_what_was_served_once(case: str, dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, targets = FOUND[case]
    for seed in range(5):
        assert outcome(targets, True, seed, dense, tmp_path, monkeypatch) == expected


def outcome(
    targets: tuple[Target, ...],
    publish_tied: bool,
    seed: int,
    dense: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What the engine does with the model. Fails unless it refuses, or deltas give what a fresh load gives."""
    layout = Layout(specs(targets, publish_tied))
    weights = values(layout, seed)
    tied(targets, weights)
    monkeypatch.setattr(attachment, "checkpoint_weights", lambda config, model: iter(weights.items()))
    try:
        model = load(targets, weights)
    except IMPOSSIBLE:
        return "impossible"
    before = {name: t.clone() for name, t in everything(model).items()}
    try:
        engine = Engine(model, layout, weights, tmp_path)
    except SparrowError as error:
        assert_same(model, before)
        return f"refused: {type(error).__name__}"
    assert_same(model, before)
    for step in range(3):
        new = changed(weights, seed + step + 1)
        fresh = load(targets, new)
        try:
            engine.switch(weights, new, dense)
        except SparrowError as error:
            return f"noticed: {type(error).__name__}"
        assert_same(model, everything(fresh))
        weights = new
    return "opaque" if engine.own.placement.opaque else "direct"


def assert_same(model: Model, expected: Weights) -> None:
    got = everything(model)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert not got[name].is_meta, name
        assert_bits_equal(got[name], tensor)
