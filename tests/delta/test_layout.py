"""Layouts and state ids."""

from __future__ import annotations

import struct

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sparrowrl.delta.layout import DTYPES, Layout, TensorSpec, state_id
from sparrowrl.errors import CorruptData, FormatError, LayoutError, LimitExceeded, UnsupportedFormat

specs = st.builds(
    TensorSpec,
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 9), max_size=8).map(tuple),
)


@given(st.lists(specs, max_size=12, unique_by=lambda spec: spec.name))
def test_round_trip_in_any_order(tensors: list[TensorSpec]) -> None:
    layout = Layout(tensors)
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout == Layout(reversed(tensors))
    assert again.id == layout.id == blake3(layout.to_bytes()).digest()
    names = [spec.name.encode() for spec in layout.tensors]
    assert names == sorted(names)
    assert [layout.number(spec.name) for spec in layout.tensors] == list(range(len(tensors)))


def test_numel_and_width() -> None:
    assert TensorSpec("scalar", "F64", ()).numel == 1
    assert TensorSpec("empty", "BF16", (3, 0, 2)).numel == 0
    assert [TensorSpec("x", name, (2, 3)).width for name in ("BOOL", "BF16", "F32", "I64")] == [1, 2, 4, 8]


def test_names_that_are_not_there_or_twice() -> None:
    layout = Layout([TensorSpec("a", "BF16", (2,))])
    with pytest.raises(LayoutError, match="'b'"):
        layout.number("b")
    with pytest.raises(LayoutError, match="'a' twice"):
        Layout([TensorSpec("a", "BF16", (2,)), TensorSpec("a", "F16", (2,))])


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "BF16", (1,)), ("n" * 1025, "BF16", (1,)), ("\udc80", "BF16", (1,)), ("x", "BF17", (1,)),
        ("x", "bf16", (1,)), ("x", "BF16", (1,) * 9), ("x", "BF16", (-1,)), ("x", "BF16", (2**25, 2**24)),
        ("x", "BF16", (True,)), ("x", "BF16", (1.0,)), (3, "BF16", (1,)),
    ],
)  # fmt: skip
def test_specs_beyond_the_document(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        TensorSpec(name, dtype, shape)


def body(tensors: object, number: object = 1) -> bytes:
    return msgpack.packb({"format": number, "tensors": tensors})


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (body([], 2), UnsupportedFormat),
        (b"", CorruptData),
        (body([]) + b"\0", CorruptData),
        (msgpack.packb({"tensors": [], "format": 1}), CorruptData),
        (msgpack.packb({"format": 1, "tensors": [], "more": 1}), CorruptData),
        (b"\x83\xa6format\x01\xa6format\x01\xa7tensors\x90", CorruptData),
        (msgpack.packb([1, []]), CorruptData),
        (body({"a": 1}), CorruptData),
        (body([["b", "BF16", [1]], ["a", "BF16", [1]]]), CorruptData),
        (body([["a", "BF16", [1]], ["a", "BF16", [1]]]), CorruptData),
        (body([["a", "BF16"]]), CorruptData),
        (body([["a", "BF16", {"x": 1}]]), CorruptData),
        (body([[b"a", "BF16", [1]]]), CorruptData),
        (b"\x82\xa6format\xcc\x01\xa7tensors\x90", CorruptData),
        (b"\x82\xa6format\x01\xa7tensors\xdd\xff\xff\xff\xff", CorruptData),
        (b"\x82\xa6format\x01\xa7tensors" + b"\x91" * 100_000, CorruptData),
        (b"\x82\xa6format\xc7\x05\x01hello\xa7tensors\x90", CorruptData),
        (b"\x82\xa6format\x01\xa7tensors\x91\x93\xa1\xff\xa4BF16\x90", CorruptData),
        (bytes((64 << 20) + 1), LimitExceeded),
    ],
)
def test_bytes_that_are_no_layout(data: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error) as caught:
        Layout.from_bytes(data)
    assert "\n" not in str(caught.value)


def test_state_id() -> None:
    layout = Layout([TensorSpec("a", "BF16", (2,)), TensorSpec("b", "F32", ())])
    expected = blake3(layout.id + struct.pack("<QQ", 7, 2**64 - 1)).digest()
    assert state_id(layout, [7, 2**64 - 1]) == state_id(layout, [7, -1]) == expected
    with pytest.raises(LayoutError, match="expected 2 fingerprints, got 1"):
        state_id(layout, [7])
