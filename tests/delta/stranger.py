"""A reader of published artifacts written from docs/format.md alone: plain Python, nothing of this project.

It is slow and checks little; it is here to show that the document is enough and that the writer follows it. Tensors are
lists of unsigned integers, a state is a dict from name to such a list.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import msgpack
import zstandard
from blake3 import blake3

WIDTH = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
    "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1,
}  # fmt: skip
U64 = (1 << 64) - 1


# Sections 2, 3 and 6: keys, layout, manifest.


def read_layout(data: bytes) -> list[tuple[str, str, list[int]]]:
    body = msgpack.unpackb(data)
    assert list(body) == ["format", "tensors"] and body["format"] == 1
    return [(name, dtype, shape) for name, dtype, shape in body["tensors"]]


def read_manifest(data: bytes, run_key: bytes) -> dict:
    magic, version, zero, length = struct.unpack_from("<4sHHI", data)
    assert (magic, version, zero) == (b"SPMF", 1, 0)
    assert len(data) == 12 + length + 32
    assert blake3(data[:-32], key=run_key).digest() == data[-32:]
    return msgpack.unpackb(data[12:-32])


def read_artifact(root: Path, run: str, target: int, name: str, run_key: bytes) -> tuple[dict, list, list[bytes]]:
    """Manifest, layout and segments of the artifact runs/RUN/v/TARGET/NAME below `root`, hashes checked."""
    folder = root / "runs" / run / "v" / str(target) / name
    manifest = read_manifest((folder / "manifest").read_bytes(), run_key)
    layout_bytes = (root / "runs" / run / "layout" / manifest["layout"].hex()).read_bytes()
    assert blake3(layout_bytes).digest() == manifest["layout"]
    segments = []
    for digest, length in manifest["segments"]:
        segment = (folder / f"{digest.hex()}.seg").read_bytes()
        assert blake3(segment).digest() == digest and len(segment) == length
        segments.append(segment)
    return manifest, read_layout(layout_bytes), segments


# Section 4: fingerprints and states.


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & U64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & U64
    return z ^ z >> 31


def fingerprint(name: str, bits: list[int]) -> int:
    seed = int.from_bytes(blake3(name.encode()).digest()[:8], "little")
    return sum(mix((seed + (i + 1) * 0x9E3779B97F4A7C15 + b) & U64) for i, b in enumerate(bits)) & U64


def state_id(layout_id: bytes, fingerprints: list[int]) -> bytes:
    return blake3(layout_id + b"".join(struct.pack("<Q", f) for f in fingerprints)).digest()


# Section 5: segments.


def flat_index(box: list[int], k: int) -> int:
    start, row_length, stride, _ = box
    return start + k // row_length * stride + k % row_length


def read_segment(data: bytes, layout: list) -> list[tuple[int, int, list[int], list[tuple[int, int]]]]:
    """Blocks as (tensor, codec, box, [(number in the box, bits or step), ...])."""
    magic, version, zero, length = struct.unpack_from("<4sHHI", data)
    assert (magic, version, zero) == (b"SPSG", 1, 0)
    at = 12 + length
    at += -at % 4
    blocks = []
    for tensor, codec, box, count, size in msgpack.unpackb(data[12 : 12 + length]):
        _, dtype, shape = layout[tensor]
        numel = math.prod(shape)
        box = box or [0, numel, numel, 1]
        read = {1: read_dense, 2: read_fast}[codec]
        content = read(data[at : at + size], box[1] * box[3], WIDTH[dtype])
        assert len(content) == count and size % 4 == 0
        blocks.append((tensor, codec, box, content))
        at += size
    assert at == len(data)
    return blocks


def read_dense(payload: bytes, elements: int, width: int) -> list[tuple[int, int]]:
    lengths = struct.unpack_from(f"<{width}I", payload)
    at, planes = 4 * width, []
    for length in lengths:
        plane = payload[at : at + length]
        planes.append(plane if length == elements else zstandard.ZstdDecompressor().decompress(plane))
        at += length
    assert payload[at:] == bytes(-at % 4)
    weights = []
    for k in range(elements):
        rotated = int.from_bytes(bytes(plane[k] for plane in planes), "little")
        weights.append((k, rotated >> 1 | (rotated & 1) << 8 * width - 1))
    return weights


class Bits:
    """Bits numbered from the least significant one of the first little-endian word."""

    def __init__(self, data: bytes) -> None:
        self.number = int.from_bytes(data, "little")
        self.at = 0

    def take(self, bits: int) -> int:
        taken = self.number >> self.at & (1 << bits) - 1
        self.at += bits
        return taken

    def align(self) -> None:
        assert self.take(-self.at % 32) == 0


def read_fast(payload: bytes, elements: int, width: int) -> list[tuple[int, int]]:
    t, wn, ws, zero = payload[:4]
    assert 8 <= t <= 20 and zero == 0
    bits = Bits(payload[4:])
    tiles = -(-elements // 2**t)
    heads = [(bits.take(wn), bits.take(ws)) for _ in range(tiles)]
    bits.align()
    changes = []
    for tile, (n, s) in enumerate(heads):
        if n:
            size = min(2**t, elements - tile * 2**t)
            changes += [(tile * 2**t + p, d) for p, d in read_tile(bits, size, n, s)]
            bits.align()
    assert bits.at == 8 * len(payload) - 32
    return changes


def read_tile(bits: Bits, size: int, n: int, s: int) -> list[tuple[int, int]]:
    low_bits = (size // n).bit_length() - 1
    low = [bits.take(low_bits) for _ in range(n)]
    high = set_bits(bits.take(high_length := n + (size - 1 >> low_bits)), high_length)
    sign = bits.take(n)
    gamma = set_bits(bits.take(n + s), n + s)
    assert len(high) == len(gamma) == n
    changes, below = [], 0
    for k in range(n):
        bucket = gamma[k] - k - below
        below += bucket
        magnitude = (1 << bucket) + bits.take(bucket)
        changes.append((high[k] - k << low_bits | low[k], -magnitude if sign >> k & 1 else magnitude))
    return changes


def set_bits(number: int, length: int) -> list[int]:
    return [k for k in range(length) if number >> k & 1]


# All together.


def apply(state: dict[str, list[int]], layout: list, segments: list[bytes]) -> dict[str, list[int]]:
    """The state after the artifact's segments; every element may be touched once."""
    after = {name: list(bits) for name, bits in state.items()}
    touched = set()
    for segment in segments:
        for tensor, codec, box, content in read_segment(segment, layout):
            name, dtype, _ = layout[tensor]
            for k, value in content:
                index = flat_index(box, k)
                assert (tensor, index) not in touched
                touched.add((tensor, index))
                before = 0 if codec == 1 else after[name][index]
                after[name][index] = (before + value) % (1 << 8 * WIDTH[dtype])
    return after
