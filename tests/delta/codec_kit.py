"""What every codec must satisfy; each codec's test file calls `check_codec` and `check_hostile_payloads`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from helpers import assert_bits_equal
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.codecs import CODECS, Codec, codec_of
from sparrowrl.errors import FormatError

CPU = torch.device("cpu")
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def numbers_of(block: Block) -> torch.Tensor:
    return block.bits if isinstance(block, DenseBlock) else block.steps


def assert_same_block(got: Block, expected: Block) -> None:
    assert type(got) is type(expected)
    assert (got.tensor, got.box, got.count) == (expected.tensor, expected.box, expected.count)
    assert_bits_equal(numbers_of(got), numbers_of(expected))
    if isinstance(got, SparseBlock) and isinstance(expected, SparseBlock):
        assert_bits_equal(got.positions, expected.positions)


def decode(codec: Codec, payload: bytes, like: Block) -> Block:
    words = np.frombuffer(payload, "<i4").copy()
    return codec.decode(words, like.tensor, like.box, like.count, numbers_of(like).dtype, CPU)


def check_codec(codec: Codec, block: Block) -> bytes:
    """A block comes back bit for bit from whole words, the same every time; returns its payload."""
    assert CODECS[codec.NUMBER] is codec and codec_of(codec.NUMBER) is codec
    payload = codec.encode(block)
    assert type(payload) is bytes and len(payload) % 4 == 0
    assert_same_block(decode(codec, payload, block), block)
    assert codec.encode(block) == payload
    return payload


def check_hostile_payloads(codec: Codec, blocks: Sequence[Block]) -> None:
    """Cut, lengthened and damaged payloads give a FormatError of one line or a block of the promised shape."""
    refused = 0
    for block in blocks:
        payload = codec.encode(block)
        for end in range(0, len(payload), 4):
            refused += _refuses(codec, payload[:end], block)
        assert refused, "a cut payload was taken for a whole one"
        assert _refuses(codec, payload + bytes(4), block)
        for bit in range(8 * min(len(payload), 400)):
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            _refuses(codec, bytes(damaged), block)
        for word in range(min(len(payload) // 4, 16)):
            for value in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)):
                _refuses(codec, payload[: 4 * word] + value + payload[4 * word + 4 :], block)


def check_promises(codec: Codec, block: Block, other_count: int) -> None:
    """A count other than the payload's is refused."""
    words = np.frombuffer(codec.encode(block), "<i4").copy()

    def call() -> object:
        return codec.decode(words, block.tensor, block.box, other_count, numbers_of(block).dtype, CPU)

    assert raises_format_error(call)


def raises_format_error(call: Callable[[], object]) -> bool:
    """Whether the call raises a FormatError, of one line; any other exception goes through."""
    try:
        call()
    except FormatError as error:
        assert str(error) and "\n" not in str(error)
        return True
    return False


def _refuses(codec: Codec, payload: bytes, like: Block) -> bool:
    seen: list[Block] = []
    if raises_format_error(lambda: seen.append(decode(codec, payload, like))):
        return True
    (got,) = seen
    assert got.count == like.count and got.box == like.box and numbers_of(got).dtype == numbers_of(like).dtype
    if isinstance(got, SparseBlock):
        assert bool((got.positions[1:] > got.positions[:-1]).all()) and bool((got.steps != 0).all())
        assert int(got.positions[0]) >= 0 and int(got.positions[-1]) < got.box.elements
    return False


def random_sparse(rng: random.Random, elements: int, count: int, dtype: torch.dtype, tensor: int = 0) -> SparseBlock:
    """A sparse block with steps of every size, the most negative number among them."""
    positions = torch.tensor(sorted(rng.sample(range(elements), count)), dtype=torch.int64)
    top = 8 * dtype.itemsize - 1
    steps = [
        rng.choice((1, -1)) * rng.randrange(1 << (b := rng.choice((0, 0, 1, top - 1))), 2 << b) for _ in range(count)
    ]
    low, high = -(1 << top), (1 << top) - 1
    steps = [min(max(step, low), high) for step in steps]
    if count > 2:
        steps[rng.randrange(count)] = low
    return SparseBlock(tensor, Box.whole(elements), positions, torch.tensor(steps, dtype=dtype))


def random_dense(rng: random.Random, elements: int, dtype: torch.dtype, tensor: int = 0) -> DenseBlock:
    """A dense block, partly of equal weights."""
    top = 8 * dtype.itemsize - 1
    same = rng.randrange(-(1 << top), 1 << top)
    bits = [same if rng.random() < 0.8 else rng.randrange(-(1 << top), 1 << top) for _ in range(elements)]
    return DenseBlock(tensor, Box.whole(elements), torch.tensor(bits, dtype=dtype))
