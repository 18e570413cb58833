"""Watches a model's own loader place checkpoint tensors, without any data: what goes where, and what is not a copy.

`model.load_weights` runs once over tensors of the meta device, which have names, shapes and dtypes but no data, while a
dispatch mode notes what the loader wants to write. Nothing is written, and afterwards the model is as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparrowrl.delta.layout import Layout
from sparrowrl.errors import PlacementError
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.vllm_worker_ext.attributes import Attributes
from sparrowrl.vllm_worker_ext.piece import Piece

# What a loader may raise on a name or shape that it does not know.
_UNKNOWN = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)


class Model(Protocol):
    """What placement needs of a vLLM model."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any: ...

    def named_modules(self, *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]: ...

    def modules(self) -> Iterator[nn.Module]: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """What the loader does with the tensors of a layout (by number) and the live storages (by number).

    `pieces[n]` are plain copies of tensor n; `padding` are constant fills of what holds that constant already.
    `writers[s]` are the tensors of which something goes into storage s in whatever way; `into[m]`, those that go into
    module m, whose parameters were on the meta device. `irregular` says of a storage, or of a module, what is done
    there that is no plain copy. `used` are the tensors that the loader reads at all, be it in part. `failure` is set if
    the loader needs data: then nothing is known of any tensor.
    """

    layout: Layout
    storages: Storages
    pieces: list[list[Piece]]
    padding: list[Piece] = field(default_factory=list)
    writers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    into: dict[nn.Module, set[int]] = field(default_factory=lambda: defaultdict(set))
    irregular: dict[int | nn.Module, str] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    failure: list[str] = field(default_factory=list)


