"""Codec `dense`."""

from __future__ import annotations

import random
import struct

import pytest
import torch
import zstandard
from delta import codec_kit
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.codecs import dense
from sparrowrl.errors import CorruptData, LimitExceeded


@given(st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from(codec_kit.INTEGERS))
@settings(max_examples=100, deadline=None)
def test_blocks_of_any_bits_come_back(seed: int, elements: int, dtype: torch.dtype) -> None:
    codec_kit.check_codec(dense, codec_kit.random_dense(random.Random(seed), elements, dtype))


def test_special_floats_come_back() -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1.0, -1.0] * 50)
    bits = values.view(torch.int32).clone()
    bits[4::8] = torch.arange(50, dtype=torch.int32) | 0x7F800001
    codec_kit.check_codec(dense, DenseBlock(0, Box.whole(400), bits))


def test_bf16_weights_take_two_thirds() -> None:
    weights = (torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    payload = codec_kit.check_codec(dense, DenseBlock(0, Box.whole(100_000), weights.view(torch.int16)))
    assert len(payload) < 0.70 * 200_000


def test_hostile_payloads() -> None:
    rng = random.Random(6)
    blocks = [codec_kit.random_dense(rng, elements, dtype) for elements in (1, 5, 300) for dtype in codec_kit.INTEGERS]
    blocks.append(DenseBlock(0, Box.whole(4096), torch.zeros(4096, dtype=torch.int32)))
    codec_kit.check_hostile_payloads(dense, blocks)
    codec_kit.check_promises(dense, blocks[4], 4)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1 << 26)), "says it holds 4096"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096)), "says it holds 4096"),
        (zstandard.ZstdCompressor().compress(bytes(4095)), "says it holds 4096"),
        (zstandard.ZstdCompressor().compress(bytes(4096)) * 2, "zstd frame"),
        (zstandard.ZstdCompressor().compress(bytes(4096))[:-1], "zstd frame"),
        (struct.pack("<IB", 0xFD2FB528, 0b01100000) + struct.pack("<H", 4096 - 256), "zstd frame"),
        (b"", "zstd frame"),
    ],
)
def test_frames_that_do_not_hold_what_was_promised(frame: bytes, reason: str) -> None:
    payload = struct.pack("<I", len(frame)) + frame
    payload += bytes(-len(payload) % 4)
    with pytest.raises(CorruptData, match=reason):
        codec_kit.decode(dense, payload, DenseBlock(0, Box.whole(4096), torch.zeros(4096, dtype=torch.int8)))


def test_a_block_beyond_the_limit_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="dense block"):
        block = DenseBlock(0, Box.whole(2**22 + 1), torch.zeros(1, dtype=torch.int8).expand(2**22 + 1))
        codec_kit.decode(dense, bytes(64), block)
