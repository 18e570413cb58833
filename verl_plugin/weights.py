"""What a rank of a verl training engine holds of the model, under the names that a checkpoint has.

FSDP engines are read in place: each rank takes its own shards, and no rank sees a whole tensor. Engines that convert as
they export (Megatron's, and FSDP's whose adapters are merged) only give a stream of whole tensors, gathered on every
rank; of that each rank keeps its own slice of every tensor, so that none compares, or remembers, the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from sparrowrl.delta.shard import FlatShard, local_shard
from sparrowrl.errors import FrameworkUnsupported, LayoutError

NamedShards = Iterator[tuple[str, torch.Tensor | FlatShard]]


def named_shards(engine: Any) -> NamedShards:
    """What this rank holds of a verl training engine (verl.workers.engine), in checkpoint (Hugging Face) names.

    Called by all ranks alike; where verl has to gather, all of them must go on to the end. Tensors stay on the device
    where verl keeps them, in the trainer's dtype. Of tied tensors only the first is given, as in a saved checkpoint.

    Raises FrameworkUnsupported for adapters that verl does not merge, LayoutError for weights that lie in another way
    than FSDP lays them.
    """
    from verl.utils.device import get_torch_device
    from verl.utils.fsdp_utils import fsdp_version
    from verl.workers.engine import FSDPEngine
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model = engine.model_config
    exports_as_fsdp = getattr(type(engine), "get_per_tensor_param", None) is FSDPEngine.get_per_tensor_param
    if not exports_as_fsdp or engine._qat_enabled:
        stream, adapters = engine.get_per_tensor_param()
        if adapters is not None:
            raise _not_merged()
        return _slices(stream, model.hf_config)
    if hasattr(_unwrapped(engine.module), "peft_config"):
        if not model.lora.get("merge", False):
            raise _not_merged()
        stream, _ = engine.get_per_tensor_param()
        return _slices(unfuse_moe_params(stream, model.hf_config.model_type), model.hf_config)
    get_torch_device().synchronize()  # parameters may still be on their way to the host
    if fsdp_version(engine.module) == 1:
        held = _fsdp1(engine.module, first=not any(engine.device_mesh.get_coordinate()[:-1]))
    else:
        held = _fsdp2(engine.module)
    return _in_checkpoint(held, engine)


def _not_merged() -> FrameworkUnsupported:
    return FrameworkUnsupported(
        "expected adapters to be merged before they are sent, got adapters beside the base weights; "
        "set actor_rollout_ref.model.lora.merge=True"
    )


def _unwrapped(module: torch.nn.Module) -> Any:
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def _fsdp2(module: torch.nn.Module) -> dict[str, torch.Tensor | FlatShard]:
    """DTensors, and buffers as they are. Tied parameters are one object."""
    held: dict[str, torch.Tensor | FlatShard] = {}
    seen = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = tensor
    return held


def _fsdp1(module: torch.nn.Module, first: bool) -> dict[str, torch.Tensor | FlatShard]:
    """Ranges of the flat parameters' shards, and buffers as they are. Tied parameters are in a flat one once."""
    held: dict[str, torch.Tensor | FlatShard] = {}
    for path, unit in module.named_modules():
        prefix = f"{path}.".replace("_fsdp_wrapped_module.", "").lstrip(".")
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            for name, shard in _of_flat_parameter(unit._handle.flat_param, first):
                held[prefix + name] = shard
        for name, buffer in unit.named_buffers(recurse=False):
            if name not in unit._non_persistent_buffers_set:
                held[prefix + name] = buffer
    return held


def _of_flat_parameter(flat: Any, first: bool) -> Iterator[tuple[str, FlatShard]]:
    """The parts of this rank's shard of a FlatParameter (torch.distributed.fsdp._flat_param)."""
    mine = getattr(flat, "_local_shard", flat.data).detach()  # the former since the first use, whatever is gathered
    for at, (name, shape, part) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
        if flat._param_extensions[at] is not None or not flat._contiguities[at]:
            raise LayoutError(f"{name}: expected FSDP to flatten a plain tensor, row by row, got one of other kind")
        start, number, offset = (
            (part.intra_param_start_idx, part.numel_in_shard, part.offset_in_shard) if part.in_shard else (0, 0, 0)
        )
        yield name, FlatShard(tuple(shape), start, mine[offset : offset + number], first)


def _in_checkpoint(held: dict[str, torch.Tensor | FlatShard], engine: Any) -> NamedShards:
    """With the checkpoint's names, and with a tensor per expert where the model has all experts in one.

    What becomes of a parameter is what verl does with it as a whole, seen on a tensor without data.
    """
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    for name, tensor in convert_weight_keys(held, _unwrapped(engine.module)).items():
        whole = torch.empty(tuple(tensor.shape), device="meta")
        for piece, view in unfuse_moe_params([(name, whole)], engine.model_config.hf_config.model_type):
            if view is whole:
                yield piece, tensor
            elif view._base is whole and view.is_contiguous():
                yield piece, _flat(name, tensor).part(view.storage_offset(), tuple(view.shape))
            else:
                raise LayoutError(f"{piece}: expected verl to take a range of the elements of {name}, got a copy")


def _flat(name: str, tensor: torch.Tensor | FlatShard) -> FlatShard:
    if isinstance(tensor, FlatShard):
        return tensor
    shard = local_shard(name, tensor, None, dist.get_rank())
    if not shard.box.contiguous:
        raise LayoutError(
            f"{name}: expected shards along its first dimension, to split it into experts, got {shard.box}"
        )
    return FlatShard(shard.spec.shape, shard.box.start, shard.local.reshape(-1), shard.first)


def _slices(stream: Iterable[tuple[str, torch.Tensor]], config: Any) -> NamedShards:
    """This rank's slices of whole tensors, copied: verl may use their memory again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, tensor in stream:
        if config.tie_word_embeddings and name.endswith("lm_head.weight"):
            continue
        start, end = (tensor.numel() * at // world for at in (rank, rank + 1))
        yield name, FlatShard(tuple(tensor.shape), start, tensor.detach().reshape(-1)[start:end].clone())
