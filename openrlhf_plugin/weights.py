"""What a rank of OpenRLHF's actor holds of the model, under the names that a checkpoint has.

ZeRO-3 partitions are read in place, and of replicated parameters each rank takes its range: nothing is gathered. Only
parameters that DeepSpeed has split for its own tensor parallelism are, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject import layers

from sparrowrl.delta.shard import FlatShard
from sparrowrl.errors import FrameworkUnsupported, LayoutError
from sparrowrl.openrlhf_plugin.checkpoint_names import Saved, saved_as

NamedShards = Iterator[tuple[str, FlatShard]]


class ActorWeights:
    """The parameters of an `openrlhf.models.Actor` that DeepSpeed trains."""

    def __init__(self, actor: Any, zero_stage: int, tensor_parallel_size: int) -> None:
        """Raises FrameworkUnsupported for adapters, for quantized and for multimodal models, and for ZeRO-3 together
        with DeepSpeed's tensor parallelism.
        """
        self._module = actor.model.module
        if hasattr(self._module, "peft_config"):
            raise FrameworkUnsupported("expected no adapters, got a model with LoRA: they are not merged")
        if getattr(self._module, "is_quantized", False):
            raise FrameworkUnsupported("expected weights in floating point, got a quantized model (--ds.load_in_4bit?)")
        if getattr(actor, "is_vlm", False):
            raise FrameworkUnsupported("expected a text model, got a multimodal one")
        if zero_stage == 3 and tensor_parallel_size > 1:
            raise FrameworkUnsupported(
                f"expected --ds.zero_stage 1 or 2 with --ds.tensor_parallel_size {tensor_parallel_size}, got 3"
            )
        self._zero_stage, self._tensor_parallel_size = zero_stage, tensor_parallel_size
        self._saved: dict[str, list[Saved]] = {}
        self._parameter_of: dict[str, str] = {}

    def shards(self) -> NamedShards:
        """What this rank holds now, in checkpoint (Hugging Face) names, in the trainer's dtype and where it is.

        Called by all ranks alike; all must go on to the end if the trainer is tensor parallel. Of tied parameters only
        the first is given, as in a saved checkpoint; buffers are not, for OpenRLHF does not send them either.

        Raises LayoutError for parameters that lie in another way than DeepSpeed lays them, or that are saved as
        something else than ranges of their elements.
        """
        for name, shard in self._held():
            if name not in self._saved:
                self._saved[name] = self._find_saved(name, shard.shape)
            for saved in self._saved[name]:
                yield saved.name, shard.part(saved.begin, saved.shape)

    def _find_saved(self, name: str, shape: tuple[int, ...]) -> list[Saved]:
        found = saved_as(self._module, name, shape)
        for saved in found:
            other = self._parameter_of.setdefault(saved.name, name)
            if other != name:
                raise LayoutError(f"{saved.name}: expected it to be saved of one parameter, got {other} and {name}")
        return found

    def _held(self) -> NamedShards:
        if self._tensor_parallel_size > 1:
            return _gathered(self._module, self._tensor_parallel_size)
        return _partitions(self._module) if self._zero_stage == 3 else _ranges(self._module)


def _ranges(module: torch.nn.Module) -> NamedShards:
    """ZeRO-1 and 2: every rank has every parameter, and gives its range of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, parameter in module.named_parameters():
        yield name, _range(name, parameter, rank, world)


def _partitions(module: torch.nn.Module) -> NamedShards:
    """ZeRO-3: a parameter is cut into equal partitions, of which the last ones are padded (ds_tensor, per rank)."""
    rank = dist.get_rank()
    parameter: Any  # to which DeepSpeed has added what it knows of it
    for name, parameter in module.named_parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None or partition.numel() != partition.ds_numel or partition.is_meta:
            raise LayoutError(f"{name}: expected a ZeRO-3 partition in memory, got {_described(partition)}")
        start = min(rank * partition.ds_numel, parameter.ds_numel)
        held = min(partition.ds_numel, parameter.ds_numel - start)
        yield name, FlatShard(tuple(parameter.ds_shape), start if held else 0, partition.detach()[:held])


def _gathered(module: torch.nn.Module, tensor_parallel_size: int) -> NamedShards:
    """DeepSpeed's tensor parallelism: a parameter at a time is whole on all ranks, and each copies its range.

    Ranks that share layers, neighbours, also have parameters that are not split. Those may drift apart, for their
    gradients need not be the same sums everywhere; OpenRLHF saves and sends what the first of the ranks has, so the
    others hold nothing of them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    replica, place = divmod(rank, tensor_parallel_size)
    for name, parameter in module.named_parameters():
        with layers.GatherReplacedLayerParams([parameter], module, enabled=True):
            if getattr(parameter, layers.DS_IS_REPLACED_MODULE, False):
                shard = _range(name, parameter, rank, world)
            elif place == 0:
                shard = _range(name, parameter, replica, world // tensor_parallel_size)
            else:
                shard = FlatShard(tuple(parameter.shape), 0, parameter.detach().new_empty(0))
            shard = replace(shard, local=shard.local.clone())
        yield name, shard


def _range(name: str, parameter: torch.Tensor, number: int, parts: int) -> FlatShard:
    """The `number`-th of as many ranges of a parameter that is whole here, a view."""
    start, end = (parameter.numel() * at // parts for at in (number, number + 1))
    return FlatShard(tuple(parameter.shape), start, _flat(name, parameter)[start:end])


def _flat(name: str, parameter: torch.Tensor) -> torch.Tensor:
    if not parameter.is_contiguous():
        raise LayoutError(f"{name}: expected a parameter that lies row by row, got strides {parameter.stride()}")
    return parameter.detach().reshape(-1)


def _described(partition: Any) -> str:
    if partition is None:
        return "a parameter without one"
    return f"{partition.numel()} of {partition.ds_numel} elements on {partition.device}"
