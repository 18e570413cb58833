"""Segments: blocks of many tensors in one independently decodable file (docs/format.md section 5)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch

from sparrowrl.delta import limits, wire
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.codecs import codec_of, dense, fast
from sparrowrl.delta.layout import Layout
from sparrowrl.errors import ConfigError, CorruptData, LayoutError, UnsupportedFormat
from sparrowrl.kernels.bits import INT_OF_WIDTH

MAGIC = b"SPSG"
TARGET_BYTES = 2 << 20
_HEAD = struct.Struct("<4sHHI")
# A block never brings more than half of the weights that a segment may hold, so that one that is not yet half full can
# take it.
_BLOCK_WEIGHTS = limits.SEGMENT_WEIGHTS // 2


class SegmentPacker:
    """Gathers blocks into segments of `target_bytes` to about twice that, the last one excepted.

    Blocks whose encoding would be larger than `target_bytes` are cut, no others are.
    """

    def __init__(self, layout: Layout, target_bytes: int = TARGET_BYTES) -> None:
        """Raises ConfigError unless 1 <= target_bytes <= 4 MiB."""
        if not 1 <= target_bytes <= limits.SEGMENT_BYTES // 4:
            raise ConfigError(f"target_bytes: expected 1 to {limits.SEGMENT_BYTES // 4}, got {target_bytes}")
        self._layout = layout
        self._target = target_bytes
        self._clear()

    def add(self, block: Block) -> list[bytes]:
        """Take a block; returns the segments, often none, that are full now. A sparse block without changes is dropped.

        Raises LayoutError if the block is not of the layout's tensors.
        """
        self._check(block)
        ready = []
        for piece, payload in _encode(block, self._target):
            self._append(piece, payload)
            if (
                self._bytes >= self._target
                or self._weights >= _BLOCK_WEIGHTS
                or len(self._entries) == limits.SEGMENT_BLOCKS
            ):
                ready += self.flush()
        return ready

    def flush(self) -> list[bytes]:
        """The segment of the blocks that are not in any yet: one or, if there are none, no segment."""
        if not self._entries:
            return []
        head = b"".join([wire.array_head(len(self._entries)), *self._entries])
        front = _HEAD.pack(MAGIC, limits.FORMAT_VERSION, 0, len(head)) + head
        segment = b"".join([front, bytes(-len(front) % 4), *self._payloads])
        self._clear()
        return [segment]

    def _clear(self) -> None:
        self._entries: list[bytes] = []
        self._payloads: list[bytes] = []
        self._bytes = self._weights = 0

    def _check(self, block: Block) -> None:
        if not 0 <= block.tensor < len(self._layout):
            raise LayoutError(f"block: expected a tensor number below {len(self._layout)}, got {block.tensor}")
        spec = self._layout.tensors[block.tensor]
        numbers = block.bits if isinstance(block, DenseBlock) else block.steps
        if numbers.dtype != INT_OF_WIDTH[spec.width] or block.box.end > spec.numel:
            raise LayoutError(
                f"block of {spec.name}: expected {INT_OF_WIDTH[spec.width]} within {spec.numel} elements, "
                f"got {numbers.dtype} in {block.box}"
            )
        if isinstance(block, DenseBlock) and block.count != block.box.elements:
            raise LayoutError(f"block of {spec.name}: expected {block.box.elements} weights, got {block.count}")

    def _append(self, block: Block, payload: bytes) -> None:
        box = block.box
        whole = box.row_length == self._layout.tensors[block.tensor].numel
        numbers = None if whole else (box.start, box.row_length, box.stride, box.rows)
        codec = dense.NUMBER if isinstance(block, DenseBlock) else fast.NUMBER
        entry = wire.pack((block.tensor, codec, numbers, block.count, len(payload)))
        self._entries.append(entry)
        self._payloads.append(payload)
        self._bytes += len(entry) + len(payload)
        self._weights += block.count


def may_be_dense(sparse: SparseBlock) -> bool:
    """Whether so much changed that `choose` is worth its while."""
    return sparse.count * 8 >= sparse.box.elements


def choose(sparse: SparseBlock, new_bits: torch.Tensor) -> Block:
    """The block, sparse or dense, that takes fewer bytes.

    `new_bits` intw[elements]: all new bits of the sparse block's box, contiguous, in the box's own numbering.
    """
    if not may_be_dense(sparse):
        return sparse
    whole = DenseBlock(sparse.tensor, sparse.box, new_bits)
    sizes = [sum(len(payload) for _, payload in _encode(block, TARGET_BYTES)) for block in (sparse, whole)]
    return whole if sizes[1] < sizes[0] else sparse


def _encode(block: Block, target: int) -> Iterator[tuple[Block, bytes]]:
    """The block and its payload, cut so that no payload is larger than about `target` bytes (surely not twice that).

    Pieces without changes are left out.
    """
    if not block.count:
        return
    single = block.box.elements == 1
    if single or _fits(block, target):
        payload = dense.encode(block) if isinstance(block, DenseBlock) else fast.encode(block)
        if single or len(payload) <= 2 * target:
            yield block, payload
            return
    for half in _halves(block):
        yield from _encode(half, target)


def _fits(block: Block, target: int) -> bool:
    if isinstance(block, DenseBlock):
        return block.count <= limits.DENSE_ELEMENTS and block.count * block.bits.element_size() * 3 <= target * 4
    if block.count > _BLOCK_WEIGHTS or fast.tiles(block.box.elements, block.count) > limits.BLOCK_TILES:
        return False
    most = 16 * block.steps.element_size()
    return _estimate(block, most) <= target or _estimate(block, _step_bits(block)) <= target


def _estimate(block: SparseBlock, step_bits: float) -> float:
    """About the bytes that the block's encoding takes if a step takes so many bits."""
    gap = block.box.elements // block.count
    return block.count * (step_bits + gap.bit_length() + 1.5) / 8


