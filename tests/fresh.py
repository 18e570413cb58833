"""A worker extension that compares every runtime tensor of its live model with a fresh load of a checkpoint.

`worker_extension_cls="fresh.FreshExtension"`: this folder must be on the PYTHONPATH of the workers.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.vllm_worker_ext.processing import processed
from sparrowrl.vllm_worker_ext.worker_extension import WorkerExtension, receiver_of

# State of requests, not of weights.
_STATE = ("kv_cache", "kv_cache_tensor")


def load_fresh(vllm_config: Any, path: str) -> torch.nn.Module:
    """The model that a worker with this configuration would load from the checkpoint at `path`, beside the live one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model

    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = path
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.quant_config = VllmConfig.get_quantization_config(config.model_config, config.load_config)
    own_rotary = mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True)  # else it would be the live model's own
    quick = mock.patch.object(gc, "collect")  # twice in each load, where it is most of the time
    with own_rotary, quick, set_current_vllm_config(config):
        model: torch.nn.Module = get_model(vllm_config=config)
    return model


def runtime_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every tensor that a model's modules hold, by module path and attribute: parameters, buffers and plain ones."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        seen = {id(module)}
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[f"{path}.{name}"] = tensor
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found.update(_inside(f"{path}.{name}", value, seen))
    return found


def _inside(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an attribute: also those in containers and in vLLM's own helpers, such as quantisation methods."""
    if path.rpartition(".")[2] in _STATE or id(value) in seen or isinstance(value, torch.nn.Module):
        return
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        if type(value).__module__.startswith("vllm.config"):
            return
        items = list(vars(value).items())
    else:
        return
    seen.add(id(value))
    for name, item in items:
        yield from _inside(f"{path}.{name}", item, seen)


def difference(live: Tensor, fresh: Tensor) -> str | None:
    """Where two tensors differ first, in bits; None if nowhere."""
    if live.shape != fresh.shape or live.dtype != fresh.dtype:
        return f"expected {fresh.dtype} {tuple(fresh.shape)}, got {live.dtype} {tuple(live.shape)}"
    integer = INT_OF_WIDTH[live.element_size()]
    left, right = (t.detach().reshape(-1).view(integer) for t in (live, fresh))
    bad = (left != right).nonzero().reshape(-1)
    if not bad.numel():
        return None
    first, mask = int(bad[0]), (1 << 8 * live.element_size()) - 1
    bits = [int(side[first]) & mask for side in (right, left)]
    return f"{bad.numel()} of {live.numel()}, first at {first}: expected {bits[0]:#x}, got {bits[1]:#x}"


class FreshExtension(WorkerExtension):
    """What tests ask each worker of an engine; every method answers plain values."""

    vllm_config: Any
    model_runner: Any
    get_model: Any

    def fresh_differences(self, path: str) -> dict[str, str]:
        """The live tensors that are not what a fresh load of `path` gives, each with the first difference."""
        live, fresh = runtime_tensors(self.get_model()), runtime_tensors(load_fresh(self.vllm_config, path))
        differ = {name: "expected a tensor, got none" for name in fresh.keys() - live.keys()}
        differ |= {name: "expected no tensor, got one" for name in live.keys() - fresh.keys()}
        for name in sorted(live.keys() & fresh.keys()):
            expected = fresh[name]
            if name.endswith(".cos_sin_cache"):  # vLLM casts some of them when they are used first
                expected = expected.to(live[name].dtype)
            where = difference(live[name], expected)
            if where is not None:
                differ[name] = where
        return differ

    def fresh_classes(self) -> dict[str, list[str]]:
        """What this rank, which must be attached, takes the checkpoint's tensors for; derived: names of modules."""
        attachment = receiver_of(self)._attachment
        assert attachment is not None
        placement, census = attachment.placement, attachment.census
        special = {"opaque": placement.opaque, "alias": placement.aliases, "unused": census.unused}
        held = {number for number, pieces in enumerate(placement.pieces) if pieces}
        special["direct"] = frozenset(held.difference(*special.values()))
        derived = {one.module for one in processed(self.get_model()) if not one.own}
        names = {kind: [placement.layout.tensors[n].name for n in sorted(some)] for kind, some in special.items()}
        return {**names, "derived": [name for name, module in self.get_model().named_modules() if module in derived]}

    def fresh_names(self) -> list[str]:
        """The names of all runtime tensors with a bit that can be compared."""
        return sorted(name for name, tensor in runtime_tensors(self.get_model()).items() if tensor.numel())

    def fresh_flip(self, name: str, element: int) -> None:
        """Flip the lowest bit of one element of a live tensor, on the ranks that have it."""
        found = runtime_tensors(self.get_model()).get(name)
        if found is None:
            return
        tensor = found.detach()
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), tensor.shape))
        tensor.view(INT_OF_WIDTH[tensor.element_size()])[where] ^= 1

    def fresh_warm_up(self) -> None:
        """Run a dummy batch: an eager engine on the CPU never does, and its pipeline ranks then lack their buffers."""
        self.model_runner.profile_run()
