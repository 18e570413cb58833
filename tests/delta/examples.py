"""The small artifacts of the golden files and of the dumps in docs/format.md.

`python tests/delta/examples.py` (with the repository on PYTHONPATH) writes the dumps into the document, and the golden
files if there are none; it never changes a golden file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import msgpack
import torch
from blake3 import blake3

from sparrowrl.delta import keys
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import U64_MASK, Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.kernels.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "v1"
DOCUMENT = ROOT / "docs" / "format.md"
RUN, RUN_KEY = "golden", bytes(range(32))
CREATED_MS = 1_790_000_000_000

State = dict[str, torch.Tensor]
"""Bits of each tensor, flat, as integers of its width."""

LAYOUT = Layout(
    [
        TensorSpec("a.bf16", "BF16", (40, 50)),
        TensorSpec("b.f16", "F16", (3, 5)),
        TensorSpec("c.f32", "F32", (5,)),
        TensorSpec("d.f64", "F64", ()),
        TensorSpec("e.f8_e4m3", "F8_E4M3", (2, 2, 2, 2)),
        TensorSpec("f.f8_e5m2", "F8_E5M2", (7,)),
        TensorSpec("g.i8", "I8", (600,)),
        TensorSpec("h.u8", "U8", (1, 1, 1, 1, 1, 1, 1, 3)),
        TensorSpec("i.i16", "I16", (9,)),
        TensorSpec("j.i32", "I32", (4,)),
        TensorSpec("k.i64", "I64", (6,)),
        TensorSpec("l.bool", "BOOL", (2, 0)),
        TensorSpec("m.\u00e9\u4e2d", "BF16", (2,)),
    ]
)


@dataclass(frozen=True)
class Example:
    """One artifact: manifest and segments, and the state it leads to."""

    manifest: Manifest
    segments: list[bytes]
    state: State


def base_state() -> State:
    """Weights that count up from a different number in each tensor, wrapping."""
    state = {}
    for number, spec in enumerate(LAYOUT.tensors):
        bits = torch.arange(spec.numel, dtype=torch.int64) * 37 + 1000 * number
        state[spec.name] = bits.to(INT_OF_WIDTH[spec.width])
    return state


def from_hex(state: dict[str, str]) -> State:
    """A state as `expected` has it."""
    out = {}
    for name, text in state.items():
        dtype = INT_OF_WIDTH[LAYOUT.tensors[LAYOUT.number(name)].width]
        data = bytearray.fromhex(text)
        out[name] = torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)
    return out


def delta_blocks() -> list[Block]:
    """Every width, both codecs, boxes with gaps, tiles without changes and the largest steps; sorted by tensor."""

    def sparse(name: str, box: Box | None, steps: dict[int, int]) -> SparseBlock:
        number = LAYOUT.number(name)
        spec = LAYOUT.tensors[number]
        numbers = torch.tensor(list(steps.values()), dtype=INT_OF_WIDTH[spec.width])
        return SparseBlock(number, box or Box.whole(spec.numel), torch.tensor(list(steps)), numbers)

    def dense(name: str, box: Box, bits: list[int]) -> DenseBlock:
        number = LAYOUT.number(name)
        return DenseBlock(number, box, torch.tensor(bits, dtype=INT_OF_WIDTH[LAYOUT.tensors[number].width]))

    first_and_last_tile = {k: (-1) ** k * (1 + k % 3) for k in (*range(512), *range(1024, 1199))}
    return [
        sparse("a.bf16", Box(0, 30, 50, 40), {**first_and_last_tile, 1199: -32768}),
        dense("a.bf16", Box(30, 20, 50, 20), [0x3F80] * 400),
        sparse("a.bf16", Box(1030, 20, 50, 20), {0: 1, 399: 32767}),
        sparse("c.f32", None, {2: -(2**31), 4: 2**31 - 1}),
        sparse("d.f64", None, {0: -(2**63)}),
        dense("e.f8_e4m3", Box(4, 4, 8, 2), [0, -128, 127, 1, 2, 3, 4, 5]),
        sparse("g.i8", None, {0: 1, 255: -128, 599: 127}),
        sparse("k.i64", Box(1, 4, 4, 1), {0: 3, 3: -(2**40) - 5}),
        dense("m.\u00e9\u4e2d", Box.whole(2), [-32768, 0]),
    ]


def apply(state: State, blocks: list[Block]) -> State:
    """The state after the blocks."""
    after = {name: bits.clone() for name, bits in state.items()}
    for block in blocks:
        bits = after[LAYOUT.tensors[block.tensor].name]
        if isinstance(block, DenseBlock):
            bits[block.box.flat(torch.arange(block.count))] = block.bits
        else:
            bits[block.box.flat(block.positions)] += block.steps
    return after


def fingerprints(state: State) -> list[int]:
    return [
        int(fingerprint(state[spec.name], seed)) & U64_MASK
        for spec, seed in zip(LAYOUT.tensors, LAYOUT.seeds, strict=True)
    ]


def publish(kind: str, blocks: list[Block], before: State | None, after: State) -> Example:
    """The artifact of these blocks, in segments of about 1 KiB."""
    packer = SegmentPacker(LAYOUT, 1024)
    segments = [segment for block in blocks for segment in packer.add(block)] + packer.flush()
    sums, delta = fingerprints(after), kind == "delta"
    changed = [0 if before is None else int((after[n] != before[n]).sum()) for n in after]
    if kind == "anchor":
        changed = [spec.numel for spec in LAYOUT.tensors]
    tensors = [TensorChange(t, n, sums[t]) for t, n in enumerate(changed) if n or not delta]
    manifest = Manifest(
        run=RUN,
        kind=kind,
        codec={"origin": None, "delta": "fast", "anchor": "dense"}[kind],
        base=0 if delta else None,
        target=0 if kind == "origin" else 1,
        base_state=state_id(LAYOUT, fingerprints(before)) if delta and before else None,
        target_state=state_id(LAYOUT, sums),
        layout=LAYOUT.id,
        created_ms=CREATED_MS,
        changed=sum(changed),
        tensors=tuple(tensors),
        segments=tuple(SegmentRef(blake3(segment).digest(), len(segment)) for segment in segments),
    )
    return Example(manifest, segments, after)


def examples() -> dict[str, Example]:
    """Origin, delta 0 -> 1 and anchor 1, by kind."""
    before = base_state()
    after = apply(before, delta_blocks())
    whole: list[Block] = [
        DenseBlock(t, Box.whole(spec.numel), after[spec.name]) for t, spec in enumerate(LAYOUT.tensors) if spec.numel
    ]
    return {
        "origin": publish("origin", [], None, before),
        "delta": publish("delta", delta_blocks(), before, after),
        "anchor": publish("anchor", whole, None, after),
    }


def files() -> dict[str, bytes]:
    """Every golden file by its key."""
    out = {keys.layout_key(RUN, LAYOUT.id): LAYOUT.to_bytes()}
    for example in examples().values():
        manifest = example.manifest
        out[keys.manifest_key(RUN, manifest.target, manifest.name)] = manifest.encode(RUN_KEY)
        for ref, segment in zip(manifest.segments, example.segments, strict=True):
            out[keys.segment_key(RUN, manifest.target, manifest.name, ref.digest)] = segment
    return out


def expected() -> dict[str, object]:
    """What a reader must find in the golden files, in plain JSON; bits are hexadecimal, little-endian."""
    made = examples()
    return {
        "layout": [[spec.name, spec.dtype, list(spec.shape)] for spec in LAYOUT.tensors],
        "states": [
            {n: bits.numpy().tobytes().hex() for n, bits in made[k].state.items()} for k in ("origin", "anchor")
        ],
        "state_ids": [made[kind].manifest.target_state.hex() for kind in ("origin", "anchor")],
        "fingerprints": [fingerprints(made[kind].state) for kind in ("origin", "anchor")],
        "manifests": {kind: manifest_fields(example.manifest) for kind, example in made.items()},
        "delta_blocks": [block_fields(block) for block in delta_blocks()],
    }


def manifest_fields(manifest: Manifest) -> dict[str, object]:
    """The manifest as JSON."""
    body = msgpack.unpackb(manifest.encode(None)[12:-32])
    return json.loads(json.dumps(body, default=bytes.hex))


def block_fields(block: Block) -> dict[str, object]:
    """The block as JSON."""
    box = [block.box.start, block.box.row_length, block.box.stride, block.box.rows]
    if isinstance(block, DenseBlock):
        return {"tensor": block.tensor, "box": box, "bits": block.bits.tolist()}
    return {"tensor": block.tensor, "box": box, "positions": block.positions.tolist(), "steps": block.steps.tolist()}


# The dumps of docs/format.md.


def document_example() -> tuple[bytes, bytes]:
    """A segment of one fast and one dense block, and the manifest of its artifact."""
    layout = Layout([TensorSpec("bias", "BF16", (3,)), TensorSpec("weight", "BF16", (30, 40))])
    positions, steps = torch.tensor([5, 300, 301, 1199]), torch.tensor([1, -1, 2, -7], dtype=torch.int16)
    packer = SegmentPacker(layout)
    packer.add(DenseBlock(0, Box.whole(3), torch.tensor([0x3F80, 0, -32768], dtype=torch.int16)))
    packer.add(SparseBlock(1, Box.whole(1200), positions, steps))
    (segment,) = packer.flush()
    manifest = Manifest(
        run="demo", kind="delta", codec="fast", base=6, target=7, base_state=b"\x66" * 32, target_state=b"\x77" * 32,
        layout=layout.id, created_ms=CREATED_MS, changed=7,
        tensors=(TensorChange(0, 3, 0x1111111111111111), TensorChange(1, 4, 0x2222222222222222)),
        segments=(SegmentRef(blake3(segment).digest(), len(segment)),),
    )  # fmt: skip
    return segment, manifest.encode(bytes(range(32)))


def segment_dump(segment: bytes) -> str:
    """The document's segment, part by part."""
    notes = [
        (4, "magic"), (2, "format version 1"), (2, "0"), (4, "H = 13"), (1, "array of 2 blocks"),
        (6, "[0, 1, nil, 3, 16]: 'bias', dense, whole, 3 weights, 16 bytes"),
        (6, "[1, 2, nil, 4, 16]: 'weight', fast, whole, 4 changes, 16 bytes"), (3, "up to a multiple of 4"),
        (8, "dense: stored lengths 3 and 3 of the two planes, both raw"),
        (3, "plane 0: low bytes of 7f00, 0000, 0001 (3f80, 0000, 8000 rotated left)"),
        (3, "plane 1: high bytes"), (2, "up to a multiple of 4"),
        (4, "fast: t = 17, so one tile of 1,200 elements; wn = 3, ws = 2; 0"),
        (4, "n = 4 (100), s = 3 (11), zeros up to 32 bits"),
        (4, "body: l = 8, as 1200 div 4 = 300 has 9 bits; low bytes of 5, 300, 301, 1199"),
        (1, "high: bits 0 + 0, 1 + 1, 1 + 2 and 4 + 3 of n + (1199 >> 8) = 8"),
        (3, "bit 0: sign 0101; bit 4: gamma 1101001; bit 11: mantissa 0 11; zeros"),
    ]  # fmt: skip
    return _dump(segment, notes)


