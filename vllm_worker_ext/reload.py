"""Reload some modules of a live engine through vLLM's own loading and processing, in place, and prove that it works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from blake3 import blake3
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparrowrl.errors import PlacementError
from sparrowrl.kernels.bits import INT_OF_WIDTH, as_bits
from sparrowrl.vllm_worker_ext import processing
from sparrowrl.vllm_worker_ext.attributes import Attributes, rewind
from sparrowrl.vllm_worker_ext.processing import CallId, Interception, Processed, storage_of

Key = TypeVar("Key")
Weights = Iterable[tuple[str, Tensor]]
# What loading or processing may raise on weights that it cannot take.
_LOADER_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
_PATTERNS = (0x5A, 0xA5)
_LEAST_ADDRESS = 1 << 32


class _Part(NamedTuple):
    """A tensor that a reload writes, of a module: the memory of `parameter` now, if it is one."""

    module: torch.nn.Module
    tensor: Tensor
    parameter: torch.nn.Parameter | None = None

    def fill(self, data: Tensor) -> None:
        """Write bytes uint8[n] into it; if a loader has put other memory in its place, put it back."""
        if self.parameter is not None and not self.parameter.is_meta:
            self.parameter.data = self.tensor
        bits = as_bits(self.tensor)
        bits.copy_(data.view(bits.dtype).reshape(bits.shape))


def checkpoint_weights(vllm_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the engine's own checkpoint files, as vLLM's loader reads them; none if it reads no files."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    with set_current_vllm_config(vllm_config):
        loader = get_model_loader(vllm_config.load_config)
        if hasattr(loader, "get_all_weights"):
            yield from loader.get_all_weights(vllm_config.model_config, model)


class Reload:
    """Loads some modules of a model anew, into the tensors that they have.

    `processed`: modules whose processing after loading must run again, through vLLM's layerwise reload; `plain`: those
    that `model.load_weights` alone writes. Raises PlacementError if the model was loaded unwatched, or if a kernel
    holds weights in memory of its own, out of reach.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        processed: Sequence[torch.nn.Module],
        plain: Sequence[torch.nn.Module],
    ) -> None:
        record = {known.module: known for known in processing.processed(model)}
        self._model = model
        self._config = vllm_config
        self._processed = [record.get(module, Processed(module, own=True)) for module in processed]
        loaded = processing.loaded(model)
        self._plain = tuple(loaded.get(module, Processed(module, own=True)) for module in plain)
        self._names = {module: name for name, module in model.named_modules()}
        # Found out by `prove`. Modules whose loaders vLLM's reload does not see: all their memory is allocated at once.
        self._unseen: set[torch.nn.Module] = set()
        # Modules that the checkpoint has no weights for (scales that have a default).
        self._fixed: set[torch.nn.Module] = set()
        # How many elements are loaded into a module that is whole, where these are not all that it has (padding).
        self._whole: dict[torch.nn.Module, int] = {}
        # How many elements of each tensor a reload writes.
        self._written: dict[str, int] = {}
        self._check_no_addresses()

    def _check_no_addresses(self) -> None:
        for known in self._processed:
            leaves = Attributes.of(known.module).leaves if known.made else {}
            for path in known.made & leaves.keys():
                tensor = leaves[path].tensor
                if tensor.dtype == torch.int64 and tensor.numel() and int(tensor.max()) >= _LEAST_ADDRESS:
                    raise PlacementError(
                        f"{self._names[known.module]}: expected weights in tensors, got the address of memory that a "
                        f"kernel has packed them into ({path}); take another quantisation"
                    )

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """The processed modules have the parameters that their loaders expect, on the meta device; then all is back."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

        saved = [_Saved(known.module) for known in self._processed]
        try:
            for known in self._processed:
                restore_layer_on_meta(known.module, get_layerwise_info(known.module))
                _unwrap_loaders(known.module)
            yield
        finally:
            for one in saved:
                one.restore()

    def run(self, weights: Weights) -> None:
        """Load `weights`, each module whole or not at all, and process them; what is derived is derived again.

        The tensors stay where they are and get new contents. On any exception they are in their places, with undefined
        contents. Raises PlacementError for a module of which there was only a part.
        """
        self._run(weights, first=False)

    def run_all(self, weights: Weights) -> None:
        """`run` the same tensors as when it was proved; raises PlacementError if not as many elements are written.

        So it is with a loader that loads only once, or only so many times.
        """
        written = self._run(weights, first=False)
        for name, elements in self._written.items():
            if written.get(name, 0) != elements:
                raise PlacementError(
                    f"{name}: expected vLLM to write {elements} elements, as when it was proved that it loads again "
                    f"faithfully, but it wrote {written.get(name, 0)}"
                )

    def digest(self) -> bytes:
        """blake3 of names, dtypes, shapes and bytes of all tensors that `run` writes."""
        total = blake3()
        for name, part in self._parts().items():
            total.update(f"{name}\n{part.tensor.dtype}\n{list(part.tensor.shape)}\n".encode())
            total.update(_bytes(part.tensor).numpy().data)
        return total.digest()

    def prove(self, weights: Callable[[], Weights], held: bool = True) -> bytes:
        """Prove that `run` writes every byte; `weights()` must be those that the engine holds. Returns the digest.

        Twice all tensors, and all memory that is allocated on the way, are filled with a pattern before a reload, the
        second time with its inverse. Raises PlacementError, naming the tensors that are not what they were; they are
        put back then. Takes host memory for a copy of all tensors. If the weights are not `held`, they are from then
        on; each reload must then make the same of them, as there is nothing else to compare it with.
        """
        parts = self._parts()
        kept = {name: _bytes(part.tensor) for name, part in parts.items()}
        saved = [_Saved(known.module) for known in (*self._plain, *self._processed)]
        try:
            wanted = kept if held else self._make_first(weights, parts)
            for byte in _PATTERNS:
                _check_none(self._try_ways(weights, parts, wanted, byte, held))
            if not all(known.own for known in self._processed):
                self._run((), first=False)
                _check_none(self._wrong(parts, wanted))
        except _LOADER_ERRORS as error:
            _put_back(saved, parts, kept)
            raise PlacementError(
                f"{', '.join(parts) or 'nothing'}: expected vLLM to load and process them again, but it failed with "
                f"{type(error).__name__}: {str(error) or 'no reason given'}"
            ) from error
        except BaseException:
            _put_back(saved, parts, kept)
            raise
        return self.digest()

    def _make_first(self, weights: Callable[[], Weights], parts: dict[str, _Part]) -> dict[str, Tensor]:
        """Load weights that the engine has never held, finding out how; returns the bytes of all tensors after it."""
        made: dict[str, Tensor] = {}
        for byte in (*_PATTERNS, _PATTERNS[0]):
            self._unseen |= self._processed_of(self._try(weights, parts, made, byte), parts)
            made = {name: _bytes(part.tensor) for name, part in parts.items()}
        return made

    def _processed_of(self, names: Iterable[str], parts: dict[str, _Part]) -> set[torch.nn.Module]:
        known = {known.module for known in self._processed}
        return {parts[name].module for name in names if name in parts} & known

    def _try_ways(
        self, weights: Callable[[], Weights], parts: dict[str, _Part], kept: dict[str, Tensor], byte: int, held: bool
    ) -> list[str]:
        """Reload, finding out how where need be; the names of the tensors that are wrong after it."""
        wrong = self._try(weights, parts, kept, byte)
        known = {known.module: known for known in self._processed}
        if held and (unseen := self._processed_of(wrong, parts) - self._unseen):
            self._unseen |= unseen
            wrong = self._try(weights, parts, kept, byte)
            if fixed := {module for module in unseen if self._is_fixed(known[module])}:
                self._unseen -= fixed
                self._fixed |= fixed
                _put_back([], {name: part for name, part in parts.items() if part.module in fixed}, kept)
                wrong = self._try(weights, parts, kept, byte)
        return wrong

    def _is_fixed(self, known: Processed) -> bool:
        """Whether a module that should be loaded has nothing of the checkpoint: it got none, and holds but scales."""
        holds = any(p is not None and p.numel() > 1 for p in known.module._parameters.values())
        return known.own and not known.others and not holds and known.module not in self._whole

    def _try(
        self, weights: Callable[[], Weights], parts: dict[str, _Part], kept: dict[str, Tensor], byte: int
    ) -> list[str]:
        """Fill the tensors, and all memory allocated in a reload, with `byte`; the names of those left wrong."""
        for part in parts.values():
            if part.module not in self._fixed:
                _fill(part.tensor, byte)
        with _Allocations(byte):
            self._written = self._run(weights(), first=True)
        return self._wrong(parts, kept)

    def _wrong(self, parts: dict[str, _Part], kept: dict[str, Tensor]) -> list[str]:
        now = self._parts()
        moved = [name for name in {**now, **parts} if not _is_same(now.get(name), parts.get(name))]
        return moved or [name for name, data in kept.items() if not torch.equal(_bytes(now[name].tensor), data)]

    def _run(self, weights: Weights, first: bool) -> dict[str, int]:
        """Reload; returns how many elements of each tensor that stays in its place were written."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

        modules = [known.module for known in self._processed]
        saved = [_Saved(module) for module in modules]
        plain = [_Saved(known.module) for known in self._plain]
        container = _Only(modules)
        begun: set[tuple[int, torch.nn.Module]] = set()

        def around(module: torch.nn.Module, call: CallId, run: Callable[[], Any]) -> Any:
            self._rewind(module, call, begun)
            return run()

        interception = Interception(modules, around)
        names = {storage_of(part.tensor): name for name, part in self._parts().items()}
        try:
            with self._surroundings(), _Writes(names) as writes:
                initialize_layerwise_reload(container)
                with _Writes(self._allocate_unseen()) as loads:
                    self._model.load_weights(weights)
                loaded = self._check_whole(loads.elements, first)
                for module in loaded & self._unseen:
                    _layerwise_process(module, get_layerwise_info(module))
                finalize_layerwise_reload(container, self._config.model_config)
                self._process_the_rest(loaded, begun)
                for known, one in zip(self._processed, saved, strict=True):
                    one.keep(self._names[known.module], known.made)
        except BaseException:
            for one in (*saved, *plain):
                one.restore()
            raise
        finally:
            interception.remove()
            for module in modules:
                _forget(module)
        elements: dict[str, int] = writes.elements
        return elements

    def _rewind(self, module: torch.nn.Module, call: CallId, begun: set[tuple[int, torch.nn.Module]]) -> None:
        """Let a processing call begin with the attributes that it began with when the model was loaded."""
        key = (id(call.holder), module)
        if key in begun:
            return
        begun.add(key)
        for known in self._processed:
            if known.module is module:
                for earlier in known.calls:
                    if earlier.id.holder is call.holder:
                        rewind(earlier.before)
                        return

    def _allocate_unseen(self) -> dict[int, torch.nn.Module]:
        """Give the unseen modules memory to load into; returns which storage is whose."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        storages: dict[int, torch.nn.Module] = {}
        for module in self._unseen:
            materialize_layer(module, get_layerwise_info(module))
            _unwrap_loaders(module)
            storages |= {storage_of(tensor): module for tensor in module._parameters.values()}
        return storages

    def _check_whole(self, writes: dict[torch.nn.Module, int], first: bool) -> set[torch.nn.Module]:
        """The modules of which all weights came. Raises PlacementError if there is one of which only some came."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded = set()
        for module in (known.module for known in self._processed):
            info = get_layerwise_info(module)
            if not info.can_load():  # vLLM has processed it
                loaded.add(module)
            elif got := writes.get(module, 0) if module in self._unseen else info.load_numel:
                loaded.add(module)
                if first:
                    self._whole[module] = got
                if got != self._whole.get(module):
                    raise PlacementError(
                        f"{self._names[module]}: expected all of its weights or none, got {got} elements of "
                        f"{self._whole.get(module, info.load_numel_total)}"
                    )
        return loaded

    def _process_the_rest(self, loaded: set[torch.nn.Module], begun: set[tuple[int, torch.nn.Module]]) -> None:
        """Make the calls that vLLM's reload does not make: those of modules that are derived from others' weights."""
        for known in self._processed:
            waiting = [call for call in known.calls if (id(call.id.holder), known.module) not in begun]
            if known.own and known.module not in loaded:
                if known.others and waiting:
                    name = self._names[known.module]
                    raise PlacementError(f"{name}: expected its weights, as it is processed from these and from others")
                continue
            for call in waiting:
                if (id(call.id.holder), known.module) not in begun:
                    call.id()

    def _parts(self) -> dict[str, _Part]:
        """Each tensor that `run` writes, once, in a fixed order; not what is memory of other modules' weights."""
        ours = {known.module for known in (*self._plain, *self._processed)}
        others = {storage_of(p) for m in self._model.modules() if m not in ours for p in m._parameters.values()} - {0}
        found: dict[str, _Part] = {}
        seen = set()
        for name, part in self._named():
            tensor = part.tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and not tensor.is_meta and storage_of(tensor) not in others and key not in seen:
                seen.add(key)
                found[name] = part
        return found

    def _named(self) -> Iterator[tuple[str, _Part]]:
        for known in (*self._plain, *self._processed):
            module, leaves = known.module, Attributes.of(known.module).leaves if known.made else {}
            parts = {name: _Part(module, p.data, p) for name, p in module.named_parameters(recurse=False)}
            for name, buffer in module.named_buffers(recurse=False):
                if name in known.buffers:
                    parts[name] = _Part(module, buffer)
            parts |= {path: _Part(module, leaves[path].tensor) for path in known.made if path in leaves}
            for name in (*sorted(parts.keys() - known.made), *sorted(parts.keys() & known.made)):
                yield f"{self._names[module]}.{name}".removeprefix("."), parts[name]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What vLLM sets when it loads a model."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with (
            set_current_vllm_config(self._config),
            set_default_torch_dtype(self._config.model_config.dtype),
            torch.no_grad(),
        ):
            yield


