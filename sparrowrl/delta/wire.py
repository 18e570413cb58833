"""MessagePack as docs/format.md uses it: maps with fixed keys in a fixed order, nothing else let through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from sparrowrl.errors import CorruptData


def pack(value: object) -> bytes:
    """MessagePack bytes; dicts keep their order, numbers take their shortest form."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def array_head(length: int) -> bytes:
    """The bytes that go before the elements of an array."""
    return bytes(msgpack.Packer().pack_array_header(length))


def unpack(what: str, data: bytes | memoryview, max_array: int) -> Any:
    """The one value in `data`; arrays come as lists, maps as tuples of pairs. Raises CorruptData."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=tuple,
            max_array_len=min(max_array, len(data)),
            max_map_len=min(64, len(data)),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptData(f"{what}: not valid MessagePack ({ascii(reason)[1:-1][:120]})") from error


def unpack_map(what: str, data: bytes | memoryview, keys: Sequence[str], max_array: int) -> Mapping[str, Any]:
    """The one map in `data`, which must have exactly `keys` in that order. Raises CorruptData."""
    pairs = unpack(what, data, max_array)
    if type(pairs) is not tuple:
        raise CorruptData(f"{what}: expected a map, got {type(pairs).__name__}")
    got = [key for key, _ in pairs]
    if got != list(keys):
        shown = ", ".join(ascii(key[:40]) if type(key) is str else type(key).__name__ for key in got)
        raise CorruptData(f"{what}: expected the keys {', '.join(keys)} in this order, got {shown or 'none'}")
    return dict(pairs)
