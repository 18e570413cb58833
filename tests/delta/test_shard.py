"""Boxes of DTensor shards, against torch's own offsets, for every rank of a mesh that is only pretended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import assert_bits_equal
from sparrowrl.delta.apply import box_view
from sparrowrl.delta.shard import local_shard
from sparrowrl.errors import LayoutError


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def part_of(whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: list, rank: int) -> DTensor:
    """The DTensor that this rank would hold, cut by torch's own rule."""
    mesh = init_device_mesh("cpu", mesh_shape)
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((10, 3), (4,), [Shard(0)]),
        ((2, 3), (4,), [Shard(0)]),
        ((5, 7, 3), (4,), [Shard(1)]),
        ((5, 7, 3), (3,), [Shard(2)]),
        ((9, 4), (2, 3), [Replicate(), Shard(0)]),
        ((9, 4), (2, 3), [Shard(1), Replicate()]),
        ((9, 4), (2, 1), [Shard(1), Shard(0)]),
        ((6,), (2, 2), [Replicate(), Replicate()]),
        ((0, 4), (2,), [Shard(0)]),
        ((4, 0), (2,), [Shard(0)]),
    ],
)
def test_shards_make_up_the_tensor(shape, mesh, placements):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    rebuilt, written = torch.full((whole.numel(),), -1), 0
    world = torch.Size(mesh).numel()
    for rank in range(world):
        with as_rank(rank, world):
            shard = local_shard("w", part_of(whole, mesh, placements, rank), None, rank)
        assert shard.spec.shape == shape
        assert shard.box.elements == shard.local.numel()
        if shard.box.elements:
            mine = box_view(whole.reshape(-1), shard.box).reshape(-1)
            assert_bits_equal(shard.local.reshape(-1), mine)
        if shard.first and shard.box.elements:
            box_view(rebuilt, shard.box).copy_(shard.local.reshape(shard.box.rows, shard.box.row_length))
            written += shard.box.elements
    assert written == whole.numel()
    assert_bits_equal(rebuilt, whole.reshape(-1))


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Partial(), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)]],
)
def test_other_placements_are_refused_by_name(placements):
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)
        with pytest.raises(LayoutError, match="layer: expected placements Replicate and at most one Shard"):
            local_shard("layer", tensor, None, 0)


def test_a_rank_outside_the_mesh_holds_nothing():
    with as_rank(3, 4):
        mesh = dist.device_mesh.DeviceMesh("cpu", torch.tensor([0, 1]))
        tensor = DTensor.from_local(
            torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        shard = local_shard("w", tensor, None, 3)
        assert shard.box.elements == 0 and not shard.first


def test_a_local_part_of_another_shape_is_refused():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        padded = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
        with pytest.raises(LayoutError, match="expected a local shard of shape"):
            local_shard("w", padded, None, 0)


def test_the_wire_dtype_is_for_floats_of_two_bytes_and_more():
    dtypes = {torch.float32: "BF16", torch.float16: "BF16", torch.int32: "I32", torch.float8_e5m2: "F8_E5M2"}
    for dtype, name in dtypes.items():
        assert local_shard("w", torch.zeros(2, dtype=dtype), torch.bfloat16, 0).spec.dtype == name
    assert local_shard("w", torch.zeros(2), None, 0).spec.dtype == "F32"
