"""What the writer publishes is what a reader written from docs/format.md alone finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from delta import codec_kit, stranger

from sparrowrl.delta import keys
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import DTYPES, U64_MASK, Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.kernels.fingerprint import fingerprint

RUN_KEY = bytes(range(1, 33))


def random_layout(rng: random.Random) -> Layout:
    shapes = ((), (0, 3), (1,), (700,), (13, 60), (2, 3, 100))
    return Layout(TensorSpec(f"{k}.{rng.random()}", rng.choice(sorted(DTYPES)), rng.choice(shapes)) for k in range(6))


def random_blocks(rng: random.Random, layout: Layout) -> list[Block]:
    """Blocks of some tensors, some of them cut into columns, sparse and dense."""
    blocks: list[Block] = []
    for number, spec in enumerate(layout.tensors):
        dtype = INT_OF_WIDTH[spec.width]
        boxes = [Box.whole(spec.numel)]
        if spec.shape == (13, 60):
            boxes = [Box(0, 25, 60, 13), Box(25, 35, 60, 13)]
        for box in boxes:
            if not box.elements or rng.random() < 0.2:
                continue
            if rng.random() < 0.4:
                blocks.append(DenseBlock(number, box, codec_kit.random_dense(rng, box.elements, dtype).bits))
            else:
                count = rng.randint(1, box.elements)
                made = codec_kit.random_sparse(rng, box.elements, count, dtype)
                blocks.append(SparseBlock(number, box, made.positions, made.steps))
    return blocks


def unsigned(bits: torch.Tensor) -> list[int]:
    mask = (1 << 8 * bits.element_size()) - 1
    return [value & mask for value in bits.tolist()]


def write(root: Path, layout: Layout, blocks: list[Block], after: dict[str, torch.Tensor], target_bytes: int) -> str:
    """Write the artifact 4 -> 5 below `root`; returns its name."""
    packer = SegmentPacker(layout, target_bytes)
    segments = [segment for block in blocks for segment in packer.add(block)] + packer.flush()
    sums = [
        int(fingerprint(after[spec.name], seed)) & U64_MASK
        for spec, seed in zip(layout.tensors, layout.seeds, strict=True)
    ]
    counts: dict[int, int] = {}
    for block in blocks:
        counts[block.tensor] = counts.get(block.tensor, 0) + block.count
    manifest = Manifest(
        run="r",
        kind="delta",
        codec="fast",
        base=4,
        target=5,
        base_state=bytes(32),
        target_state=state_id(layout, sums),
        layout=layout.id,
        created_ms=1,
        changed=sum(counts.values()),
        tensors=tuple(TensorChange(t, n, sums[t]) for t, n in sorted(counts.items())),
        segments=tuple(SegmentRef(blake3(segment).digest(), len(segment)) for segment in segments),
    )
    files = {keys.layout_key("r", layout.id): layout.to_bytes()}
    files[keys.manifest_key("r", 5, manifest.name)] = manifest.encode(RUN_KEY)
    files |= {keys.segment_key("r", 5, "4.fast", blake3(segment).digest()): segment for segment in segments}
    for key, data in files.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return manifest.name


@pytest.mark.parametrize("seed", range(12))
def test_a_stranger_finds_the_state_that_was_published(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    blocks = random_blocks(rng, layout)
    before = {
        spec.name: codec_kit.random_dense(rng, spec.numel, INT_OF_WIDTH[spec.width]).bits for spec in layout.tensors
    }
    after = {name: bits.clone() for name, bits in before.items()}
    for block in blocks:
        bits = after[layout.tensors[block.tensor].name]
        if isinstance(block, DenseBlock):
            bits[block.box.flat(torch.arange(block.count))] = block.bits
        else:
            bits[block.box.flat(block.positions)] += block.steps
    name = write(tmp_path, layout, blocks, after, rng.choice((200, 1000, 2 << 20)))
    manifest, tensors, segments = stranger.read_artifact(tmp_path, "r", 5, name, RUN_KEY)
    found = stranger.apply({n: unsigned(bits) for n, bits in before.items()}, tensors, segments)
    assert found == {n: unsigned(bits) for n, bits in after.items()}
    sums = [stranger.fingerprint(tensor, found[tensor]) for tensor, _, _ in tensors]
    assert stranger.state_id(manifest["layout"], sums) == manifest["target_state"]
