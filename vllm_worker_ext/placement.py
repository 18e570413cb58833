"""Where each checkpoint weight lives in an engine's tensors, learned by watching the model's own loader.

`model.load_weights` runs once over tensors of the meta device, which have names, shapes and dtypes but no data, while a
dispatch mode notes every copy that the loader wants to make: which region of which checkpoint tensor goes where.
Nothing is written. What is not a plain copy is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparrowrl.delta.layout import Layout
from sparrowrl.errors import PlacementError
from sparrowrl.kernels.bits import INT_OF_WIDTH

# What a loader may raise on a name, shape or operation that it does not know, or for want of data.
_LOADER_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)


class Model(Protocol):
    """What placement needs of a vLLM model."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any: ...

    def named_parameters(self, *, remove_duplicate: bool) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...


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

    @property
    def elements(self) -> int:
        """How many weights the region has."""
        return torch.Size(self.sizes).numel()

    @property
    def contiguous(self) -> bool:
        """Whether runtime position is checkpoint index plus a constant."""
        return self.source_strides == self.target_strides == (1,)

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


@dataclass(frozen=True, slots=True)
class Placement:
    """Every weight of a layout in the tensors of one rank.

    `live` holds each storage once as a 1-D integer tensor; `pieces[n]` are those of tensor n of the layout. The tensors
    in `aliases` are the same memory as others (a tied output head): they are proved but never written.
    """

    layout: Layout
    live: tuple[Tensor, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    aliases: frozenset[int]

    def mark_written(self) -> None:
        """Tell autograd that the parameters changed, as an in-place operation of its own would."""
        torch.autograd.graph.increment_version([p for p in self.parameters if not p.is_inference()])


def learn_placement(model: Model, layout: Layout) -> Placement:
    """Watch `model.load_weights` place the tensors of `layout`.

    Raises PlacementError, naming the tensor, unless every checkpoint weight has exactly one place and every parameter
    element is either such a place or constant padding. Writes nothing.
    """
    storages = _Storages(model)
    probes = [torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta") for spec in layout.tensors]
    watch = _Watch(storages, probes)

    def names() -> Iterator[tuple[str, Tensor]]:
        for spec, probe in zip(layout.tensors, probes, strict=True):
            watch.name = spec.name
            yield spec.name, probe

    try:
        with watch, torch.no_grad():
            model.load_weights(names())
    except _LOADER_ERRORS as error:
        raise PlacementError(
            f"{watch.name}: expected a plain copy into the engine's tensors, but the model's loader failed with "
            f"{type(error).__name__}: {str(error) or 'no reason given'}; is this the model that the trainer trains?"
        ) from error
    storages.check_unmoved(model)
    aliases = _find_aliases(layout, watch.pieces, storages)
    for number, spec in enumerate(layout.tensors):
        _check_source(spec.name, spec.numel, watch.pieces[number])
    owners = [piece for n, some in enumerate(watch.pieces) if n not in aliases for piece in some]
    storages.check_covered(owners, watch.padding)
    return Placement(layout, storages.live, storages.parameters, tuple(map(tuple, watch.pieces)), aliases)


def check_live(model: Model) -> None:
    """Raise PlacementError if a layer multiplies by a packed copy of its weights instead of the live tensor."""
    for name, module in model.named_modules():
        multiply = getattr(module, "cpu_linear", None)
        if multiply is not None and multiply is not torch.nn.functional.linear:
            raise PlacementError(
                f"{name}: expected a layer that reads its live weight, got one that vLLM has repacked; the plugin must "
                "be loaded before the model (is it in VLLM_PLUGINS?)"
            )


class _Storages:
    """The memory of a model's parameters: each storage once, however many parameters share it."""

    def __init__(self, model: Model) -> None:
        self.named = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = tuple({id(p): p for p in self.named.values()}.values())
        self.number: dict[int, int] = {}
        live: list[Tensor] = []
        for name, parameter in self.named.items():
            if parameter.numel() == 0:
                raise PlacementError(f"{name}: expected a weight in memory, got an empty tensor: vLLM has repacked it")
            storage = parameter.untyped_storage()
            if storage.data_ptr() not in self.number:
                self.number[storage.data_ptr()] = len(live)
                live.append(_flat(parameter))
        self.live = tuple(live)

    def find(self, tensor: Tensor) -> int | None:
        """The number of the storage that `tensor` is a view of, if it is one of ours."""
        return None if tensor.is_meta else self.number.get(tensor.untyped_storage().data_ptr())

    def check_unmoved(self, model: Model) -> None:
        """Raise PlacementError if the loader has put other memory in the place of a parameter's."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.find(parameter) is None:
                raise PlacementError(f"{name}: expected the loader to copy into the parameter, but it replaced it")

    def check_covered(self, pieces: Sequence[Piece], padding: Sequence[Piece]) -> None:
        """Raise PlacementError unless each parameter element is the place of one weight, or padding."""
        by_storage: dict[int, list[Piece]] = {number: [] for number in range(len(self.live))}
        for piece in (*pieces, *padding):
            by_storage[piece.live].append(piece)
        for number, some in by_storage.items():
            names = [n for n, p in self.named.items() if self.find(p) == number]
            parts = [(p.sizes, p.target_strides, p.target) for p in some]
            marks = _marks(self.live[number].numel(), parts, f"{names[0]}: two checkpoint weights in one place")
            for name in names:
                p = self.named[name]
                if marks is not None and not marks.as_strided(p.shape, p.stride(), p.storage_offset()).all():
                    raise PlacementError(
                        f"{name}: expected every element to come from the checkpoint, but some do not; "
                        "is this the model that the trainer trains?"
                    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied from meta tensors into live storages, and carries none of it out."""

    def __init__(self, storages: _Storages, probes: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "(before the first tensor)"
        self.pieces: list[list[Piece]] = [[] for _ in probes]
        self.padding: list[Piece] = []
        self._storages = storages
        self._number = {probe.untyped_storage()._cdata: number for number, probe in enumerate(probes)}
        self._dtypes = [probe.dtype for probe in probes]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                live = self._storages.find(value)
                if live is not None:
                    return self._write(func, live, value, args)
        return func(*args, **kwargs)

    def _write(self, func: Any, live: int, target: Tensor, args: Any) -> Tensor:
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Tensor) and args[1].is_meta:
            self._copy(live, target, args[1])
        elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            self._fill(live, target, 0 if func is torch.ops.aten.zero_.default else args[1])
        else:
            raise PlacementError(f"{self.name}: expected the loader to copy it as it is, but it does {func}")
        return target

    def _copy(self, live: int, target: Tensor, source: Tensor) -> None:
        number = self._number.get(source.untyped_storage()._cdata)
        if number is None:
            raise PlacementError(f"{self.name}: expected the loader to copy it as it is, but it computes with it")
        if source.dtype != self._dtypes[number] or source.dtype != target.dtype:
            raise PlacementError(
                f"{self.name}: expected the engine to hold it as {self._dtypes[number]}, got {target.dtype}: publish "
                "it in the engine's dtype"
            )
        if source.shape != target.shape:
            raise PlacementError(
                f"{self.name}: expected a region of shape {tuple(target.shape)}, got one of {tuple(source.shape)}"
            )
        if target.numel():
            self.pieces[number].append(_piece(self.name, live, target, source))

    def _fill(self, live: int, target: Tensor, value: float) -> None:
        if not target.numel():
            return
        if not bool((target == value).all()):
            raise PlacementError(f"{self.name}: expected padding that holds {value} already, got other values")
        self.padding.append(_piece(self.name, live, target, target))


def _flat(parameter: Tensor) -> Tensor:
    """The whole storage of a parameter as a 1-D integer tensor that shares its memory."""
    storage = parameter.untyped_storage()
    width = parameter.element_size()
    flat = torch.empty(0, dtype=INT_OF_WIDTH[width], device=parameter.device)
    return flat.set_(storage, 0, (storage.nbytes() // width,), (1,))


def _piece(name: str, live: int, target: Tensor, source: Tensor) -> Piece:
    """The piece of one copy: dimensions sorted by source stride, those of one element dropped, neighbours merged."""
    every = zip(source.shape, source.stride(), target.stride(), strict=True)
    dims = sorted((d for d in every if d[0] > 1), key=lambda d: -d[1]) or [(1, 1, 1)]
    merged: list[tuple[int, int, int]] = [dims[0]]
    for size, s, t in dims[1:]:
        outer_size, outer_s, outer_t = merged[-1]
        if outer_s == s * size and outer_t == t * size:
            merged[-1] = (outer_size * size, s, t)
        else:
            merged.append((size, s, t))
    for (_, outer, _), (size, s, _) in pairwise(merged):
        if s < 1 or outer < s * size:
            raise PlacementError(f"{name}: expected a region of distinct elements, got strides {source.stride()}")
    sizes, source_strides, target_strides = (tuple(column) for column in zip(*merged, strict=True))
    starts = int(source.storage_offset()), int(target.storage_offset())
    return Piece(sizes, starts[0], source_strides, live, starts[1], target_strides)


def _find_aliases(layout: Layout, pieces: list[list[Piece]], storages: _Storages) -> frozenset[int]:
    """Give a tensor that the loader leaves out the pieces of the one with which the engine shares its memory.

    So it is with the output head of a tied model whose trainer publishes it as well.
    """
    aliases = set()
    whole = {some[0].live: n for n, some in enumerate(pieces) if len(some) == 1}
    for number, spec in enumerate(layout.tensors):
        parameter = storages.named.get(spec.name)
        if pieces[number] or parameter is None:
            continue
        owner = whole.get(storages.number[parameter.untyped_storage().data_ptr()])
        if owner is not None and layout.tensors[owner].shape == spec.shape:
            pieces[number] = list(pieces[owner])
            aliases.add(number)
    return frozenset(aliases)


def _check_source(name: str, numel: int, pieces: Sequence[Piece]) -> None:
    if not pieces and numel:
        raise PlacementError(f"{name}: expected a place in the engine's tensors, but its loader leaves it out")
    parts = [(p.sizes, p.source_strides, p.source) for p in pieces]
    marks = _marks(numel, parts, f"{name}: expected one place for each weight, but some have two")
    if marks is not None and not marks.all():
        raise PlacementError(f"{name}: expected a place for all {numel} weights, but the loader leaves some out")


def _marks(numel: int, parts: Sequence[tuple[Sequence[int], Sequence[int], int]], twice: str) -> Tensor | None:
    """bool[numel] of the elements in one of the parts (sizes, strides, offset); None stands for all True.

    Raises PlacementError(twice) if two parts overlap.
    """
    if len(parts) == 1 and parts[0] == ((numel,), (1,), 0):
        return None
    marks = torch.zeros(numel, dtype=torch.bool)
    for sizes, strides, offset in parts:
        region = marks.as_strided(sizes, strides, offset)
        if region.any():
            raise PlacementError(twice)
        region.fill_(True)
    return marks
