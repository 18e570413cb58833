"""Codec `fast`."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from delta import codec_kit
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrowrl.delta.blocks import SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.codecs import fast
from sparrowrl.errors import CorruptData, LimitExceeded


@given(st.integers(0, 2**32), st.integers(1, 5000), st.sampled_from(codec_kit.INTEGERS), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_blocks_of_any_density_come_back(seed: int, elements: int, dtype: torch.dtype, share: float) -> None:
    count = min(max(int(elements * share**3), 1), elements)
    codec_kit.check_codec(fast, codec_kit.random_sparse(random.Random(seed), elements, count, dtype))


@pytest.mark.parametrize("dtype", codec_kit.INTEGERS)
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 511, 2**14 + 1])
def test_all_changed_and_one_changed(dtype: torch.dtype, elements: int) -> None:
    rng = random.Random(elements)
    codec_kit.check_codec(fast, codec_kit.random_sparse(rng, elements, elements, dtype))
    for position in {0, elements - 1}:
        one = torch.tensor([position]), torch.tensor([torch.iinfo(dtype).min], dtype=dtype)
        codec_kit.check_codec(fast, SparseBlock(0, Box.whole(elements), *one))


def test_positions_beyond_32_bits() -> None:
    elements = 2**37 + 3
    positions = torch.tensor([0, 2**31, 2**32 + 7, 2**37 + 2])
    block = SparseBlock(0, Box.whole(elements), positions, torch.tensor([1, -1, 300, -32768], dtype=torch.int16))
    codec_kit.check_codec(fast, block)


def test_hostile_payloads() -> None:
    rng = random.Random(5)
    blocks = [
        codec_kit.random_sparse(rng, 700, 40, torch.int16),
        codec_kit.random_sparse(rng, 3000, 2, torch.int64),
        codec_kit.random_sparse(rng, 90, 90, torch.int8),
    ]
    many_tiles = codec_kit.random_sparse(rng, 6000, 3000, torch.int16)
    assert fast.tiles(6000, 3000) > 1
    codec_kit.check_hostile_payloads(fast, [*blocks, many_tiles])
    codec_kit.check_promises(fast, blocks[0], 39)
    codec_kit.check_promises(fast, many_tiles, 3001)


def test_tile_heads_without_memory_behind_them_are_refused() -> None:
    """2^40 tiles of 2^8 elements would need terabytes; a payload of one word must not get them."""
    block = SparseBlock(0, Box.whole(2**48), torch.tensor([5]), torch.tensor([1], dtype=torch.int8))
    with pytest.raises(LimitExceeded, match="tiles of a block"):
        codec_kit.decode(fast, bytes([8, 1, 0, 0]), block)
    with pytest.raises(CorruptData, match="tile heads"):
        codec_kit.decode(fast, bytes([8, 21, 27, 0]), SparseBlock(0, Box.whole(2**28), *_one()))


def _one() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([5]), torch.tensor([1], dtype=torch.int8)


@pytest.mark.parametrize("density", [0.16e-2, 1.22e-2, 10e-2])
def test_bits_per_change_are_near_the_bound_of_elias_codes(density: float) -> None:
    """Positions drawn at random and steps as training has them, 1,000,000 weights: at most 3 % above the sum of the
    positions' entropy, the 0.6 bits that Elias-Fano adds at worst, sign and Elias gamma of the steps."""
    rng = np.random.default_rng(1)
    elements = 1_000_000
    positions = np.flatnonzero(rng.random(elements) < density)
    steps = rng.geometric(0.9, len(positions)) * rng.choice((-1, 1), len(positions))
    block = SparseBlock(0, Box.whole(elements), torch.from_numpy(positions), torch.from_numpy(steps.astype(np.int16)))
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    gamma = 1 + 2 * np.floor(np.log2(np.abs(steps))).mean()
    bound = entropy + 0.6 + 1 + gamma
    spent = 8 * len(codec_kit.check_codec(fast, block)) / len(positions)
    assert spent <= 1.03 * bound, f"{spent:.3f} bits a change, expected at most 3 % above {bound:.3f}"
