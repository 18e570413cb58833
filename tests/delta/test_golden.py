"""Golden files of every released format version decode to what was written in plain JSON beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from delta import examples, stranger

from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.layout import Layout, state_id
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.segment import decode_segment

V1 = Path(__file__).parent / "golden" / "v1"
FOLDERS = {"origin": "v/0/origin", "delta": "v/1/0.fast", "anchor": "v/1/anchor.dense"}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((V1 / "expected.json").read_text())


@pytest.fixture(scope="module")
def layout() -> Layout:
    (path,) = (V1 / "runs/golden/layout").iterdir()
    layout = Layout.from_bytes(path.read_bytes())
    assert path.name == layout.id.hex()
    return layout


def read(kind: str) -> tuple[Manifest, list[bytes]]:
    folder = V1 / "runs/golden" / FOLDERS[kind]
    manifest = Manifest.decode((folder / "manifest").read_bytes(), examples.RUN_KEY)
    segments = [(folder / f"{ref.digest.hex()}.seg").read_bytes() for ref in manifest.segments]
    assert [blake3(segment).digest() for segment in segments] == [ref.digest for ref in manifest.segments]
    assert [len(segment) for segment in segments] == [ref.length for ref in manifest.segments]
    assert len(list(folder.iterdir())) == 1 + len(segments)
    return manifest, segments


def test_layout(layout: Layout, expected: dict[str, Any]) -> None:
    assert [[spec.name, spec.dtype, list(spec.shape)] for spec in layout.tensors] == expected["layout"]
    for sums, identity in zip(expected["fingerprints"], expected["state_ids"], strict=True):
        assert state_id(layout, sums).hex() == identity


@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_manifests(kind: str, layout: Layout, expected: dict[str, Any]) -> None:
    manifest, _ = read(kind)
    assert examples.manifest_fields(manifest) == expected["manifests"][kind]
    manifest.check_layout(layout)


def test_blocks_of_the_delta(layout: Layout, expected: dict[str, Any]) -> None:
    _, segments = read("delta")
    blocks = [block for segment in segments for block in decode_segment(segment, layout)]
    assert [examples.block_fields(block) for block in blocks] == expected["delta_blocks"]


def test_delta_and_anchor_lead_to_the_same_state(layout: Layout, expected: dict[str, Any]) -> None:
    before, after = expected["states"]
    for kind, start in (("delta", before), ("anchor", {name: "00" * (len(bits) // 2) for name, bits in after.items()})):
        _, segments = read(kind)
        blocks = [block for segment in segments for block in decode_segment(segment, layout)]
        assert kind == "delta" or all(isinstance(block, DenseBlock) for block in blocks)
        state = examples.apply(examples.from_hex(start), blocks)
        assert {name: bits.numpy().tobytes().hex() for name, bits in state.items()} == after
        manifest, _ = read(kind)
        assert manifest.target_state.hex() == expected["state_ids"][1]
        assert examples.fingerprints(state) == expected["fingerprints"][1]


def test_a_stranger_reads_the_golden_files(expected: dict[str, Any]) -> None:
    before, after = ({n: stranger_bits(n, h, expected) for n, h in state.items()} for state in expected["states"])
    for name, start in (("0.fast", before), ("anchor.dense", {n: [0] * len(bits) for n, bits in after.items()})):
        manifest, layout, segments = stranger.read_artifact(V1, "golden", 1, name, examples.RUN_KEY)
        state = stranger.apply(start, layout, segments)
        assert state == after
        sums = [stranger.fingerprint(tensor, state[tensor]) for tensor, _, _ in layout]
        assert sums == expected["fingerprints"][1]
        assert stranger.state_id(manifest["layout"], sums) == manifest["target_state"]


def stranger_bits(name: str, text: str, expected: dict[str, Any]) -> list[int]:
    width = next(stranger.WIDTH[dtype] for tensor, dtype, _ in expected["layout"] if tensor == name)
    data = bytes.fromhex(text)
    return [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
