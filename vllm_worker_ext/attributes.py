"""What a module keeps outside its parameters and buffers: plain attributes, its quantisation method, kernel objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from sparrowrl.errors import PlacementError

MISSING = object()
# What every module has, and where processing.py puts its watch.
_LEFT_OUT = frozenset(vars(torch.nn.Module())) | {"process_weights_after_loading", "load_weights"}
# Configurations, which no weight changes, and the registries of layers that hang on them.
_NOT_ENTERED = ("vllm.config", "transformers", "torch", "logging", "threading", "builtins")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor and where it hangs: attribute, item or cell `key` of `holder`."""

    tensor: Tensor
    holder: Any
    key: Any

    def put(self, path: str, tensor: Tensor) -> None:
        """Hang another tensor there. Raises PlacementError for a holder that cannot be changed."""
        if isinstance(self.holder, (list, dict)):
            self.holder[self.key] = tensor
        elif isinstance(self.holder, (tuple, FunctionType)):
            raise PlacementError(f"{path}: expected a tensor that can be replaced, got one inside a tuple or closure")
        else:
            object.__setattr__(self.holder, self.key, tensor)


@dataclass(slots=True)
class Attributes:
    """Everything that hangs on a module: the tensors by path, and what is on the way to them.

    `objects` are those with their attributes, `containers` the lists and dictionaries with copies of them.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    objects: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Attributes:
        """Walk the plain attributes of `module` and of the objects in them; other modules are not entered."""
        found = cls()
        own = _own(module)
        found.objects.append((module, own))
        seen = {id(module)}
        for name, value in sorted({**own, "quant_method": getattr(module, "quant_method", None)}.items()):
            if name == "quant_method" and isinstance(value, torch.nn.Module):
                found._enter(name, value, seen)
            else:
                found._walk(name, value, module, name, seen)
        return found

    def changed(self) -> list[tuple[Any, dict[str, Any]]]:
        """The objects whose attributes are others by now, with those attributes as they were (or MISSING)."""
        changed = []
        for thing, old in self.objects:
            new = _own(thing)
            other = {n: old.get(n, MISSING) for n in {**old, **new} if old.get(n, MISSING) is not new.get(n, MISSING)}
            if other:
                changed.append((thing, other))
        return changed

    def put_back(self) -> None:
        """Give all objects and containers what they had."""
        rewind(self.changed())
        for container, old in self.containers:
            if isinstance(container, list):
                container[:] = old
            else:
                container.clear()
                container.update(old)

    def _walk(self, path: str, value: Any, holder: Any, key: Any, seen: set[int]) -> None:
        if isinstance(value, Tensor):
            self.leaves[path] = Leaf(value, holder, key)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if type(value) in (list, dict):
            self.containers.append((value, value.copy()))
        for name, part in _items(value):
            self._walk(f"{path}.{name}", part, value, name, seen)
        if _is_entered(value):
            self._enter(path, value, seen)

    def _enter(self, path: str, thing: Any, seen: set[int]) -> None:
        own = _own(thing)
        self.objects.append((thing, own))
        for name, value in sorted(own.items()):
            self._walk(f"{path}.{name}", value, thing, name, seen)


def rewind(changes: list[tuple[Any, dict[str, Any]]]) -> None:
    """Give the objects the attributes listed for them."""
    for thing, attributes in changes:
        for name, value in attributes.items():
            if value is not MISSING:
                object.__setattr__(thing, name, value)
            elif name in vars(thing):
                object.__delattr__(thing, name)


def _own(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if name not in _LEFT_OUT}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, FunctionType):
        yield from inspect.getclosurevars(value).nonlocals.items()


def _is_entered(value: Any) -> bool:
    if isinstance(value, (torch.nn.Module, type, FunctionType)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(_NOT_ENTERED)
