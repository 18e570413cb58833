"""The manifest: an artifact's table of contents, whose appearance is the commit (docs/format.md section 6)."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from sparrowrl.config import RUN_NAME
from sparrowrl.delta import limits, wire
from sparrowrl.delta.keys import artifact_name
from sparrowrl.errors import CorruptData, LayoutError, UnsupportedFormat

if TYPE_CHECKING:
    from sparrowrl.delta.layout import Layout

MAGIC = b"SPMF"
NO_KEY = bytes(32)
_HEAD = struct.Struct("<4sHHI")
_MAC_BYTES = 32
_KEYS = (
    "run", "kind", "codec", "base", "target", "base_state", "target_state", "layout", "created_ms", "changed",
    "tensors", "segments",
)  # fmt: skip
_CODEC_OF_KIND = {"origin": None, "delta": "fast", "anchor": "dense"}


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor of an artifact: its number, how many weights changed, its unsigned fingerprint at the target."""

    number: int
    changed: int
    fingerprint: int


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """One segment of an artifact: its blake3 hash and its length in bytes."""

    digest: bytes
    length: int

    @classmethod
    def of(cls, data: bytes) -> SegmentRef:
        """The reference to a segment with these bytes."""
        return cls(blake3(data).digest(), len(data))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What docs/format.md section 6 lists. Raises FormatError when made with fields that do not agree."""

    run: str
    kind: str
    codec: str | None
    base: int | None
    target: int
    base_state: bytes | None
    target_state: bytes
    layout: bytes
    created_ms: int
    changed: int
    tensors: tuple[TensorChange, ...]
    segments: tuple[SegmentRef, ...]

    def __post_init__(self) -> None:
        _check_head(self)
        _check_tensors(self)
        _check_segments(self)

    @property
    def name(self) -> str:
        """The artifact's folder: `origin`, `anchor.dense` or `<base>.fast`."""
        return artifact_name(self.kind, self.base, self.codec)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.length for segment in self.segments)

    def check_layout(self, layout: Layout) -> None:
        """Raise LayoutError if this is not about `layout`, CorruptData if its table of tensors does not fit it."""
        from sparrowrl.delta.layout import state_id  # brings torch, which agents do without

        if self.layout != layout.id:
            raise LayoutError(f"manifest: expected layout {layout.id.hex()}, got {self.layout.hex()}")
        if self.kind != "delta" and len(self.tensors) != len(layout):
            raise CorruptData(f"manifest of an {self.kind}: expected {len(layout)} tensors, got {len(self.tensors)}")
        for tensor in self.tensors:
            limits.check_int("manifest tensor number", tensor.number, 0, len(layout))
            numel = layout.tensors[tensor.number].numel
            low = numel if self.kind == "anchor" else 0
            limits.check_int(f"changed weights of tensor {tensor.number}", tensor.changed, low, numel + 1)
        if self.kind != "delta" and self.target_state != state_id(layout, [t.fingerprint for t in self.tensors]):
            raise CorruptData("manifest: its fingerprints do not give its target state")

    def encode(self, run_key: bytes | None) -> bytes:
        """The manifest's bytes, authenticated with the 32-byte run key (None: the run has none).

        Raises LimitExceeded if they are too many.
        """
        tensors = [(tensor.number, tensor.changed, tensor.fingerprint) for tensor in self.tensors]
        segments = [(segment.digest, segment.length) for segment in self.segments]
        values = [getattr(self, key) for key in _KEYS[:-2]]
        body = wire.pack(dict(zip(_KEYS, [*values, tensors, segments], strict=True)))
        limits.check_at_most("manifest in bytes", _HEAD.size + len(body) + _MAC_BYTES, limits.MANIFEST_BYTES)
        signed = _HEAD.pack(MAGIC, limits.FORMAT_VERSION, 0, len(body)) + body
        return signed + blake3(signed, key=run_key or NO_KEY).digest()

    @classmethod
    def decode(cls, data: bytes, run_key: bytes | None) -> Manifest:
        """Read and check a manifest; with a run key of None its MAC is not checked.

        Raises UnsupportedFormat, CorruptData or LimitExceeded.
        """
        limits.check_at_most("manifest in bytes", len(data), limits.MANIFEST_BYTES)
        if len(data) < _HEAD.size + _MAC_BYTES:
            raise CorruptData(f"manifest: expected at least {_HEAD.size + _MAC_BYTES} bytes, got {len(data)}")
        magic, version, zero, length = _HEAD.unpack_from(data)
        if (magic, version, zero) != (MAGIC, limits.FORMAT_VERSION, 0):
            raise UnsupportedFormat(f"manifest: expected SPMF of version 1, got {data[:8].hex()}")
        if _HEAD.size + length + _MAC_BYTES != len(data):
            raise CorruptData(f"manifest: expected {_HEAD.size + length + _MAC_BYTES} bytes, got {len(data)}")
        signed, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if run_key is not None and not hmac.compare_digest(blake3(signed, key=run_key).digest(), mac):
            raise CorruptData("manifest: its MAC does not match the run key")
        return _from_map(wire.unpack_map("manifest", memoryview(signed)[_HEAD.size :], _KEYS, limits.TENSORS))


