"""Other projects' wire formats, for comparison.

Each was written anew for this benchmark from public descriptions of the format (papers, documentation, release
notes); none is the project's own code. Where a description leaves a choice, the one that is best for the rival is
taken: integers in the smallest type that its description allows, like arrays of all tensors side by side in one
compressed frame, vectorised or compiled loops on both sides. Headers are JSON with the name and count of each tensor
(some rivals spend more), and values are absolute or XOR as described, so that every format here is lossless even where
the original is not.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import zstandard

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Change:
    """What changed in one tensor: flat positions int64[n], ascending; the bits there, uint16[n], before and after."""

    name: str
    shape: tuple[int, ...]
    positions: Array
    old: Array
    new: Array


Decoded = dict[str, tuple[Array, Array]]
"""By name: positions int64[n] and values uint16[n], whose meaning the format's `new_bits` knows."""


@dataclass(frozen=True)
class Format:
    """A wire format: `encode` gives the artifact's files, `decode` what was in them, given the tensors' shapes."""

    encode: Callable[[list[Change]], list[bytes]]
    decode: Callable[[list[bytes], dict[str, tuple[int, ...]]], Decoded]
    new_bits: Callable[[Array, Array], Array]


def absolute(old: Array, value: Array) -> Array:
    """New bits of a format that sends new bits."""
    return value


def xor(old: Array, value: Array) -> Array:
    """New bits of a format that sends old XOR new."""
    return old ^ value


def step(old: Array, value: Array) -> Array:
    """New bits of a format that sends new minus old."""
    return old + value


def _gaps(positions: Array) -> Array:
    return np.diff(positions, prepend=-1) - 1


def _positions(gaps: Array) -> Array:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def _smallest(values: Array, types: tuple[str, ...]) -> Array:
    top = int(values.max())
    return values.astype(next(t for t in types if top <= np.iinfo(t).max))


def _with_header(rows: list[list[Any]], parts: list[Array]) -> bytes:
    header = json.dumps(rows, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(header)), header, *(part.tobytes() for part in parts)])


def _header(blob: bytes) -> tuple[list[list[Any]], int]:
    (length,) = struct.unpack_from("<I", blob)
    return json.loads(blob[4 : 4 + length]), 4 + length