class _Only(torch.nn.Module):
    """Stands for a model that has just these modules: vLLM's reload would go on into the modules inside them."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._only = tuple(modules)

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        """The modules, and not this one."""
        return iter(self._only)


class _Saved:
    """The tensors and attributes that a module has, to put them back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)
        self._non_persistent = set(module._non_persistent_buffers_set)
        self._attributes = Attributes.of(module)

    def restore(self) -> None:
        """Put everything back as it was."""
        module = self._module
        for now, then in ((module._parameters, self._parameters), (module._buffers, self._buffers)):
            now.clear()
            now.update(then)  # type: ignore[arg-type]
        module._non_persistent_buffers_set = set(self._non_persistent)
        rewind(self._attributes.changed())
        for path, leaf in self._attributes.leaves.items():
            if isinstance(leaf.holder, (list, dict)):
                leaf.put(path, leaf.tensor)

    def keep(self, prefix: str, made: Iterable[str]) -> None:
        """Copy the tensors that processing made anew into the ones that there were, and put those in their places."""
        now = Attributes.of(self._module).leaves
        for path in sorted(made):
            old, new = self._attributes.leaves.get(path), now.get(path)
            if old is None or new is None:
                raise PlacementError(f"{prefix}.{path}: expected processing to make this tensor again, but it is gone")
            if new.tensor is old.tensor:
                continue
            if (new.tensor.shape, new.tensor.dtype) != (old.tensor.shape, old.tensor.dtype):
                raise PlacementError(
                    f"{prefix}.{path}: expected a tensor of {old.tensor.dtype} {list(old.tensor.shape)} again, got "
                    f"{new.tensor.dtype} {list(new.tensor.shape)}"
                )
            if new.tensor.data_ptr() != old.tensor.data_ptr():
                old.tensor.copy_(new.tensor)
            new.put(f"{prefix}.{path}", old.tensor)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills memory that is allocated without contents, so that what was there before cannot pass for contents."""

    def __init__(self, byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in processing.ALLOCATION and isinstance(result, Tensor) and not result.is_meta:
            _fill(result, self._byte)
        return result


class _Writes(TorchDispatchMode, Generic[Key]):  # type: ignore[no-untyped-call]
    """Counts the elements that are written to storages, which have keys."""

    def __init__(self, storages: dict[int, Key]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: dict[Key, int] = {}
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                key = self._storages.get(storage_of(tensor))
                if key is not None:
                    self.elements[key] = self.elements.get(key, 0) + tensor.numel()
        return func(*args, **(kwargs or {}))


def _check_none(wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PlacementError(
            f"{', '.join(wrong[:3])}{more}: expected a reload of the weights that the engine holds to give the bytes "
            "that it has, got others: vLLM does not load this engine's weights again faithfully"
        )


def _fill(tensor: Tensor, byte: int) -> None:
    if tensor.element_size() in INT_OF_WIDTH:
        as_bits(tensor).fill_(int.from_bytes(bytes([byte] * tensor.element_size()), "little", signed=True))


def _is_same(a: _Part | None, b: _Part | None) -> bool:
    """Whether both are the same memory, seen in the same way."""
    if a is None or b is None:
        return False
    x, y = a.tensor, b.tensor
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())


def _bytes(tensor: Tensor) -> Tensor:
    """A copy of the tensor's bytes in host memory, uint8[n]."""
    return as_bits(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _put_back(saved: list[_Saved], parts: dict[str, _Part], kept: dict[str, Tensor]) -> None:
    for one in saved:
        one.restore()
    with torch.no_grad():
        for name, part in parts.items():
            part.fill(kept[name])


def _forget(module: torch.nn.Module) -> None:
    """Leave nothing of a reload, whole or broken off, behind."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    get_layerwise_info(module).reset()
    _unwrap_loaders(module)


def _unwrap_loaders(module: torch.nn.Module) -> None:
    """vLLM's reload leaves wrappers on loaders, which would drop weights that are loaded without it."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        loader = original = getattr(tensor, "weight_loader", None)
        while getattr(original, "__name__", "") == "online_process_loader":
            original = original.__wrapped__  # type: ignore[union-attr]
        if original is not loader:
            tensor.weight_loader = original  # type: ignore[union-attr]
