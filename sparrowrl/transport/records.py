"""JSON objects as frozen dataclasses: what comes from a file or a peer is checked field by field, once, here."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sparrowrl.errors import CorruptData

T = TypeVar("T")


def to_json(record: Any) -> bytes:
    """A dataclass instance (or None, as `{}`) as one compact JSON object."""
    body = {} if record is None else dataclasses.asdict(record)
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def parse_json(data: bytes | str, what: str) -> Any:
    """JSON, or CorruptData that names `what`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{what}: expected JSON, got {data[:80]!r} ({error})") from error


def from_json(kind: type[T], raw: Any, what: str) -> T:
    """Make a `kind` (a dataclass) of a parsed JSON object.

    Fields without a default must be there; keys that `kind` does not know are left out, so that a newer peer may say
    more. Raises CorruptData that names `what`, the field, the expected type and the value.
    """
    if not isinstance(raw, dict):
        raise CorruptData(f"{what}: expected a JSON object, got {str(raw)[:80]!r}")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in raw:
            values[field.name] = _value(hints[field.name], raw[field.name], f"{what}.{field.name}")
        elif field.default is dataclasses.MISSING:
            raise CorruptData(f"{what}: expected a field {field.name!r}, got {sorted(raw)[:20]}")
    return kind(**values)


def _value(hint: Any, raw: Any, what: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        inner = [option for option in get_args(hint) if option is not type(None)]
        return None if raw is None else _value(inner[0], raw, what)
    if get_origin(hint) is tuple and isinstance(raw, list):
        return tuple(_value(get_args(hint)[0], item, f"{what}[{place}]") for place, item in enumerate(raw))
    if get_origin(hint) is Literal and raw in get_args(hint):
        return raw
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, raw, what)
    if hint is float and type(raw) in (int, float):
        return float(raw)
    if isinstance(hint, type) and type(raw) is hint:
        return raw
    raise CorruptData(f"{what}: expected {getattr(hint, '__name__', hint)}, got {str(raw)[:80]!r}")
