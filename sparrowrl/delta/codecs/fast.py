"""Codec 2, `fast`: changed weights only, in tiles that are decoded in parallel (docs/format.md section 5.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sparrowrl.delta import limits
from sparrowrl.delta.blocks import SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.errors import CorruptData
from sparrowrl.kernels.pack import pack
from sparrowrl.kernels.unpack import unpack

NUMBER = 2
CHANGES_PER_TILE = 512
_COUNT_BITS = 21
_BUCKET_BITS = 27


def tile_log2(elements: int, count: int) -> int:
    """The tile size to use, as a power of two, so that tiles hold `CHANGES_PER_TILE` changes or up to half less."""
    wanted = max(elements * CHANGES_PER_TILE // count, 1)
    return min(max(wanted.bit_length() - 1, limits.TILE_LOG2.start), limits.TILE_LOG2.stop - 1)


def tiles(elements: int, count: int) -> int:
    """Number of tiles that `encode` cuts a box into."""
    return -(-elements >> tile_log2(elements, count))


def encode(block: SparseBlock) -> bytes:
    """The payload of a block with at least one change."""
    elements = block.box.elements
    log2 = tile_log2(elements, block.count)
    packed = pack(block.positions, block.steps, elements, log2)
    head = _encode_head(log2, packed.counts.cpu().numpy(), packed.buckets.cpu().numpy())
    return head + packed.words.cpu().numpy().tobytes()


def decode(
    payload: npt.NDArray[np.int32], tensor: int, box: Box, count: int, dtype: torch.dtype, device: torch.device
) -> SparseBlock:
    """The block from its payload (int32 words). Raises CorruptData or LimitExceeded."""
    log2, counts, buckets, start = _decode_head(payload, box.elements, count)
    positions, steps = unpack(
        torch.from_numpy(counts).to(device),
        torch.from_numpy(buckets).to(device),
        torch.from_numpy(payload[start:]).to(device),
        box.elements,
        log2,
        dtype,
    )
    return SparseBlock(tensor, box, positions, steps)


def _encode_head(log2: int, counts: npt.NDArray[np.int32], buckets: npt.NDArray[np.int32]) -> bytes:
    count_bits, bucket_bits = int(counts.max()).bit_length(), int(buckets.max()).bit_length()
    head = bytes((log2, count_bits, bucket_bits, 0))
    width = count_bits + bucket_bits
    if counts.size == 1:
        table = (int(counts[0]) | int(buckets[0]) << count_bits).to_bytes((width + 7) // 8, "little")
    else:
        both = counts.astype("<u8") | buckets.astype("<u8") << np.uint64(count_bits)
        bits = np.unpackbits(both.view(np.uint8).reshape(-1, 8), axis=1, count=width, bitorder="little")
        table = np.packbits(bits, bitorder="little").tobytes()
    return head + table + bytes(-len(table) % 4)


def _decode_head(
    words: npt.NDArray[np.int32], elements: int, count: int
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Tile size, counts, buckets and the place (in words) of the first body."""
    if not words.size:
        raise CorruptData("fast block: expected at least 4 bytes, got none")
    log2, count_bits, bucket_bits, zero = words[:1].tobytes()
    if log2 not in limits.TILE_LOG2 or not 0 < count_bits <= _COUNT_BITS or bucket_bits > _BUCKET_BITS or zero:
        raise CorruptData(f"fast block: bad head, tiles of 2^{log2}, widths {count_bits} and {bucket_bits}, {zero}")
    number, width = -(-elements >> log2), count_bits + bucket_bits
    limits.check_at_most("tiles of a block", number, limits.BLOCK_TILES)
    start = 1 + -(-number * width // 32)
    if start > words.size:
        raise CorruptData(f"fast block: expected {4 * start} bytes of tile heads, got {4 * words.size} in all")
    table = words[1:start].view(np.uint8)
    if number == 1:
        both = int.from_bytes(table.tobytes(), "little")
        total = both & (1 << count_bits) - 1
        counts = np.array([total], np.int32)
        buckets = np.array([both >> count_bits & (1 << bucket_bits) - 1], np.int32)
        rest = both >> width != 0
    else:
        bits = np.unpackbits(table, bitorder="little")
        rest = bool(bits[number * width :].any())
        rows = bits[: number * width].reshape(number, width)
        counts = _numbers(rows[:, :count_bits])
        buckets = _numbers(rows[:, count_bits:])
        total = int(counts.sum(dtype=np.int64))
    if rest or total != count:
        raise CorruptData(f"fast block: expected tile heads that sum to {count}, got {total}")
    return log2, counts, buckets, start


def _numbers(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """int32[n] from bits[n, at most 31], least significant first."""
    padded = np.zeros((bits.shape[0], 32), np.uint8)
    padded[:, : bits.shape[1]] = bits
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").reshape(-1)
