"""Segments: packing, splitting, choosing, and reading what others wrote."""

from __future__ import annotations

import random
import struct

import msgpack
import pytest
import torch
from delta.codec_kit import assert_same_block, raises_format_error, random_dense, random_sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrowrl.delta import limits
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.layout import Layout, TensorSpec
from sparrowrl.delta.segment import SegmentPacker, choose, decode_segment, may_be_dense, tensors_in
from sparrowrl.errors import ConfigError, CorruptData, FormatError, LayoutError, LimitExceeded, UnsupportedFormat

LAYOUT = Layout(
    [
        TensorSpec("a", "BF16", (40, 50)), TensorSpec("b", "F32", (3000,)), TensorSpec("c", "I8", (7,)),
        TensorSpec("d", "F64", (600,)), TensorSpec("e", "BF16", (0,)), TensorSpec("f", "BF16", ()),
    ]
)  # fmt: skip
KINDS = (torch.int16, torch.int32, torch.int8, torch.int64)


def pack(layout: Layout, blocks: list[Block], target_bytes: int = 2 << 20) -> list[bytes]:
    packer = SegmentPacker(layout, target_bytes)
    return [segment for block in blocks for segment in packer.add(block)] + packer.flush()


def unpack(layout: Layout, segments: list[bytes]) -> list[Block]:
    return [block for segment in segments for block in decode_segment(segment, layout)]


def spread(layout: Layout, blocks: list[Block]) -> dict[tuple[int, int], tuple[str, int]]:
    """What the blocks say about each element: ("bits" or "step", number)."""
    said: dict[tuple[int, int], tuple[str, int]] = {}
    for block in blocks:
        dense = isinstance(block, DenseBlock)
        places = torch.arange(block.count) if dense else block.positions
        numbers = block.bits if dense else block.steps
        for index, number in zip(block.box.flat(places).tolist(), numbers.tolist(), strict=True):
            assert (block.tensor, index) not in said
            assert index < layout.tensors[block.tensor].numel
            said[block.tensor, index] = ("bits" if dense else "step", number)
    return said


def some_blocks(seed: int = 1) -> list[Block]:
    rng = random.Random(seed)
    columns = random_sparse(rng, 40 * 30, 100, torch.int16)
    rest = random_dense(rng, 40 * 20, torch.int16)
    return [
        SparseBlock(0, Box(20, 30, 50, 40), columns.positions, columns.steps),
        DenseBlock(0, Box(0, 20, 50, 40), rest.bits),
        random_sparse(rng, 3000, 2500, torch.int32, tensor=1),
        random_dense(rng, 7, torch.int8, tensor=2),
        random_sparse(rng, 600, 3, torch.int64, tensor=3),
        random_dense(rng, 1, torch.int16, tensor=5),
    ]


def test_blocks_of_many_tensors_share_a_segment() -> None:
    blocks = some_blocks()
    (segment,) = pack(LAYOUT, blocks)
    for got, expected in zip(decode_segment(segment, LAYOUT), blocks, strict=True):
        assert_same_block(got, expected)
    assert tensors_in(segment, LAYOUT) == {0, 1, 2, 3, 5}
    assert len(segment) % 4 == 0


def test_nothing_gives_no_segment() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert pack(LAYOUT, [SparseBlock(0, Box.whole(2000), none, none.to(torch.int16))]) == []
    assert pack(LAYOUT, [DenseBlock(4, Box.whole(0), none.to(torch.int16))]) == []


@given(st.integers(0, 2**32), st.sampled_from([20, 100, 1000, 2 << 20]))
@settings(max_examples=15, deadline=None)
def test_split_or_not_the_same_is_said_of_every_element(seed: int, target: int) -> None:
    blocks = some_blocks(seed)
    segments = pack(LAYOUT, blocks, target)
    got = unpack(LAYOUT, segments)
    assert spread(LAYOUT, got) == spread(LAYOUT, blocks)
    for number in range(len(LAYOUT)):
        assert first_overlap([block.box for block in got if block.tensor == number]) is None
    if target == 2 << 20:
        assert len(got) == len(blocks)


def test_a_big_block_is_cut_into_segments_near_the_target() -> None:
    layout = Layout([TensorSpec("big", "BF16", (4_000_000,)), TensorSpec("small", "BF16", (10,))])
    chosen = torch.rand(4_000_000, generator=torch.Generator().manual_seed(3)) < 0.05
    positions = chosen.nonzero().reshape(-1)
    steps = torch.where(positions % 2 == 0, 1, -1).to(torch.int16)
    small = SparseBlock(1, Box.whole(10), torch.tensor([3]), torch.tensor([5], dtype=torch.int16))
    target = 32 << 10
    segments = pack(layout, [small, SparseBlock(0, Box.whole(4_000_000), positions, steps)], target)
    assert len(segments) > 3
    assert all(target <= len(segment) <= 2 * target + 64 for segment in segments[:-1])
    blocks = unpack(layout, segments)
    assert_same_block(blocks[0], small)
    assert torch.equal(torch.cat([block.box.flat(block.positions) for block in blocks[1:]]), positions)
    assert torch.equal(torch.cat([block.steps for block in blocks[1:]]), steps)


