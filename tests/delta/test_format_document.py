"""docs/format.md and the code say the same."""

from __future__ import annotations

import re

from delta import examples, stranger

from sparrowrl.delta import limits
from sparrowrl.delta.layout import DTYPES


def test_dumps_are_what_the_writer_writes() -> None:
    written, text = examples.dumps(), examples.DOCUMENT.read_text()
    assert examples.document_dumps(text) == written, "run tests/delta/examples.py and read what it changed"


def test_a_stranger_reads_the_dumps() -> None:
    dumps = examples.document_dumps(examples.DOCUMENT.read_text())
    segment, manifest = (bytes_of(dumps[name]) for name in ("segment", "manifest"))
    layout = [("bias", "BF16", [3]), ("weight", "BF16", [30, 40])]
    assert stranger.read_segment(segment, layout) == [
        (0, 1, [0, 3, 3, 1], [(0, 0x3F80), (1, 0), (2, 0x8000)]),
        (1, 2, [0, 1200, 1200, 1], [(5, 1), (300, -1), (301, 2), (1199, -7)]),
    ]
    body = stranger.read_manifest(manifest, bytes(range(32)))
    assert (body["run"], body["base"], body["target"], body["changed"]) == ("demo", 6, 7, 7)
    assert body["segments"] == [[stranger.blake3(segment).digest(), len(segment)]]


def bytes_of(dump: str) -> bytes:
    return b"".join(bytes.fromhex(line[6:53]) for line in dump.splitlines())


def test_limits_and_dtypes_are_those_of_the_document() -> None:
    text = " ".join(examples.DOCUMENT.read_text().split())
    section = text[text.index("## 7. Limits") : text.index("## 8.")]
    for words, value in {
        "segment 16 MiB": limits.SEGMENT_BYTES >> 20,
        "segment header 4 MiB": limits.SEGMENT_HEADER_BYTES >> 20,
        "65,536 blocks a segment": limits.SEGMENT_BLOCKS,
        "2^23 weights a segment": limits.SEGMENT_WEIGHTS,
        "dense block 2^22 elements": limits.DENSE_ELEMENTS,
        "fast block 2^20 tiles": limits.BLOCK_TILES,
        "manifest and layout 64 MiB": limits.MANIFEST_BYTES >> 20,
        "2^20 tensors": limits.TENSORS,
        "2^20 segments": limits.SEGMENTS,
        "name 1,024 bytes": limits.NAME_BYTES,
        "8 dimensions": limits.DIMENSIONS,
        "2^48 elements a tensor": limits.TENSOR_ELEMENTS,
        "versions below 2^53": limits.VERSIONS,
    }.items():
        assert words in section
        (number,) = re.findall(r"(?:2\^)?[\d,]*\d", words)
        assert value == (1 << int(number[2:]) if number.startswith("2^") else int(number.replace(",", "")))
    assert limits.LAYOUT_BYTES == limits.MANIFEST_BYTES
    assert f"`{' '.join(DTYPES)}`" in text