def _from_map(body: Any) -> Manifest:
    tensors = [limits.check_list("tensor", row, 3) for row in limits.check_list("tensors", body["tensors"])]
    segments = [limits.check_list("segment", row, 2) for row in limits.check_list("segments", body["segments"])]
    return Manifest(
        **{key: body[key] for key in _KEYS[:-2]},
        tensors=tuple(TensorChange(*row) for row in tensors),  # type: ignore[arg-type]
        segments=tuple(SegmentRef(*row) for row in segments),  # type: ignore[arg-type]
    )


def _check_head(manifest: Manifest) -> None:
    if type(manifest.run) is not str or not RUN_NAME.fullmatch(manifest.run):
        raise CorruptData(f"manifest run: expected {RUN_NAME.pattern}, got {ascii(manifest.run)[:100]}")
    if type(manifest.kind) is not str or manifest.kind not in _CODEC_OF_KIND:
        raise UnsupportedFormat(f"manifest kind: expected origin, delta or anchor, got {ascii(manifest.kind)[:40]}")
    if manifest.codec != _CODEC_OF_KIND[manifest.kind]:
        wanted = _CODEC_OF_KIND[manifest.kind]
        raise UnsupportedFormat(f"codec of {manifest.kind}: expected {wanted}, got {ascii(manifest.codec)[:40]}")
    top = 1 if manifest.kind == "origin" else limits.VERSIONS
    limits.check_int(f"target of {manifest.kind}", manifest.target, 0, top)
    limits.check_bytes("target_state", manifest.target_state, 32)
    if manifest.kind == "delta":
        limits.check_int("base", manifest.base, 0, manifest.target)
        limits.check_bytes("base_state", manifest.base_state, 32)
    elif manifest.base is not None or manifest.base_state is not None:
        raise CorruptData(f"manifest of an {manifest.kind}: expected no base and no base_state")
    limits.check_bytes("layout", manifest.layout, 32)
    limits.check_int("created_ms", manifest.created_ms, 0, limits.VERSIONS)
    limits.check_int("changed", manifest.changed, 0, 1 << 64)


def _check_tensors(manifest: Manifest) -> None:
    limits.check_at_most("tensors of a manifest", len(manifest.tensors), limits.TENSORS)
    low, high = {"origin": (0, 1), "delta": (1, limits.TENSOR_ELEMENTS + 1), "anchor": (0, limits.TENSOR_ELEMENTS + 1)}[
        manifest.kind
    ]
    least, total = 0, 0
    for place, tensor in enumerate(manifest.tensors):
        top = limits.TENSORS if manifest.kind == "delta" else place + 1
        least = limits.check_int("tensor number, ascending", tensor.number, least, top) + 1
        total += limits.check_int(f"changed weights of tensor {tensor.number}", tensor.changed, low, high)
        limits.check_int(f"fingerprint of tensor {tensor.number}", tensor.fingerprint, 0, 1 << 64)
    if total != manifest.changed:
        raise CorruptData(f"changed: expected {total}, the sum over the tensors, got {manifest.changed}")


def _check_segments(manifest: Manifest) -> None:
    limits.check_at_most("segments of a manifest", len(manifest.segments), limits.SEGMENTS)
    for segment in manifest.segments:
        limits.check_bytes("segment hash", segment.digest, 32)
        limits.check_int("segment length", segment.length, 1, limits.SEGMENT_BYTES + 1)
    if len({segment.digest for segment in manifest.segments}) != len(manifest.segments):
        raise CorruptData("segments: expected distinct hashes, got one twice")
    if bool(manifest.segments) != bool(manifest.changed):
        raise CorruptData(f"manifest: {manifest.changed} changed weights, but {len(manifest.segments)} segments")