class Storages:
    """The memory of a model's parameters, buffers and other tensors: each storage once, however many share it."""

    def __init__(self, model: Model) -> None:
        self.names: list[list[str]] = []  # of the parameters in each storage
        self.owners: list[set[nn.Module]] = []
        self.live: list[Tensor] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.meta: dict[int, nn.Module] = {}  # storages on the meta device
        self._number: dict[int, int] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, tensor in {**module._buffers, **module._parameters}.items():
                if tensor is not None:
                    self._add(module, f"{prefix}.{name}".lstrip("."), tensor)
        known = set(self._number)
        for module in model.modules():
            for path, leaf in Attributes.of(module).leaves.items():
                if leaf.tensor.untyped_storage().data_ptr() not in known:
                    self._add(module, path, leaf.tensor)

    def _add(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            self.meta[tensor.untyped_storage()._cdata] = module
            return
        if tensor.numel() == 0 or tensor.element_size() not in INT_OF_WIDTH:
            return
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._number:
            self._number[pointer] = len(self.live)
            self.live.append(flat(tensor))
            self.names.append([])
            self.owners.append(set())
        number = self._number[pointer]
        self.owners[number].add(module)
        if isinstance(tensor, nn.Parameter):
            self.names[number].append(name)
            self.parameters[name] = tensor

    def find(self, tensor: Tensor) -> int | None:
        """The number of the storage that `tensor` is a view of, if it is one of ours."""
        return None if tensor.is_meta else self._number.get(tensor.untyped_storage().data_ptr())


def trace_loader(model: Model, layout: Layout) -> Trace:
    """Watch `model.load_weights` place the tensors of `layout`. Writes nothing.

    Raises PlacementError, naming the tensor, if the loader does not know its name or shape.
    """
    storages, kept = Storages(model), _Kept(model)
    probes = [torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta") for spec in layout.tensors]
    trace = Trace(layout, storages, [[] for _ in probes])
    watch = _Watch(trace, probes)

    def names() -> Iterator[tuple[str, Tensor]]:
        for number, (spec, probe) in enumerate(zip(layout.tensors, probes, strict=True)):
            watch.current = number
            yield spec.name, probe

    try:
        with watch, torch.no_grad():
            model.load_weights(names())
    except PlacementError:
        raise
    except _UNKNOWN as error:
        raise PlacementError(
            f"{watch.name}: expected a tensor that the engine's model knows, but its loader failed with "
            f"{type(error).__name__}: {str(error) or 'no reason given'}; is this the model that the trainer trains?"
        ) from error
    except RuntimeError as error:  # a loader that looks at data, of which there is none here
        trace.failure.append(f"{watch.name}: {type(error).__name__}: {error}")
    finally:
        kept.put_back(trace, watch)
    return trace


class _Kept:
    """The tensors of all modules as they were, for loaders that put others in their places."""

    def __init__(self, model: Model) -> None:
        self._modules = [
            (module, dict(module._parameters), dict(module._buffers), Attributes.of(module))
            for module in model.modules()
        ]
        self._data = {
            id(p): (p, p.data) for _, parameters, _, _ in self._modules for p in parameters.values() if p is not None
        }

    def put_back(self, trace: Trace, watch: _Watch) -> None:
        """Undo replacements, noting each as irregular."""
        for module, parameters, buffers, attributes in self._modules:
            new = {**module._parameters, **module._buffers, **_tensors(Attributes.of(module))}
            old = {**parameters, **buffers, **_tensors(attributes)}
            for name in [name for name, tensor in new.items() if tensor is not old.get(name)]:
                trace.irregular[module] = f"its loader makes a new {name}"
                trace.into[module] |= (sources := watch.sources(new[name]))
                trace.used.update(sources)
            for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
                now.clear()
                now.update(then)  # type: ignore[arg-type]
        for _, _, _, attributes in self._modules:
            attributes.put_back()
        for parameter, data in self._data.values():
            if parameter.data.untyped_storage()._cdata != data.untyped_storage()._cdata:
                number = trace.storages.find(data)
                if number is not None:
                    trace.irregular[number] = "its loader puts other memory in the place of the parameter's"
                    trace.writers[number] |= (sources := watch.sources(parameter.data))
                    trace.used.update(sources)
                parameter.data = data


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written to live storages, and carries none of it out; follows what is computed from the probes."""

    def __init__(self, trace: Trace, probes: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: int | None = None
        self._trace, self._storages = trace, trace.storages
        self._probes = {probe.untyped_storage()._cdata: number for number, probe in enumerate(probes)}
        # By storage: of which checkpoint tensors it holds something. Tensors are kept, so that no address is reused.
        self._taint: dict[int, set[int]] = {storage: {number} for storage, number in self._probes.items()}
        self._alive: list[Tensor] = list(probes)

    @property
    def name(self) -> str:
        """The tensor that the loader took last."""
        return "(before the first tensor)" if self.current is None else self._trace.layout.tensors[self.current].name

    def sources(self, *values: Any) -> set[int]:
        """The checkpoint tensors of which one of the values holds something."""
        found: set[int] = set()
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                live = self._storages.find(value)
                found |= self._trace.writers.get(live, set()) if live is not None else set()
                found |= self._taint.get(value.untyped_storage()._cdata, set())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [value for argument, value in _arguments(func, args, kwargs) if _writes(argument)]
        targets = [value for value in tree_leaves(written) if isinstance(value, Tensor)]
        if len(targets) == 1:
            return self._write(func, targets[0], args, kwargs)
        if targets:
            return self._write_many(func, targets, args, kwargs)
        result = func(*args, **kwargs)
        self._note_reads(func, result, args, kwargs)
        sources = self.sources(args, kwargs)
        if all(returned.alias_info is None for returned in func._schema.returns):  # else it is a view
            self._trace.used.update(sources)
        self._mark(result, sources)
        return result

    def _mark(self, result: Any, sources: set[int]) -> None:
        for value in tree_leaves(result) if sources else ():
            if isinstance(value, Tensor) and self._storages.find(value) is None:
                storage = value.untyped_storage()._cdata
                if storage not in self._probes:
                    self._taint.setdefault(storage, set()).update(sources)
                    self._alive.append(value)

    def _note_reads(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        """An operation that reads a live storage and is no view of it computes something from live weights."""
        seen = {self._storages.find(value) for value in tree_leaves(result) if isinstance(value, Tensor)}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.numel():
                live = self._storages.find(value)
                if live is not None and live not in seen and self._storages.names[live]:
                    self._trace.irregular[live] = f"its loader computes with the live tensor ({func})"

    def _write(self, func: Any, target: Tensor, args: Any, kwargs: Any) -> Any:
        sources = self.sources(args, kwargs)
        self._trace.used.update(sources)
        live = self._storages.find(target)
        if live is not None:
            self._trace.writers[live] |= sources or ({self.current} if self.current is not None else set())
            reason = self._place(func, live, target, args)
            if reason:
                self._trace.irregular[live] = f"its loader {reason}"
            return target
        module = self._storages.meta.get(target.untyped_storage()._cdata) if target.is_meta else None
        if module is not None:
            self._trace.into[module] |= sources
        self._note_reads(func, target, args[1:], kwargs)
        self._mark(target, sources)
        data_less = any(isinstance(v, Tensor) and v.is_meta for v in tree_leaves((args, kwargs)))
        return target if data_less and not target.is_meta else func(*args, **kwargs)

    def _write_many(self, func: Any, targets: list[Tensor], args: Any, kwargs: Any) -> Any:
        sources = self.sources(args, kwargs)
        self._trace.used.update(sources)
        lives = {self._storages.find(target) for target in targets} - {None}
        for live in lives:
            assert live is not None
            self._trace.writers[live] |= sources
            self._trace.irregular[live] = f"its loader does {func}"
        for target in targets:
            if target.is_meta and (module := self._storages.meta.get(target.untyped_storage()._cdata)) is not None:
                self._trace.into[module] |= sources
        self._mark(targets, sources)
        data_less = any(isinstance(v, Tensor) and v.is_meta for v in tree_leaves((args, kwargs)))
        return None if lives or data_less else func(*args, **kwargs)

    def _place(self, func: Any, live: int, target: Tensor, args: Any) -> str:
        """Note a plain copy or padding; otherwise says what it is."""
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Tensor):
            return self._copy(live, target, args[1])
        if func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            value = 0 if func is torch.ops.aten.zero_.default else args[1]
            if not bool((target == value).all()):
                return f"fills with {value} what holds other values"
            padding = Piece.of_copy(live, target, target)
            if padding is not None and target.numel():
                self._trace.padding.append(padding)
            return ""
        return f"does {func}"

    def _copy(self, live: int, target: Tensor, source: Tensor) -> str:
        number = self._probes.get(source.untyped_storage()._cdata)
        if number is None:
            return "computes with it"
        spec = self._trace.layout.tensors[number]
        try:
            source.expand(target.shape)
        except RuntimeError as error:
            raise PlacementError(
                f"{spec.name}: expected a region of shape {tuple(target.shape)}, got one of {tuple(source.shape)}; "
                "is this the model that the trainer trains?"
            ) from error
        if source.dtype != spec.torch_dtype or source.dtype != target.dtype:
            return f"turns {spec.torch_dtype} into {target.dtype}"
        if target.element_size() != self._storages.live[live].element_size():
            return "writes elements of another width"
        if source.shape != target.shape:
            return f"spreads {tuple(source.shape)} over {tuple(target.shape)}"
        if target.numel():
            piece = Piece.of_copy(live, target, source)
            if piece is None:
                return f"repeats elements, strides {source.stride()}"
            self._trace.pieces[number].append(piece)
        return ""


def flat(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as a 1-D integer tensor that shares its memory."""
    storage = tensor.untyped_storage()
    width = tensor.element_size()
    bits = torch.empty(0, dtype=INT_OF_WIDTH[width], device=tensor.device)
    return bits.set_(storage, 0, (storage.nbytes() // width,), (1,))


def _tensors(attributes: Attributes) -> dict[str, Tensor]:
    return {path: leaf.tensor for path, leaf in attributes.leaves.items()}


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(func._schema.arguments, args, strict=False)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
