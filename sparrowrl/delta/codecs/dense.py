"""Codec 1, `dense`: all bits of a box, in byte planes (docs/format.md section 5.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from sparrowrl.delta import limits
from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.box import Box
from sparrowrl.errors import CorruptData

NUMBER = 1
_ZSTD_LEVEL = 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(block: DenseBlock) -> bytes:
    """The payload of a block of at most 2^22 weights."""
    words = block.bits.cpu().contiguous().numpy()
    planes = _planes_of(words.view(_UNSIGNED[words.itemsize]))
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False, write_content_size=True)
    # Of equal lengths min takes the first: a frame as long as its plane would be read as raw.
    stored = [min(plane.tobytes(), compressor.compress(plane), key=len) for plane in planes]
    lengths = np.array([len(plane) for plane in stored], "<u4")
    payload = b"".join([lengths.tobytes(), *stored])
    return payload + bytes(-len(payload) % 4)


def decode(
    payload: npt.NDArray[np.int32], tensor: int, box: Box, count: int, dtype: torch.dtype, device: torch.device
) -> DenseBlock:
    """The block from its payload (int32 words). Raises CorruptData or LimitExceeded."""
    limits.check_at_most("elements of a dense block", count, limits.DENSE_ELEMENTS)
    if count != box.elements:
        raise CorruptData(f"dense block: expected a count of {box.elements}, got {count}")
    width = dtype.itemsize
    data = payload.view(np.uint8)
    lengths = data[: 4 * width].view("<u4").tolist()
    if len(lengths) != width or max(lengths) > count:
        raise CorruptData(f"dense block: expected {width} plane lengths of at most {count}, got {lengths}")
    end = 4 * width + sum(lengths)
    if end + -end % 4 != data.size or data[end:].any():
        raise CorruptData(f"dense block: expected {end} bytes and zeros up to a multiple of 4, got {data.size}")
    planes = np.empty((width, count), np.uint8)
    at = 4 * width
    for plane, length in zip(planes, lengths, strict=True):
        plane[:] = _expand(data[at : at + length], count)
        at += length
    bits = _unite(planes)
    return DenseBlock(tensor, box, torch.from_numpy(bits).view(dtype).to(device))


def _planes_of(words: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.uint8]:
    top = 8 * words.itemsize - 1
    rotated = (words << words.dtype.type(1)) | (words >> words.dtype.type(top))
    return np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, words.itemsize).T)


def _unite(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.unsignedinteger]:
    width, count = planes.shape
    rotated = np.ascontiguousarray(planes.T).view(_UNSIGNED[width]).reshape(count)
    top = rotated.dtype.type(8 * width - 1)
    bits: npt.NDArray[np.unsignedinteger] = (rotated >> rotated.dtype.type(1)) | (rotated << top)
    return bits


def _expand(stored: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    """The `count` bytes of a plane. The frame's own word for its size is checked before memory is taken."""
    if stored.size == count:
        return stored
    try:
        frame = zstandard.get_frame_parameters(stored.data)
        if frame.content_size != count:
            raise CorruptData(f"plane: expected a zstd frame that says it holds {count} bytes")
        plane = zstandard.ZstdDecompressor().decompress(stored.data, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptData(f"plane: not one whole zstd frame ({error})") from error
    if len(plane) != count:
        raise CorruptData(f"plane: expected {count} bytes, got {len(plane)}")
    return np.frombuffer(plane, np.uint8)
