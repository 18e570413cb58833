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
class LocalShard:
    """This rank's part of one tensor.

    `spec` describes the whole tensor in its wire dtype. `local` holds the elements of `box`, in row-major order as the
    box numbers them. `first` says that no rank before this one holds the same part.
    """

    spec: TensorSpec
    box: Box
    local: torch.Tensor
    first: bool


def local_shard(name: str, tensor: torch.Tensor, wire_dtype: torch.dtype | None, rank: int) -> LocalShard:
    """This rank's part of `tensor`, whose floating-point weights (of 2 bytes and more) travel as `wire_dtype`; None
    keeps every dtype. A tensor that is no DTensor is taken to be whole on every rank.

    Raises LayoutError for what is no dense tensor with data, for a dtype that docs/format.md does not have, or a
    placement other than Replicate and one Shard.
    """
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
    spec = TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return LocalShard(spec, Box.whole(spec.numel), tensor.detach(), rank == 0)
    local = tensor.to_local().detach()
    box, shape, first = _placed(name, tensor)
    if tuple(local.shape) != shape:
        raise LayoutError(f"{name}: expected a local shard of shape {shape} by {tensor.placements}, got {local.shape}")
    return LocalShard(spec, box, local, first)


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
