"""Manifests."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sparrowrl.delta.layout import Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.errors import CorruptData, FormatError, LayoutError, LimitExceeded, UnsupportedFormat

KEY = bytes(range(32))
LAYOUT = Layout([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "F32", (2, 3)), TensorSpec("c", "I8", (0,))])


def delta(**changes: Any) -> Manifest:
    made = Manifest(
        run="run",
        kind="delta",
        codec="fast",
        base=4,
        target=5,
        base_state=b"b" * 32,
        target_state=b"t" * 32,
        layout=LAYOUT.id,
        created_ms=1_700_000_000_000,
        changed=3,
        tensors=(TensorChange(0, 1, 2**64 - 1), TensorChange(1, 2, 0)),
        segments=(SegmentRef(b"s" * 32, 100), SegmentRef(b"r" * 32, 16 << 20)),
    )
    return dataclasses.replace(made, **changes)


def anchor(**changes: Any) -> Manifest:
    tensors = (TensorChange(0, 4, 10), TensorChange(1, 6, 20), TensorChange(2, 0, 0))
    fields: dict[str, Any] = {
        "kind": "anchor", "codec": "dense", "base": None, "base_state": None, "changed": 10, "tensors": tensors,
        "target_state": state_id(LAYOUT, [10, 20, 0]),
    }  # fmt: skip
    return delta(**(fields | changes))


def origin(**changes: Any) -> Manifest:
    tensors = (TensorChange(0, 0, 10), TensorChange(1, 0, 20), TensorChange(2, 0, 0))
    fields: dict[str, Any] = {
        "kind": "origin",
        "codec": None,
        "target": 0,
        "changed": 0,
        "tensors": tensors,
        "segments": (),
    }
    return anchor(**(fields | changes))


@pytest.mark.parametrize("manifest", [delta(), anchor(), origin(), delta(changed=0, tensors=(), segments=())])
def test_round_trip(manifest: Manifest) -> None:
    for key in (KEY, None):
        data = manifest.encode(key)
        assert Manifest.decode(data, key) == Manifest.decode(data, None) == manifest
    manifest.check_layout(LAYOUT)


def test_names_and_sizes() -> None:
    assert [made.name for made in (delta(), anchor(), origin())] == ["4.fast", "anchor.dense", "origin"]
    assert delta().payload_bytes == 100 + (16 << 20)


def test_a_manifest_of_another_key_or_with_any_byte_changed_is_refused() -> None:
    data = delta().encode(KEY)
    with pytest.raises(CorruptData, match="MAC"):
        Manifest.decode(data, bytes(32))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        with pytest.raises(FormatError):
            Manifest.decode(bytes(damaged), KEY)
        with pytest.raises(FormatError):
            Manifest.decode(data[:place], KEY)
    with pytest.raises(FormatError):
        Manifest.decode(data + b"\0", KEY)


@given(st.integers(0, 5000), st.integers(0, 255), st.booleans())
def test_without_a_key_damage_gives_a_manifest_or_a_format_error(place: int, value: int, cut: bool) -> None:
    data = bytearray(anchor().encode(KEY))
    place %= len(data)
    data[place] = value
    try:
        got = Manifest.decode(bytes(data[:place] if cut else data), None)
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        assert Manifest.decode(got.encode(KEY), KEY) == got


@pytest.mark.parametrize(
    ("manifest", "changes"),
    [
        (delta, {"run": "../x"}), (delta, {"run": 1}), (delta, {"kind": "patch"}), (delta, {"kind": None}),
        (delta, {"codec": "dense"}), (delta, {"codec": None}), (anchor, {"codec": "fast"}), (origin, {"codec": "fast"}),
        (delta, {"base": 5}), (delta, {"base": -1}), (delta, {"base": None}), (delta, {"target": 2**53}),
        (delta, {"target": True}), (delta, {"base_state": None}), (delta, {"base_state": b"b" * 31}),
        (delta, {"target_state": "t" * 32}), (anchor, {"base": 1}), (anchor, {"base_state": b"b" * 32}),
        (origin, {"target": 1}), (delta, {"layout": b""}), (delta, {"created_ms": -1}), (delta, {"created_ms": 1.5}),
        (delta, {"changed": 4}), (delta, {"changed": 0, "tensors": ()}), (delta, {"segments": ()}),
        (delta, {"tensors": (TensorChange(1, 2, 0), TensorChange(0, 1, 0))}),
        (delta, {"tensors": (TensorChange(1, 2, 0), TensorChange(1, 1, 0))}),
        (delta, {"tensors": (TensorChange(0, 0, 0), TensorChange(1, 3, 0))}),
        (delta, {"tensors": (TensorChange(0, 3, -1),)}), (delta, {"tensors": (TensorChange(0, 3, 2**64),)}),
        (delta, {"tensors": (TensorChange(2**20, 3, 0),)}), (anchor, {"tensors": (TensorChange(1, 10, 0),)}),
        (delta, {"segments": (SegmentRef(b"s" * 32, 0),)}), (delta, {"segments": (SegmentRef(b"s" * 32, 2**24 + 1),)}),
        (delta, {"segments": (SegmentRef(b"s", 5),)}), (delta, {"segments": (SegmentRef(b"s" * 32, 5),) * 2}),
    ],
)  # fmt: skip
def test_fields_that_do_not_agree(manifest: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        manifest(**changes)
    assert "\n" not in str(caught.value)


def sealed(body: bytes, magic: bytes = b"SPMF", version: int = 1, zero: int = 0) -> bytes:
    head = magic + version.to_bytes(2, "little") + zero.to_bytes(2, "little") + len(body).to_bytes(4, "little")
    return head + body + blake3(head + body, key=KEY).digest()


def test_other_magic_version_or_keys() -> None:
    body = delta().encode(KEY)[12:-32]
    assert Manifest.decode(sealed(body), KEY) == delta()
    for data in (sealed(body, b"SPSG"), sealed(body, version=2), sealed(body, zero=1)):
        with pytest.raises(UnsupportedFormat):
            Manifest.decode(data, KEY)
    fields = msgpack.unpackb(body)
    reordered = dict(reversed(fields.items()))
    missing = {key: value for key, value in fields.items() if key != "changed"}
    for other in (fields | {"more": 1}, reordered, missing, list(fields.values()), {}):
        with pytest.raises(CorruptData):
            Manifest.decode(sealed(msgpack.packb(other)), KEY)
    for field, value in (("tensors", [[0, 3]]), ("tensors", [0]), ("tensors", {}), ("segments", [[b"s" * 32]])):
        with pytest.raises(CorruptData):
            Manifest.decode(sealed(msgpack.packb(fields | {field: value})), KEY)
    with pytest.raises(LimitExceeded):
        Manifest.decode(bytes((64 << 20) + 1), KEY)


def test_check_layout() -> None:
    other = Layout([TensorSpec("a", "BF16", (4,))])
    with pytest.raises(LayoutError, match="expected layout"):
        delta().check_layout(other)
    for wrong in (
        delta(changed=5, tensors=(TensorChange(0, 5, 0),)),
        delta(changed=1, tensors=(TensorChange(3, 1, 0),)),
        anchor(changed=9, tensors=(TensorChange(0, 3, 10), TensorChange(1, 6, 20), TensorChange(2, 0, 0))),
        anchor(changed=10, tensors=(TensorChange(0, 4, 10), TensorChange(1, 6, 20))),
        anchor(target_state=b"t" * 32),
        origin(target_state=b"t" * 32),
    ):
        with pytest.raises(CorruptData):
            wrong.check_layout(LAYOUT)