def manifest_dump(manifest: bytes) -> str:
    """The document's manifest, part by part."""
    body = manifest[12:-32]
    notes = [(4, "magic"), (2, "format version 1"), (2, "0"), (4, f"length of the body, {len(body)}"), (1, "map of 12")]
    for key, value in msgpack.unpackb(body).items():
        shown = {"tensors": "tensors: two", "segments": "segments: one, its hash and length"}.get(key)
        size = len(msgpack.packb(key)) + len(msgpack.packb(value))
        notes.append((size, shown or f"{key}: {value.hex()[:4] + '...' if isinstance(value, bytes) else value}"))
    return _dump(manifest, [*notes, (32, "MAC, with the run key 00 01 ... 1f")])


def _dump(data: bytes, notes: list[tuple[int, str]]) -> str:
    lines, at = [], 0
    for size, note in notes:
        for start in range(at, at + size, 16):
            part = data[start : min(start + 16, at + size)]
            lines.append(f"{start:04x}  {part.hex(' '):47}  {note if start == at else ''}".rstrip())
        at += size
    assert at == len(data), f"notes cover {at} of {len(data)} bytes"
    return "\n".join(lines)


def dumps() -> dict[str, str]:
    """The dumps by their name in the document."""
    segment, manifest = document_example()
    return {"segment": segment_dump(segment), "manifest": manifest_dump(manifest)}


def document_dumps(text: str) -> dict[str, str]:
    """The dumps that the document's text has, by name."""
    return dict(re.findall(r"<!-- dump: (\w+) -->\n```\n(.*?)\n```\n", text, re.DOTALL))


def main() -> None:
    """Write the document's dumps, and golden files that are missing."""
    text = DOCUMENT.read_text()
    for name, dump in dumps().items():
        pattern = rf"(<!-- dump: {name} -->\n```\n).*?(```\n)"
        text = re.sub(pattern, lambda match, dump=dump: f"{match[1]}{dump}\n{match[2]}", text, flags=re.DOTALL)
    DOCUMENT.write_text(text)
    if GOLDEN.exists() and any(GOLDEN.iterdir()):
        return
    for key, data in files().items():
        path = GOLDEN / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (GOLDEN / "expected.json").write_text(json.dumps(expected(), indent=1) + "\n")


if __name__ == "__main__":
    main()
