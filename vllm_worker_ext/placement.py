"""Where each checkpoint weight lives on one rank of an engine: directly in its tensors, or in a mirror beside them.

What the loader copies as it is, is *direct*: a change of it is a change of a live element. Whatever else it does, the
tensors concerned are *opaque*: their checkpoint bits are kept in a mirror on the host, which changes like a live
storage, and the model's own loader carries the whole tensors into the engine (reload.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrowrl.delta.layout import Layout
from sparrowrl.errors import PlacementError
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.vllm_worker_ext.piece import Piece, marks
from sparrowrl.vllm_worker_ext.tracing import Storages, Trace


@dataclass(frozen=True, slots=True)
class Plan:
    """Which tensors (by number) are opaque on this rank, and the modules that hold something of them."""

    opaque: frozenset[int]
    modules: frozenset[nn.Module]


@dataclass(frozen=True, slots=True)
class Placement:
    """Every weight of a layout that this rank holds.

    `live` holds each storage once as a 1-D integer tensor, the mirrors of opaque tensors last (on the CPU);
    `pieces[n]` are those of tensor n of the layout. `aliases` are tensors that are the same memory as another (a tied
    output head), and which: they are proved but never written.
    """

    layout: Layout
    live: tuple[Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    aliases: Mapping[int, int]
    opaque: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the engine's own tensors are."""
        return self.live[0].device

    def mirrored(self) -> Iterable[tuple[str, Tensor]]:
        """Names and values (in the layout's shapes and dtypes) of the opaque tensors, sharing the mirrors' memory."""
        for number in sorted(self.opaque):
            spec, pieces = self.layout.tensors[number], self.pieces[number]
            bits = self.live[pieces[0].live] if pieces else torch.empty(0, dtype=INT_OF_WIDTH[spec.width])
            yield spec.name, bits.view(spec.torch_dtype).reshape(spec.shape)

    def mark_written(self) -> None:
        """Tell autograd that the parameters changed, as an in-place operation of its own would."""
        torch.autograd.graph.increment_version([p for p in self.parameters if not p.is_inference()])


def make_plan(trace: Trace, processed: Iterable[nn.Module], more: Iterable[int] = ()) -> Plan:
    """Find the opaque tensors: those that go into a `processed` module, or into a storage that is not only copied to.

    `more` are tensors to make opaque for other reasons. All of a module is opaque or nothing, and so is all of what
    shares a storage or a tensor with it.
    """
    storages = trace.storages
    if trace.failure:
        every = {module for owners in storages.owners for module in owners} | set(storages.meta.values())
        return Plan(frozenset(range(len(trace.layout))), frozenset(every))
    goes_to: dict[int, set[int]] = {}
    for number, writers in trace.writers.items():
        for tensor in writers:
            goes_to.setdefault(tensor, set()).add(number)
    held: dict[nn.Module, set[int]] = {}
    for number, owners in enumerate(storages.owners):
        for module in owners:
            held.setdefault(module, set()).add(number)
    enters: dict[int, set[nn.Module]] = {}
    for module, tensors in trace.into.items():
        for tensor in tensors:
            enters.setdefault(tensor, set()).add(module)

    opaque: set[int] = set()
    modules: set[nn.Module] = set()
    new_tensors = set(more)
    new_modules = {*processed, *(place for place in trace.irregular if isinstance(place, nn.Module))}
    for place in trace.irregular:
        new_modules |= storages.owners[place] if isinstance(place, int) else set()
    for n, some in enumerate(trace.pieces):
        if len(some) > 1 and marks(trace.layout.tensors[n].numel, [piece.region for piece in some]) is None:
            new_tensors.add(n)  # copied to two places
    while new_tensors or new_modules:
        opaque |= new_tensors
        modules |= new_modules
        for tensor in new_tensors:
            new_modules |= enters.get(tensor, set())
            for number in goes_to.get(tensor, ()):
                new_modules |= storages.owners[number]
        new_tensors = set()
        for module in new_modules:
            new_tensors |= trace.into.get(module, set())
            for number in held.get(module, ()):
                new_tensors |= trace.writers.get(number, set())
        shared = {m for module in new_modules for number in held.get(module, ()) for m in storages.owners[number]}
        new_tensors -= opaque
        new_modules = shared - modules
    return Plan(frozenset(opaque & trace.used), frozenset(modules))  # the rest is left out, whatever was around it


