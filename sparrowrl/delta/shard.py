"""Which part of a tensor a trainer's rank holds, and whether that rank is the one to publish it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import DTYPE_NAMES, TensorSpec
from sparrowrl.errors import LayoutError


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """Stands for a tensor of `shape` of which this rank holds the elements [start, start + local.numel()), row by row.

    For trainers that cut tensors without regard to their dimensions, as FSDP1 does. `local` is 1-D, in the trainer's
    dtype; a rank that holds nothing of the tensor gives an empty one. Of ranks that hold the same part only one is
    `first`, and publishes it.
    """

    shape: tuple[int, ...]
    start: int
    local: torch.Tensor
    first: bool = True

    def part(self, begin: int, shape: tuple[int, ...]) -> FlatShard:
        """What is held here of the tensor of `shape` whose elements are those of this one from `begin` on."""
        start = max(begin, self.start)
        end = max(start, min(begin + math.prod(shape), self.start + self.local.numel()))
        local = self.local[start - self.start : end - self.start]
        return FlatShard(shape, start - begin if local.numel() else 0, local, self.first)


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """This rank's part of one tensor.

    `spec` describes the whole tensor in its wire dtype. `local` holds the elements of `box`, in row-major order as the
    box numbers them. `first` says that no rank before this one holds the same part.
    """

    spec: TensorSpec
    box: Box
    local: torch.Tensor
    first: bool


def local_shard(name: str, tensor: torch.Tensor | FlatShard, wire_dtype: torch.dtype | None, rank: int) -> LocalShard:
    """This rank's part of `tensor`, whose floating-point weights (of 2 bytes and more) travel as `wire_dtype`; None
    keeps every dtype. A tensor that is neither a DTensor nor a FlatShard is taken to be whole on every rank.

    Raises LayoutError for what is no dense tensor with data, for a dtype that docs/format.md does not have, a
    placement other than Replicate and one Shard, or a FlatShard that is not 1-D or not within its shape.
    """
    flat = tensor if isinstance(tensor, FlatShard) else None
    tensor = flat.local if flat is not None else tensor
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        got = (
            f"one of {tensor.layout} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        )
        raise LayoutError(f"{name}: expected a dense tensor that holds its weights, got {got}")
    dtype = tensor.dtype
    if wire_dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
        dtype = wire_dtype
    if dtype not in DTYPE_NAMES:
        raise LayoutError(
            f"{name}: expected a dtype among {', '.join(DTYPE_NAMES.values())}, got {dtype}; leave it out"
        )
    spec = TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape if flat is None else flat.shape))
    if flat is not None:
        return _flat(spec, flat)
    if not isinstance(tensor, DTensor):
        return LocalShard(spec, Box.whole(spec.numel), tensor.detach(), rank == 0)
    local = tensor.to_local().detach()
    box, shape, first = _placed(name, tensor)
    if tuple(local.shape) != shape:
        raise LayoutError(f"{name}: expected a local shard of shape {shape} by {tensor.placements}, got {local.shape}")
    return LocalShard(spec, box, local, first)


def _flat(spec: TensorSpec, flat: FlatShard) -> LocalShard:
    local, elements = flat.local.detach(), flat.local.numel()
    if isinstance(local, DTensor) or local.dim() != 1:
        got = "a DTensor" if isinstance(local, DTensor) else f"one of shape {list(local.shape)}"
        raise LayoutError(f"{spec.name}: expected a plain 1-D tensor as the local part of a FlatShard, got {got}")
    if flat.start < 0 or flat.start + elements > spec.numel:
        raise LayoutError(
            f"{spec.name}: expected a part of its {spec.numel} elements, got {elements} that begin at {flat.start}"
        )
    return LocalShard(spec, Box(flat.start, elements, elements, 1), local, flat.first)


def _placed(name: str, tensor: DTensor) -> tuple[Box, tuple[int, ...], bool]:
    """The box, the local shape, and whether this rank is the first with that box."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Box(0, 0, 0, 1), (0,), False
    dim, parts, part, first = 0, 1, 0, True
    for mesh_dim, (placement, at) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        if type(placement) is Replicate or tensor.device_mesh.size(mesh_dim) == 1:
            first = first and at == 0
        elif type(placement) is Shard and parts == 1:
            dim, parts, part = placement.dim, tensor.device_mesh.size(mesh_dim), at
        else:
            raise LayoutError(
                f"{name}: expected placements Replicate and at most one Shard, got {tensor.placements}; "
                "redistribute the tensor before publishing"
            )
    shape = list(tensor.shape)
    if parts == 1:
        return Box.whole(math.prod(shape)), tuple(shape), first
    whole, inner, outer = shape[dim], math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    chunk = -(-whole // parts)
    begin = min(part * chunk, whole)
    shape[dim] = min(begin + chunk, whole) - begin
    row_length = shape[dim] * inner
    if row_length * outer == 0:
        return Box(0, 0, 0, 1), tuple(shape), first
    stride = row_length if outer == 1 else whole * inner
    return Box(begin * inner, row_length, stride, outer), tuple(shape), first
