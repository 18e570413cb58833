"""Which modules' weights vLLM processes after loading (packs, quantises, derives others from), learned by watching it.

vLLM turns loaded weights into what its kernels read: per module, `quant_method.process_weights_after_loading(module)`,
or a method of that name of the module itself. From the making of a model to the end of its loading those methods go
through a watch here, which notes whose parameters each call read, wrote or replaced, and which tensors it made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from sparrowrl.errors import PlacementError
from sparrowrl.vllm_worker_ext.attributes import Attributes

_METHOD = "process_weights_after_loading"
_RECORD = "_sparrowrl_processed"
_LOADED = "_sparrowrl_loaded"
_WATCH = "_sparrowrl_watch"
# These look at shapes and dtypes only.
ALLOCATION = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_METADATA = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full"),
        *("is_same_size", "is_pinned", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "result_type"),
    )
)

Around = Callable[[torch.nn.Module, "CallId", Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class CallId:
    """How to make one processing call: `holder`'s method with these arguments."""

    holder: Any
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        return getattr(self.holder, _METHOD)(*self.args)


@dataclass(frozen=True, slots=True)
class Call:
    """A processing call that was made at loading, and the attributes that it changed as they were before."""

    id: CallId
    before: list[tuple[Any, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Processed:
    """A module whose weights were processed, or that was derived from others'.

    `own`: parameters of the module itself were read, written or replaced; `others`: those of other modules were read.
    `made`: paths of the tensors outside parameters and buffers that loading made (see Attributes); `buffers`: names
    of the buffers that it wrote. `calls` are in the order in which they began.
    """

    module: torch.nn.Module
    own: bool
    others: bool = False
    calls: tuple[Call, ...] = ()
    made: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


def processed(model: torch.nn.Module) -> tuple[Processed, ...]:
    """The modules of `model` whose weights are not, or not only, what the model's loader copied.

    Raises PlacementError if the model was loaded before the plugin was, so that nobody watched.
    """
    record: tuple[Processed, ...] | None = vars(model).get(_RECORD)
    if record is None:
        raise PlacementError(
            f"{type(model).__name__}: expected a model whose loading was watched, got one loaded without; the plugin "
            "must be loaded before the model (is it in VLLM_PLUGINS?)"
        )
    return record


def loaded(model: torch.nn.Module) -> dict[torch.nn.Module, Processed]:
    """By module, what the model's loader wrote besides parameters. The model's loading must have been watched."""
    record: dict[torch.nn.Module, Processed] = vars(model)[_LOADED]
    return record


def watch_loading(is_ours: Callable[[Any], bool]) -> None:
    """Have the loading of the models of each VllmConfig for which `is_ours` holds watched, in this process."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader import utils  # and with it those modules that have its functions by name

    initialize, process = utils.initialize_model, utils.process_weights_after_loading
    depth = 0  # models have others inside, made by the same function

    @functools.wraps(initialize)
    def watched_initialize(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            model = initialize(vllm_config, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0 and is_ours(vllm_config):
            setattr(model, _WATCH, _Watch(model))
        return model

    @functools.wraps(process)
    def watched_process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        watch = vars(model).pop(_WATCH, None)
        if watch is None and is_ours(get_current_vllm_config_or_none()):
            watch = _Watch(model)
        try:
            process(model, *args, **kwargs)
        finally:
            if watch is not None:
                watch.interception.remove()
        if watch is not None:
            watch.record()

    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.")]:
        if vars(module).get("initialize_model") is initialize:
            vars(module)["initialize_model"] = watched_initialize
        if vars(module).get(_METHOD) is process:
            vars(module)[_METHOD] = watched_process


class Interception:
    """Has each processing call of some modules go through `around(module, id, call)`, until it is removed."""

    def __init__(self, modules: Iterable[torch.nn.Module], around: Around) -> None:
        self._holders: list[Any] = []
        for module in modules:
            method = getattr(module, "quant_method", None)
            if method is not None:
                self._intercept(method, None, around)
            self._intercept(module, module, around)

    def remove(self) -> None:
        """Let vLLM's own methods show again."""
        while self._holders:
            vars(self._holders.pop()).pop(_METHOD)

    def _intercept(self, holder: Any, module: torch.nn.Module | None, around: Around) -> None:
        original = getattr(holder, _METHOD, None)
        if original is None or _METHOD in vars(holder):  # shared by modules, and here already
            return

        @functools.wraps(original)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            args = (*args, *kwargs.values())
            return around(module or args[0], CallId(holder, args), lambda: original(*args))

        vars(holder)[_METHOD] = intercepted
        self._holders.append(holder)


@dataclass(slots=True)
class _Notes:
    """What is known of one module so far."""

    own: bool = False
    others: bool = False
    calls: list[Call] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)


class _Watch:
    """Takes notes of the processing calls of a model, and of what its `load_weights` writes and makes."""

    def __init__(self, model: Any) -> None:
        self._model: torch.nn.Module = model
        self._notes: dict[torch.nn.Module, _Notes] = {}
        self._touched: list[_Touched] = []
        self._loaded: dict[torch.nn.Module, Processed] = {}
        self._owners: dict[int, set[torch.nn.Module]] = {}
        for module in model.modules():
            self._claim(module)
        self.interception = Interception(model.modules(), self._around)
        self._load: Callable[..., Any] = model.load_weights
        vars(model)["load_weights"] = self._watched_load

    def record(self) -> None:
        """Leave at the model what was noted."""
        vars(self._model).update({_RECORD: self._result(), _LOADED: self._loaded})

    def _result(self) -> tuple[Processed, ...]:
        """The modules of which something was noted, in the model's order."""
        found = []
        for module in self._model.modules():
            notes = self._notes.get(module)
            if notes is None or not (notes.own or notes.others):
                continue
            loaded = self._loaded.get(module, Processed(module, own=True))
            buffers = notes.buffers | (loaded.buffers if notes.own else set())
            made = notes.made | loaded.made
            calls = tuple(notes.calls)
            found.append(Processed(module, notes.own, notes.others, calls, frozenset(made), frozenset(buffers)))
        return tuple(found)

    def _claim(self, module: torch.nn.Module) -> dict[str, int]:
        """Note that the storages of the module's parameters are its; returns them by name."""
        storages = {name: storage for name, p in module._parameters.items() if (storage := storage_of(p))}
        for storage in storages.values():
            self._owners.setdefault(storage, set()).add(module)
        return storages

    def _around(self, module: torch.nn.Module, call: CallId, run: Callable[[], Any]) -> Any:
        notes = self._notes.setdefault(module, _Notes())
        parameters, attributes = self._claim(module), Attributes.of(module)
        buffers = {name: storage_of(buffer) for name, buffer in module._buffers.items()}
        number = len(notes.calls)
        notes.calls.append(Call(call, []))
        with self._touching() as touched:
            result = run()
        owners = [self._owners[storage] for storage in touched.read | touched.written if storage in self._owners]
        now = {name: storage for name, p in module._parameters.items() if (storage := storage_of(p))}
        notes.own |= any(module in some for some in owners)
        notes.own |= any(now.get(name) != storage for name, storage in parameters.items())
        notes.others |= any(module not in some for some in owners)
        after = Attributes.of(module)
        held = {*now.values(), *(storage_of(leaf.tensor) for leaf in after.leaves.values())}
        notes.others |= touched.hidden or not held.isdisjoint(touched.blank)
        for storage in touched.written:
            for owner in self._owners.get(storage, ()):
                self._notes.setdefault(owner, _Notes()).own = True
        self._claim(module)
        notes.buffers |= {
            name
            for name, buffer in module._buffers.items()
            if (storage := storage_of(buffer)) != buffers.get(name) or storage in touched.written
        }
        self._note_made(notes, attributes, after)
        notes.calls[number].before.extend(attributes.changed())
        if notes.others:
            self._note_replaced()
        return result

    def _note_made(self, notes: _Notes, before: Attributes, after: Attributes) -> None:
        """Note the tensors that were not there before."""
        for path, leaf in after.leaves.items():
            old = before.leaves.get(path)
            if old is None or old.tensor is not leaf.tensor:
                notes.made.add(path)

    def _note_replaced(self) -> None:
        """A call may also have put other memory in the place of another module's parameters."""
        for module in self._model.modules():
            known = {storage for storage, some in self._owners.items() if module in some}
            if any(storage not in known for storage in (storage_of(p) for p in module._parameters.values()) if storage):
                self._notes.setdefault(module, _Notes()).own = True
                self._claim(module)

    def _watched_load(self, *args: Any, **kwargs: Any) -> Any:
        before = {module: Attributes.of(module) for module in self._model.modules()}
        buffers = {module: dict(module._buffers) for module in self._model.modules()}
        vars(self._model).pop("load_weights")
        with self._touching() as touched:
            result = self._load(*args, **kwargs)
        self._note_loaded(touched.written, buffers)
        for module, attributes in before.items():
            if module not in self._notes:
                notes = _Notes()
                self._note_made(notes, attributes, Attributes.of(module))
                if notes.made:
                    notes.others = True
                    self._notes[module] = notes
        return result

    def _note_loaded(self, written: set[int], before: dict[torch.nn.Module, dict[str, Tensor | None]]) -> None:
        """Note the buffers and attributes that are new or have storages in `written`, but for views of parameters."""
        ours = written - self._owners.keys()
        for module in self._model.modules():
            old = before.get(module, {})
            new = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            buffers = frozenset(n for n, b in new.items() if storage_of(b) in written or b is not old.get(n))
            leaves = Attributes.of(module).leaves.items()
            made = frozenset(path for path, leaf in leaves if storage_of(leaf.tensor) in ours)
            if buffers or made:
                self._loaded[module] = Processed(module, own=True, made=made, buffers=buffers)

    @contextmanager
    def _touching(self) -> Iterator[_Touched]:
        """Notes of what is touched from here on, but not inside a call within this one."""
        self._touched.append(_Touched(self._touched))
        try:
            with self._touched[-1] as touched:
                yield touched
        finally:
            self._touched.pop()


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations read and write, while it is the last of `stack`.

    Kernels that are not operations of torch cannot be seen, but their results can: `blank` are storages that no
    operation has filled since they were allocated, `hidden` says that one was read.
    """

    def __init__(self, stack: list[_Touched]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.blank: set[int] = set()
        self.hidden = False
        self._stack = stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stack[-1] is not self:
            return func(*args, **kwargs)
        self._note(func._schema, args, kwargs)
        result = func(*args, **kwargs)
        if all(returned.alias_info is None for returned in func._schema.returns):
            made = {storage_of(t) for t in (result if isinstance(result, (list, tuple)) else [result])} - {0}
            self.blank = self.blank | made if func._schema.name in ALLOCATION else self.blank - made
        return result

    def _note(self, schema: Any, args: Any, kwargs: Any) -> None:
        if schema.name in _METADATA or schema.name in ALLOCATION:
            return
        named = [*zip(schema.arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        for argument, value in named:
            storages = {storage_of(t) for t in (value if isinstance(value, (list, tuple)) else [value])} - {0}
            if argument.alias_info is None:
                self.read |= storages
                self.hidden |= not self.blank.isdisjoint(storages)
            elif argument.alias_info.is_write:  # an alias that is not written is a view
                self.written |= storages
                self.blank -= storages


def storage_of(tensor: Any) -> int:
    """What tells one storage from another while both are alive; 0 for what has none."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)