def place(trace: Trace, plan: Plan, derived: Iterable[nn.Module] = ()) -> Placement:
    """The placement of one rank. The mirrors are there, but hold zeros.

    Raises PlacementError, naming it, unless every element of a parameter that is not the business of an opaque or
    `derived` module (computed from others' after loading) is the place of one weight, or constant padding.
    """
    layout, storages = trace.layout, trace.storages
    pieces = [[] if n in plan.opaque else list(some) for n, some in enumerate(trace.pieces)]
    _check_covered(trace, plan, pieces, set(derived))
    live = list(storages.live)
    for number in sorted(plan.opaque):
        spec = layout.tensors[number]
        if spec.numel:
            pieces[number] = [Piece.whole(spec.numel, len(live))]
            live.append(torch.zeros(spec.numel, dtype=INT_OF_WIDTH[spec.width]))
    aliases = _find_aliases(layout, pieces, storages)
    parameters = tuple({id(p): p for p in storages.parameters.values()}.values())
    return Placement(layout, tuple(live), parameters, tuple(map(tuple, pieces)), aliases, plan.opaque)


def _check_covered(trace: Trace, plan: Plan, pieces: list[list[Piece]], derived: set[nn.Module]) -> None:
    layout, storages = trace.layout, trace.storages
    by_storage: dict[int, list[Piece]] = {number: [] for number in range(len(storages.live))}
    exempt = {n for n, own in enumerate(storages.owners) if not storages.names[n] or own <= plan.modules | derived}
    for piece in (*(p for some in pieces for p in some), *(p for p in trace.padding if p.live not in exempt)):
        by_storage[piece.live].append(piece)
    for number, some in by_storage.items():
        if number in exempt and len(some) < 2:
            continue
        elements = storages.live[number].numel()
        if len(some) == 1 and (some[0].sizes, some[0].target_strides, some[0].target) == ((elements,), (1,), 0):
            continue
        covered = marks(elements, [(p.sizes, p.target_strides, p.target) for p in some])
        if covered is None:
            raise PlacementError(
                f"{_name(storages, layout, pieces, number)}: expected one checkpoint weight in each place, got two; "
                "does the engine tie weights that the trainer does not?"
            )
        for name in () if number in exempt else storages.names[number]:
            p = storages.parameters[name]
            if not covered.as_strided(p.shape, p.stride(), p.storage_offset()).all():
                raise PlacementError(
                    f"{name}: expected every element to come from the checkpoint, but some do not; "
                    "is this the model that the trainer trains?"
                )


def _name(storages: Storages, layout: Layout, pieces: list[list[Piece]], number: int) -> str:
    tensors = (layout.tensors[n].name for n, some in enumerate(pieces) if any(p.live == number for p in some))
    return next(iter(storages.names[number]), "") or next(tensors)


def _find_aliases(layout: Layout, pieces: list[list[Piece]], storages: Storages) -> dict[int, int]:
    """Give a tensor that the loader leaves out the pieces of the one with which the engine shares its memory.

    So it is with the output head of a tied model whose trainer publishes it as well.
    """
    aliases: dict[int, int] = {}
    whole = {some[0].live: n for n, some in enumerate(pieces) if len(some) == 1}
    for number, spec in enumerate(layout.tensors):
        parameter = storages.parameters.get(spec.name)
        if pieces[number] or parameter is None or not spec.numel:
            continue
        place = storages.find(parameter)
        owner = None if place is None else whole.get(place)
        if owner is not None and layout.tensors[owner].shape == spec.shape:
            pieces[number] = list(pieces[owner])
            aliases[number] = owner
    return aliases
