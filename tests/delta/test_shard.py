"""Boxes of DTensor shards, against torch's own offsets, for every rank of a mesh that is only pretended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta.apply import box_view
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.shard import FlatShard, local_shard
from sparrowrl.delta.sink import JournalSink
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


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32]),
)
def test_flat_ranges_make_up_the_tensor(shape, cuts, dtype):
    whole = torch.arange(torch.Size(shape).numel()).to(dtype)
    ends = [0, *sorted(int(cut * whole.numel()) for cut in cuts), whole.numel()]
    rebuilt, boxes = torch.full_like(whole, -1), []
    for rank, (start, end) in enumerate(pairwise(ends)):
        shard = local_shard("w", FlatShard(shape, start, whole[start:end]), None, rank)
        assert shard.spec.shape == shape and shard.spec.torch_dtype == dtype
        assert shard.box == Box(start, end - start, end - start, 1) and shard.first
        box_view(rebuilt, shard.box).copy_(shard.local.reshape(1, -1))
        boxes.append(shard.box)
    assert sum(box.elements for box in boxes) == whole.numel() and first_overlap(boxes) is None
    assert_bits_equal(rebuilt, whole)


def test_a_flat_range_is_cast_and_published_as_any_other():
    local = torch.zeros(2, requires_grad=True)
    shard = local_shard("w", FlatShard((2, 3), 1, local, first=False), torch.bfloat16, 0)
    assert shard.spec.dtype == "BF16" and not shard.first
    assert shard.local.dtype == torch.float32 and not shard.local.requires_grad
    assert local_shard("w", FlatShard(torch.Size([2, 3]), 1, local), None, 0).spec.dtype == "F32"
    assert local_shard("w", FlatShard((), 0, torch.zeros(1)), None, 0).box == Box.whole(1)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (FlatShard((2, 3), 0, torch.zeros(2, 3)), "layer: expected a plain 1-D tensor .* got one of shape"),
        (FlatShard((), 0, torch.zeros(())), "layer: expected a plain 1-D tensor"),
        (FlatShard((2, 3), 1, torch.zeros(6)), "layer: expected a part of its 6 elements, got 6 that begin at 1"),
        (FlatShard((2, 3), -1, torch.zeros(2)), "got 2 that begin at -1"),
        (FlatShard((2, 3), 7, torch.zeros(0)), "got 0 that begin at 7"),
        (FlatShard((2, 3), 0, torch.zeros(6, device="meta")), "layer: expected a dense tensor that holds its weights"),
        (FlatShard((2, 3), 0, torch.zeros(6).to_sparse()), "layer: expected a dense tensor"),
        (FlatShard((2, 3), 0, [0.0] * 6), "layer: expected a dense tensor that holds its weights, got list"),
        (FlatShard((2, 3), 0, torch.zeros(6, dtype=torch.complex64)), "layer: expected a dtype among"),
    ],
)
def test_what_is_no_flat_range_is_refused_by_name(shard, message):
    with pytest.raises(LayoutError, match=message):
        local_shard("layer", shard, torch.bfloat16, 0)


def test_a_dtensor_is_no_flat_range():
    with as_rank(0, 2):
        tensor = part_of(torch.zeros(4), (2,), [Shard(0)], 0)
        with pytest.raises(LayoutError, match=r"layer: expected a plain 1-D tensor .* got a DTensor"):
            local_shard("layer", FlatShard((4,), 0, tensor), None, 0)


@pytest.mark.parametrize("shard", [FlatShard((4,), 0, torch.zeros(3)), FlatShard((4,), 0, torch.zeros(4), first=False)])
def test_ranges_that_leave_a_gap_are_not_published(shard, tmp_path):
    sink = JournalSink(tmp_path, Credentials("run", bytes(32), "reader", "writer"))
    with pytest.raises(LayoutError, match="w: expected shards that make up its 4 elements"):
        Publisher(sink, [("w", shard)])
