"""Fingerprints: the written definition, both paths, shards, and updates from what changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blake3 import blake3

from helpers import assert_bits_equal
from sparrowrl.errors import LayoutError
from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at, fingerprint_each, reference, tensor_seed

MASK = (1 << 64) - 1
BOXES = [(0, 1, 1), (0, 7, 7), (5, 3, 10), (2**40, 1, 4), (2**47, 64, 2**33)]
SEEDS = [0, 1, MASK, tensor_seed("model.embed_tokens.weight")]


def written(index: int, bits: int, seed: int) -> int:
    """docs/format.md, section 4, with Python integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15 + bits) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("box", BOXES)
def test_is_what_the_document_says(sparse_pair: Any, box: tuple[int, int, int]) -> None:
    start, row_length, stride = box
    bits, width = sparse_pair.new[:200], sparse_pair.new.element_size()
    want = 0
    for k, value in enumerate(bits.tolist()):
        index = start + k // row_length * stride + k % row_length
        want += written(index, value & ((1 << 8 * width) - 1), SEEDS[3])
    assert int(fingerprint(bits, SEEDS[3], *box)) & MASK == want & MASK


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("box", BOXES)
def test_paths_agree(sparse_pair: Any, box: tuple[int, int, int], seed: int) -> None:
    got = fingerprint(sparse_pair.new, seed, *box)
    assert_bits_equal(got, reference.fingerprint(sparse_pair.new, reference.signed(seed), *box))


def test_every_kind(pair: Any) -> None:
    got = fingerprint(pair.new, 3)
    assert_bits_equal(got, reference.fingerprint(pair.new, 3, 0, 1, 1))
    if pair.new.numel() == 0:
        assert int(got) == 0


def test_changed_elements_update_it(pair: Any) -> None:
    positions, _ = diff(pair.new, pair.old)
    before, after = (fingerprint_at(t, positions, positions, 9) for t in (pair.old, pair.new))
    assert_bits_equal(fingerprint(pair.old, 9) - before + after, fingerprint(pair.new, 9))
    assert_bits_equal(after, reference.fingerprint_at(pair.new, positions, positions, 9))


def test_shards_add_up() -> None:
    whole = torch.randint(-(2**15), 2**15, (12, 10), dtype=torch.int16)
    want = fingerprint(whole.reshape(-1), 5)
    rows = fingerprint(whole[:5].reshape(-1), 5) + fingerprint(whole[5:].reshape(-1), 5, start=50)
    columns = fingerprint(whole[:, :3].reshape(-1), 5, 0, 3, 10) + fingerprint(whole[:, 3:].reshape(-1), 5, 3, 7, 10)
    assert_bits_equal(rows, want)
    assert_bits_equal(columns, want)


def test_indices_beyond_32_bits() -> None:
    live = torch.tensor([3, -4, 5], dtype=torch.int16)
    indices = torch.tensor([2**31, 2**45 + 1])
    want = written(2**31, 5, 7) + written(2**45 + 1, 0xFFFC, 7)
    assert int(fingerprint_at(live, torch.tensor([2, 1]), indices, 7)) & MASK == want & MASK


def test_seed_is_of_the_name() -> None:
    assert tensor_seed("a") == int.from_bytes(blake3(b"a").digest()[:8], "little")


def test_what_does_not_fit_is_refused() -> None:
    bits, two = torch.zeros(4, dtype=torch.int16), torch.tensor([0, 1])
    for box in ((-1, 1, 1), (0, 0, 1), (0, 3, 2)):
        with pytest.raises(LayoutError):
            fingerprint(bits, 0, *box)
    with pytest.raises(LayoutError):
        fingerprint(bits[::2], 0)
    for positions in (torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.tensor([0]), two.int()):
        with pytest.raises(LayoutError):
            fingerprint_at(bits, positions, two, 0)


@pytest.mark.parametrize("counts", [[], [0], [5], [0, 3, 0, 1, 7, 0], [100, 1]])
def test_groups_sum_as_each_would_alone(sparse_pair: Any, counts: list[int]) -> None:
    n = sum(counts)
    bits, indices = sparse_pair.new[:n], torch.arange(n).flip(0) * 3
    groups, seeds = torch.tensor(counts, dtype=torch.int64), torch.arange(len(counts)) - 1
    want = []
    for some, at, seed in zip(bits.split(counts), indices.split(counts), seeds.tolist(), strict=True):
        want.append(reference.fingerprint_at(some, torch.arange(some.numel()), at, seed))
    expected = torch.stack(want) if want else torch.zeros(0, dtype=torch.int64)
    assert_bits_equal(fingerprint_each(bits, indices, groups, seeds), expected)
    assert_bits_equal(reference.fingerprint_each(bits, indices, groups, seeds), expected)


def test_groups_that_do_not_fit_are_refused(sparse_pair: Any) -> None:
    bits, one = sparse_pair.new[:4], torch.ones(1, dtype=torch.int64)
    with pytest.raises(LayoutError, match="add up to 4, got 1"):
        fingerprint_each(bits, torch.arange(4), one, one)
    with pytest.raises(LayoutError, match="int64"):
        fingerprint_each(bits, torch.arange(4), one.int(), one)