def _zstd(blob: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(blob)


def _unzstd(blob: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(blob)


class _Reader:
    """Takes arrays off a blob, one after the other."""

    def __init__(self, blob: bytes, at: int) -> None:
        self._blob, self._at = blob, at

    def take(self, dtype: str, count: int) -> Array:
        part = np.frombuffer(self._blob, dtype, count, self._at)
        self._at += part.nbytes
        return part


# PULSE (arXiv 2602.03839): 2-D COO, row gaps and column gaps within a row, downcast per tensor; new bf16 values; one
# frame.


def pulse_coo_encode(changes: list[Change]) -> list[bytes]:
    """PULSE's two-dimensional format; like arrays of all tensors stand together, which compresses better."""
    rows, row_parts, column_parts = [], [], []
    for change in changes:
        row, column = np.divmod(change.positions, change.shape[-1])
        row_gaps = np.diff(row, prepend=0)
        column_gaps = np.where(row_gaps > 0, column, np.diff(column, prepend=0))
        row_parts.append(_smallest(row_gaps, ("u1", "i4")))
        column_parts.append(_smallest(column_gaps, ("u2", "i4")))
        rows.append([change.name, len(row), row_parts[-1].dtype.str, column_parts[-1].dtype.str])
    return [_zstd(_with_header(rows, [*row_parts, *column_parts, *(change.new for change in changes)]))]


def pulse_coo_decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
    """The inverse, without PULSE's Python loop over rows."""
    blob = _unzstd(files[0])
    rows, at = _header(blob)
    reader = _Reader(blob, at)
    row_parts = [reader.take(kind, count) for _, count, kind, _ in rows]
    column_parts = [reader.take(kind, count) for _, count, _, kind in rows]
    return {
        name: (_coo_positions(row_gaps, column_gaps, shapes[name][-1]), reader.take("<u2", count))
        for (name, count, _, _), row_gaps, column_gaps in zip(rows, row_parts, column_parts, strict=True)
    }


def _coo_positions(row_gaps: Array, column_gaps: Array, row_length: int) -> Array:
    running = np.cumsum(column_gaps, dtype=np.int64)
    starts = np.flatnonzero(row_gaps)
    before = np.zeros(len(running), np.int64)
    before[starts] = np.diff(running[starts] - column_gaps[starts], prepend=0)
    return np.cumsum(row_gaps, dtype=np.int64) * row_length + running - np.cumsum(before)


# PULSE, flat gaps downcast per tensor; slime `deltas_zstd`: u16 gaps, u32 where a tensor needs it. New bf16 values; one
# frame.


def _flat(types: tuple[str, ...]) -> Format:
    def encode(changes: list[Change]) -> list[bytes]:
        rows, gaps_all, values = [], [], []
        for change in changes:
            gaps = _smallest(_gaps(change.positions), types)
            rows.append([change.name, len(gaps), gaps.dtype.str])
            gaps_all.append(gaps)
            values.append(change.new)
        return [_zstd(_with_header(rows, gaps_all + values))]

    def decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
        blob = _unzstd(files[0])
        rows, at = _header(blob)
        reader = _Reader(blob, at)
        gaps = [reader.take(kind, count) for _, count, kind in rows]
        return {
            name: (_positions(gap), reader.take("<u2", count)) for (name, count, _), gap in zip(rows, gaps, strict=True)
        }

    return Format(encode, decode, absolute)


# NeMo RL sparse refit: a range if positions are contiguous, else gap - 1 in u16, u32 or u64 per tensor; XOR; zstd-1.


def nemo_encode(changes: list[Change]) -> list[bytes]:
    """NeMo RL's payload in a plainer container than its torch.save; positions of all tensors stand together."""
    rows: list[list[Any]] = []
    gap_parts = []
    for change in changes:
        first, count = int(change.positions[0]), len(change.positions)
        if int(change.positions[-1]) - first + 1 == count:
            rows.append([change.name, count, first])
        else:
            gap_parts.append(_smallest(_gaps(change.positions), ("u2", "u4", "u8")))
            rows.append([change.name, count, gap_parts[-1].dtype.str])
    return [_zstd(_with_header(rows, [*gap_parts, *(change.old ^ change.new for change in changes)]))]


def nemo_decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
    """The inverse."""
    blob = _unzstd(files[0])
    rows, at = _header(blob)
    reader = _Reader(blob, at)
    positions = [
        np.arange(how, how + count) if isinstance(how, int) else _positions(reader.take(how, count))
        for _, count, how in rows
    ]
    return {name: (where, reader.take("<u2", count)) for (name, count, _), where in zip(rows, positions, strict=True)}


# SparrowRL (arXiv 2602.11456): LEB128 gaps and bf16 values, not compressed. The original sends a bf16 difference, which
# is not lossless; the new value takes the same room.


@numba.njit(cache=True)  # type: ignore[misc]
def _leb128_encode(gaps: Array, out: Array) -> int:
    at = 0
    for gap in gaps:
        while gap >= 128:
            out[at] = gap & 127 | 128
            at += 1
            gap >>= 7
        out[at] = gap
        at += 1
    return at


@numba.njit(cache=True)  # type: ignore[misc]
def _leb128_decode(data: Array, positions: Array) -> int:
    at, position = 0, -1
    for k in range(positions.size):
        shift, gap = 0, 0
        while data[at] >= 128:
            gap |= (data[at] & 127) << shift
            shift += 7
            at += 1
        gap |= data[at] << shift
        at += 1
        position += gap + 1
        positions[k] = position
    return at


def sparrowrl_encode(changes: list[Change]) -> list[bytes]:
    """The paper's stream."""
    rows, parts = [], []
    for change in changes:
        room = np.empty(5 * len(change.positions), np.uint8)
        used = _leb128_encode(_gaps(change.positions), room)
        rows.append([change.name, len(change.positions), used])
        parts += [room[:used], change.new]
    return [_with_header(rows, parts)]


def sparrowrl_decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
    """The inverse."""
    rows, at = _header(files[0])
    reader, out = _Reader(files[0], at), {}
    for name, count, used in rows:
        positions = np.empty(count, np.int64)
        _leb128_decode(reader.take("u1", used), positions)
        out[name] = positions, reader.take("<u2", count)
    return out


# verl `delta_sharded`, vLLM `sparse_nccl`: int32 positions and bf16 values as they are.


def raw_encode(changes: list[Change]) -> list[bytes]:
    """Positions and values as they are."""
    rows = [[change.name, len(change.positions)] for change in changes]
    parts = [part for change in changes for part in (change.positions.astype("<i4"), change.new)]
    return [_with_header(rows, parts)]


def raw_decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
    """The inverse."""
    rows, at = _header(files[0])
    reader = _Reader(files[0], at)
    return {name: (reader.take("<i4", count).astype(np.int64), reader.take("<u2", count)) for name, count in rows}


# A yardstick of our own, not a rival: gaps over all tensors laid end to end in u16 (65535: that many elements without a
# change) and zigzag steps, their low and high bytes in four zstd-1 frames.


def planes_encode(changes: list[Change]) -> list[bytes]:
    """Four byte planes, each a zstd-1 frame."""
    rows, places, base = [], [], 0
    for change in changes:
        rows.append([change.name, len(change.positions)])
        places.append(change.positions + base)
        base += int(np.prod(change.shape))
    gaps = _gaps(np.concatenate(places))
    skips = gaps // 65535
    wide = np.full(len(gaps) + int(skips.sum()), 65535, np.uint16)
    wide[np.cumsum(skips + 1) - 1] = gaps - skips * 65535
    steps = np.concatenate([change.new - change.old for change in changes]).view(np.int16)
    zigzag = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    planes = [wide & 255, wide >> 8, zigzag & 255, zigzag >> 8]
    frames = [_zstd(plane.astype(np.uint8).tobytes()) for plane in planes]
    return [_with_header([*rows, [len(frame) for frame in frames]], [np.frombuffer(f, np.uint8) for f in frames])]


def planes_decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
    """The inverse."""
    rows, at = _header(files[0])
    *rows, lengths = rows
    reader = _Reader(files[0], at)
    low, high, step_low, step_high = (
        np.frombuffer(_unzstd(reader.take("u1", length).tobytes()), np.uint8).astype(np.uint16) for length in lengths
    )
    wide = low | high << 8
    ends = wide != 65535
    positions = (np.cumsum(wide, dtype=np.int64))[ends] + np.arange(int(ends.sum()))
    zigzag = step_low | step_high << 8
    steps = (zigzag >> 1) ^ (np.uint16(0) - (zigzag & 1))
    out, base, first = {}, 0, 0
    for name, count in rows:
        out[name] = positions[first : first + count] - base, steps[first : first + count]
        base += int(np.prod(shapes[name]))
        first += count
    return out


RIVALS: dict[str, Format] = {
    "verl-vllm-raw": Format(raw_encode, raw_decode, absolute),
    "sparrowrl-paper": Format(sparrowrl_encode, sparrowrl_decode, absolute),
    "pulse-coo-zstd1": Format(pulse_coo_encode, pulse_coo_decode, absolute),
    "pulse-flat-zstd1": _flat(("u1", "u2", "i4")),
    "slime-zstd1": _flat(("u2", "u4")),
    "nemo-xor-zstd1": Format(nemo_encode, nemo_decode, xor),
    "planes-zstd1": Format(planes_encode, planes_decode, step),
}