def test_steps_that_a_sample_does_not_show_still_keep_the_limit() -> None:
    """Every step but the sampled ones takes 126 bits: the estimate is ten times too low."""
    count = 1024 * 40
    steps = torch.full((count,), torch.iinfo(torch.int64).min)
    steps[::40] = 1
    layout = Layout([TensorSpec("x", "I64", (count,))])
    target = 64 << 10
    block = SparseBlock(0, Box.whole(count), torch.arange(count), steps)
    segments = pack(layout, [block], target)
    assert max(map(len, segments)) <= 3 * target
    assert spread(layout, unpack(layout, segments)) == spread(layout, [block])


def test_dense_blocks_keep_their_limit() -> None:
    elements = limits.DENSE_ELEMENTS + 5
    layout = Layout([TensorSpec("zeros", "I8", (elements,))])
    segments = pack(layout, [DenseBlock(0, Box.whole(elements), torch.zeros(elements, dtype=torch.int8))], 4 << 20)
    blocks = unpack(layout, segments)
    assert [block.count for block in blocks] == [elements // 2, elements - elements // 2]


def test_number_of_blocks_and_weights_of_a_segment_keep_their_limits() -> None:
    layout = Layout([TensorSpec("x", "I8", (70_000,))])
    one = torch.tensor([1], dtype=torch.int8)
    segments = pack(layout, [DenseBlock(0, Box(k, 1, 1, 1), one) for k in range(70_000)], 4 << 20)
    assert [len(decode_segment(segment, layout)) for segment in segments] == [65_536, 70_000 - 65_536]
    half = limits.SEGMENT_WEIGHTS // 2
    zeros = torch.zeros(half, dtype=torch.int8)
    layout = Layout([TensorSpec(f"{k}", "I8", (half,)) for k in range(3)])
    assert len(pack(layout, [DenseBlock(k, Box.whole(half), zeros) for k in range(3)], 4 << 20)) == 3


def test_choose_takes_the_smaller() -> None:
    rng = random.Random(4)
    few = random_sparse(rng, 2000, 20, torch.int16)
    assert choose(few, torch.zeros(2000, dtype=torch.int16)) is few and not may_be_dense(few)
    all_by_one = SparseBlock(0, Box.whole(2000), torch.arange(2000), torch.ones(2000, dtype=torch.int16))
    noise = torch.randint(-(2**15), 2**15, (2000,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    assert may_be_dense(all_by_one) and choose(all_by_one, noise) is all_by_one
    all_anyhow = SparseBlock(0, Box.whole(2000), torch.arange(2000), noise | 1)
    chosen = choose(all_anyhow, noise)
    assert isinstance(chosen, DenseBlock)
    assert_same_block(chosen, DenseBlock(0, Box.whole(2000), noise))


@pytest.mark.parametrize(
    "block",
    [
        DenseBlock(9, Box.whole(1), torch.zeros(1, dtype=torch.int16)),
        DenseBlock(-1, Box.whole(1), torch.zeros(1, dtype=torch.int16)),
        DenseBlock(0, Box.whole(1), torch.zeros(1, dtype=torch.int32)),
        DenseBlock(0, Box.whole(2001), torch.zeros(2001, dtype=torch.int16)),
        DenseBlock(0, Box.whole(5), torch.zeros(4, dtype=torch.int16)),
        SparseBlock(0, Box(1999, 2, 2, 1), torch.tensor([0]), torch.ones(1, dtype=torch.int16)),
    ],
)
def test_blocks_that_are_not_of_the_layout(block: Block) -> None:
    with pytest.raises(LayoutError):
        SegmentPacker(LAYOUT).add(block)


@pytest.mark.parametrize("target", [0, -1, (4 << 20) + 1])
def test_target_bytes(target: int) -> None:
    with pytest.raises(ConfigError, match="target_bytes"):
        SegmentPacker(LAYOUT, target)


# What a hostile writer may send.


def forge(entries: object, payload: bytes, **head: int) -> bytes:
    packed = entries if isinstance(entries, bytes) else msgpack.packb(entries)
    front = struct.pack("<4sHHI", b"SPSG", head.get("version", 1), head.get("zero", 0), head.get("length", len(packed)))
    front += packed
    return front + bytes(-len(front) % 4) + payload


RAW = struct.pack("<II", 1, 1) + b"ab\0\0"
"""A dense payload of one bf16 weight."""


@pytest.mark.parametrize(
    "entries",
    [
        [[0, 1, [0, 1, 1, 1], 1, 12]] * 2,
        [[0, 1, [0, 3, 5, 2], 6, 12], [0, 1, [2, 4, 4, 1], 4, 12]],
        [[0, 1, [0, 1, 3, 2], 2, 12], [0, 1, [1, 1, 4, 2], 2, 12]],
        [[0, 1, [2000, 1, 1, 1], 1, 12]], [[0, 1, [0, 1, 2**40, 2], 2, 12]], [[0, 1, [1, 50, 50, 40], 2000, 12]],
        [[0, 1, [0, 0, 0, 1], 0, 12]], [[4, 1, None, 1, 12]], [[4, 1, None, 0, 12]], [[6, 1, None, 1, 12]],
        [[-1, 1, None, 1, 12]], [[0, 1, [0, 1, 1], 1, 12]], [[0, 1, [0, 1, 1, 1], 2, 12]],
        [[0, 1, [0, 1, 1, 1], 0, 12]],
        [[0, 1, [0, 2, 2, 1], 1, 12]], [[0, 1, [0, 1, 1, 1], 1, 8]], [[0, 1, [0, 1, 1, 1], 1, 16]],
        [[0, 1, [0, 1, 1, 1], 1, 11]], [[0, 1, [0, 1, 1, 1], 1, 2**40]], [[0, 1, [0, 1, 1, 1], 1, -12]],
        [[0, 0, [0, 1, 1, 1], 1, 12]], [[0, 3, [0, 1, 1, 1], 1, 12]], [[0, 1, [0, 1, 1, 1], 1]],
        [[0, 1, [0, 1, 1, 1], 1, 12, 0]], [[0.0, 1, [0, 1, 1, 1], 1, 12]], [[0, 1, {"a": 1}, 1, 12]], {"a": 1}, 7,
        None, [None], [[None] * 5], [], b"", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x01\x00\x00" * 90, b"\xc1",
        b"\x90\x90",
    ],
)  # fmt: skip
def test_hostile_headers(entries: object) -> None:
    assert unpack(LAYOUT, [forge([[0, 1, [0, 1, 1, 1], 1, 12]], RAW)])
    assert raises_format_error(lambda: decode_segment(forge(entries, RAW), LAYOUT))


def test_heads_that_are_no_segment() -> None:
    entries = [[0, 1, [0, 1, 1, 1], 1, 12]]
    for change in ({"version": 2}, {"zero": 1}):
        with pytest.raises(UnsupportedFormat):
            decode_segment(forge(entries, RAW, **change), LAYOUT)
    with pytest.raises(LimitExceeded, match="header"):
        decode_segment(forge(entries, RAW, length=(4 << 20) + 1), LAYOUT)
    for length in (0, 1, 10, 12, 40, 4 << 20):
        with pytest.raises(FormatError):
            decode_segment(forge(entries, RAW, length=length), LAYOUT)
    with pytest.raises(LimitExceeded, match="segment in bytes"):
        decode_segment(bytes((16 << 20) + 4), LAYOUT)
    good = forge(entries, RAW)
    padded = bytearray(good)
    assert padded[23] == 0 and len(good) == 36
    padded[23] = 1
    for bad in (bytes(padded), good + bytes(4), good[:-4], good + b"\0", b""):
        with pytest.raises(CorruptData):
            decode_segment(bad, LAYOUT)


def test_weights_that_no_segment_may_hold_are_refused_before_any_is_decoded() -> None:
    """5 blocks of 2^21 zeros in a few hundred bytes: more than 2^23 weights."""
    layout = Layout([TensorSpec("x", "I8", (2**24,))])
    entries = [[0, 1, [k << 21, 1 << 21, 1 << 21, 1], 1 << 21, 4] for k in range(5)]
    with pytest.raises(LimitExceeded, match="weights of a segment"):
        decode_segment(forge(entries, bytes(20)), layout)


def test_a_segment_cut_anywhere_is_refused() -> None:
    (segment,) = pack(LAYOUT, some_blocks())
    for end in range(len(segment)):
        assert raises_format_error(lambda end=end: decode_segment(segment[:end], LAYOUT)), f"cut at {end}"


@given(st.integers(0, 2**32), st.integers(0, 2**20), st.integers(1, 255), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_damage_gives_blocks_of_the_layout_or_a_format_error(seed: int, place: int, flip: int, near: int) -> None:
    (segment,) = pack(LAYOUT, some_blocks(seed % 4))
    damaged = bytearray(segment)
    for at in {place % len(segment), place * near % min(len(segment), 160)}:
        damaged[at] ^= flip
    seen: list[Block] = []
    if not raises_format_error(lambda: seen.extend(decode_segment(bytes(damaged), LAYOUT))):
        spread(LAYOUT, seen)


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    assert raises_format_error(lambda: decode_segment(data, LAYOUT))
    assert raises_format_error(lambda: decode_segment(forge(data, bytes(-len(data) % 4)), LAYOUT))