def _step_bits(block: SparseBlock) -> float:
    """Bits that a step takes on average, from a sample of them."""
    sample = block.steps[:: -(-block.count // 1024)].double().abs()
    return float((2 * sample.log2().floor() + 2).mean())


def _halves(block: Block) -> tuple[Block, Block]:
    """The block cut near its middle weight."""
    if isinstance(block, DenseBlock):
        first, second, at = block.box.cut(block.box.elements // 2)
        return DenseBlock(block.tensor, first, block.bits[:at]), DenseBlock(block.tensor, second, block.bits[at:])
    middle = int(block.positions[block.count // 2])
    first, second, at = block.box.cut(min(max(middle, 1), block.box.elements - 1))
    below = int(torch.searchsorted(block.positions, at))
    return (
        SparseBlock(block.tensor, first, block.positions[:below], block.steps[:below]),
        SparseBlock(block.tensor, second, block.positions[below:] - at, block.steps[below:]),
    )


def decode_segment(data: bytes, layout: Layout, device: torch.device | str = "cpu") -> list[Block]:
    """All blocks of a segment, with their tensors on `device`, in the order written.

    Whether the bytes are those the manifest names is checked where they are fetched. Raises FormatError for anything
    that is not as docs/format.md says.
    """
    limits.check_at_most("segment in bytes", len(data), limits.SEGMENT_BYTES)
    entries, at = _read_head(data)
    blocks, boxes = [], _Boxes(layout)
    where = torch.device(device)
    words = np.frombuffer(data, "<i4", offset=at).copy()
    checked = [boxes.take(entry) for entry in entries]
    if sum(length for *_, length in checked) != words.nbytes:
        raise CorruptData(f"segment: expected {sum(c[-1] for c in checked)} bytes of payload, got {words.nbytes}")
    boxes.check_disjoint()
    at = 0
    for tensor, codec, box, count, length in checked:
        payload = words[at : at + length // 4]
        dtype = INT_OF_WIDTH[layout.tensors[tensor].width]
        blocks.append(codec_of(codec).decode(payload, tensor, box, count, dtype, where))
        at += length // 4
    return blocks


def tensors_in(data: bytes, layout: Layout) -> set[int]:
    """The numbers of the tensors that a segment has blocks of, read from its header alone. Raises FormatError."""
    entries, _ = _read_head(data)
    rows = [limits.check_list("block", entry, 5) for entry in entries]
    return {limits.check_int("block tensor", row[0], 0, len(layout)) for row in rows}


class _Boxes:
    """Checks a segment's list of blocks before any payload is looked at."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._weights = 0
        self._boxes: dict[int, list[Box]] = {}

    def take(self, entry: object) -> tuple[int, int, Box, int, int]:
        tensor, codec, numbers, count, length = limits.check_list("block", entry, 5)
        tensor = limits.check_int("block tensor", tensor, 0, len(self._layout))
        codec = limits.check_int("block codec", codec, 0, 256)
        numel = self._layout.tensors[tensor].numel
        box = Box.whole(numel) if numbers is None else _box(numbers)
        if box.end > numel:
            raise CorruptData(f"box: expected to end within the {numel} elements of tensor {tensor}, got {box}")
        count = limits.check_int("block count", count, 1, box.elements + 1)
        self._weights += count
        limits.check_at_most("weights of a segment", self._weights, limits.SEGMENT_WEIGHTS)
        length = limits.check_int("block length", length, 4, limits.SEGMENT_BYTES)
        if length % 4:
            raise CorruptData(f"block length: expected a multiple of 4, got {length}")
        self._boxes.setdefault(tensor, []).append(box)
        return tensor, codec, box, count, length

    def check_disjoint(self) -> None:
        for tensor, boxes in self._boxes.items():
            if (pair := first_overlap(boxes)) is not None:
                raise CorruptData(f"tensor {tensor}: expected blocks that do not overlap, got {pair[0]} and {pair[1]}")


def _box(numbers: object) -> Box:
    start, row_length, stride, rows = limits.check_list("box", numbers, 4)
    return Box(start, row_length, stride, rows)  # type: ignore[arg-type]


def _read_head(data: bytes) -> tuple[list[object], int]:
    """The list of blocks and the place of the first payload."""
    if len(data) < _HEAD.size or len(data) % 4:
        raise CorruptData(f"segment: expected a multiple of 4 bytes, at least {_HEAD.size}, got {len(data)}")
    magic, version, zero, length = _HEAD.unpack_from(data)
    if (magic, version, zero) != (MAGIC, limits.FORMAT_VERSION, 0):
        raise UnsupportedFormat(f"segment: expected SPSG of version 1, got {data[:8].hex()}")
    limits.check_at_most("segment header in bytes", length, limits.SEGMENT_HEADER_BYTES)
    end = _HEAD.size + length
    at = end + -end % 4
    if at > len(data) or any(data[end:at]):
        raise CorruptData(f"segment: expected a header of {length} bytes and zeros up to {at}, got {len(data)} bytes")
    entries = wire.unpack("segment header", memoryview(data)[_HEAD.size : end], limits.SEGMENT_BLOCKS)
    return limits.check_list("segment header", entries), at


__all__ = [
    "TARGET_BYTES",
    "DenseBlock",
    "SegmentPacker",
    "SparseBlock",
    "choose",
    "decode_segment",
    "may_be_dense",
    "tensors_in",
]
