"""The limits of docs/format.md section 7, checked before memory is taken."""

from __future__ import annotations

from sparrowrl.errors import CorruptData, LimitExceeded

FORMAT_VERSION = 1

SEGMENT_BYTES = 16 << 20
SEGMENT_HEADER_BYTES = 4 << 20
SEGMENT_BLOCKS = 1 << 16
SEGMENT_WEIGHTS = 1 << 23
BLOCK_TILES = 1 << 20
MANIFEST_BYTES = 64 << 20
LAYOUT_BYTES = 64 << 20
TENSORS = 1 << 20
SEGMENTS = 1 << 20
NAME_BYTES = 1024
DIMENSIONS = 8
TENSOR_ELEMENTS = 1 << 48
DENSE_ELEMENTS = 1 << 22
VERSIONS = 1 << 53
TILE_LOG2 = range(8, 21)


def check_at_most(what: str, got: int, limit: int) -> None:
    """Raise LimitExceeded if `got` is above `limit`."""
    if got > limit:
        raise LimitExceeded(f"{what}: expected at most {limit}, got {got}")


def check_int(what: str, value: object, low: int, high: int) -> int:
    """`value` if it is an integer with low <= value < high. Raises CorruptData."""
    if type(value) is not int or not low <= value < high:
        raise CorruptData(f"{what}: expected an integer from {low} to {high - 1}, got {_short(value)}")
    return value


def check_bytes(what: str, value: object, length: int) -> bytes:
    """`value` if it is a byte string of that length. Raises CorruptData."""
    if type(value) is not bytes or len(value) != length:
        raise CorruptData(f"{what}: expected {length} bytes, got {_short(value)}")
    return value


def check_list(what: str, value: object, length: int | None = None) -> list[object]:
    """`value` if it is an array, of that length if one is given. Raises CorruptData."""
    if type(value) is not list or (length is not None and len(value) != length):
        wanted = "an array" if length is None else f"an array of {length}"
        raise CorruptData(f"{what}: expected {wanted}, got {_short(value)}")
    return value


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    if isinstance(value, (bytes, str)) and len(value) > 40:
        return f"{type(value).__name__} of length {len(value)}"
    return ascii(value)
