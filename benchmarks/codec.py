"""Size and speed of delta encodings on a corpus of real updates.

    python benchmarks/codec.py --corpus DIR --scope mini|full [--base FILE] [--codecs a,b] --json FILE [--csv FILE]

DIR holds `manifest.json` and, for each run, `SCOPE/RUN/stepNNN.xorpatch.safetensors.zst`: for each tensor NAME,
`NAME.gap` (flat index = cumsum(gap) - 1) and `NAME.xor` (old bits XOR new bits, uint16). The first file of a run leads
from the base (bf16 safetensors; `SCOPE/base_bf16.safetensors` unless --base is given) to a first state and is not
measured; the others are single steps. The state after each step is compared with the manifest's hash.

One row a run, step and codec. Bytes are those of the whole artifact: for `sparrow-*` all segments and the manifest.
Encoding starts from positions and old and new bits of what changed (for `sparrow-dense` from all new bits) and ends
with the artifact's bytes, hashed in our case; decoding starts from these bytes, whose hashes we check, and ends with
positions and values. Milliseconds are processor time of one thread, which other work on the machine disturbs less than
it does the clock: the median, least and most of --repeats runs. Every decoding is compared with what went in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from blake3 import blake3
from codec_rivals import RIVALS, Array, Change, Decoded, Format, step
from record import append, context
from safetensors.numpy import load
from safetensors.torch import load_file

from sparrowrl.delta.box import Box
from sparrowrl.delta.layout import U64_MASK, Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.segment import DenseBlock, SegmentPacker, SparseBlock, decode_segment
from sparrowrl.kernels.fingerprint import fingerprint

OURS = ("sparrow-fast", "sparrow-dense")
RUN_KEY = bytes(range(32))


@dataclass(frozen=True)
class Step:
    """One step of a run: what changed, all bits afterwards (uint16, flat), the layout and the manifest to publish."""

    run: str
    number: int
    layout: Layout
    changes: list[Change]
    bits: dict[str, Array]
    fingerprints: list[int]

    @property
    def changed(self) -> int:
        """Number of weights changed."""
        return sum(len(change.positions) for change in self.changes)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(spec.numel for spec in self.layout.tensors)


def read_steps(corpus: Path, scope: str, base: Path, runs: list[str]) -> Iterator[Step]:
    """All single steps of all runs of the corpus, checked against its manifest."""
    start = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in load_file(base).items()}
    layout = Layout(TensorSpec(name, "BF16", bits.shape) for name, bits in start.items())
    for run, files in json.loads((corpus / "manifest.json").read_text())[scope]["runs"].items():
        if runs and run not in runs:
            continue
        bits = {name: tensor.reshape(-1).copy() for name, tensor in start.items()}
        for place, file in enumerate(files):
            changes = _apply(corpus / file["file"], bits, layout)
            if _state_hash(bits) != file["result_sha256"]:
                raise SystemExit(f"{file['file']}: the state after it is not the manifest's: is this the right base?")
            if place:
                sums = [
                    _fingerprint(bits[spec.name], seed) for spec, seed in zip(layout.tensors, layout.seeds, strict=True)
                ]
                yield Step(run, file["step"], layout, changes, bits, sums)


def _apply(path: Path, bits: dict[str, Array], layout: Layout) -> list[Change]:
    patch = load(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    changes = []
    for spec in layout.tensors:
        positions = np.cumsum(patch.get(f"{spec.name}.gap", np.empty(0)), dtype=np.int64) - 1
        if len(positions):
            old = bits[spec.name][positions]
            new = old ^ patch[f"{spec.name}.xor"]
            bits[spec.name][positions] = new
            changes.append(Change(spec.name, spec.shape, positions, old, new))
    return changes


def _state_hash(bits: dict[str, Array]) -> str:
    digests = [hashlib.sha256(bits[name].tobytes()).digest() for name in sorted(bits)]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _fingerprint(bits: Array, seed: int) -> int:
    return int(fingerprint(torch.from_numpy(bits.view(np.int16)), seed)) & U64_MASK


def _publish(step: Step, blocks: list[SparseBlock] | list[DenseBlock], dense: bool) -> list[bytes]:
    """The artifact of these blocks: its manifest and segments."""
    packer = SegmentPacker(step.layout)
    segments = [segment for block in blocks for segment in packer.add(block)] + packer.flush()
    counts = {block.tensor: block.count for block in blocks}
    manifest = Manifest(
        run=step.run,
        kind="anchor" if dense else "delta",
        codec="dense" if dense else "fast",
        base=None if dense else step.number - 1,
        target=step.number,
        base_state=None if dense else bytes(32),
        target_state=state_id(step.layout, step.fingerprints),
        layout=step.layout.id,
        created_ms=int(time.time() * 1000),
        changed=sum(counts.values()),
        tensors=tuple(TensorChange(t, n, step.fingerprints[t]) for t, n in sorted(counts.items())),
        segments=tuple(SegmentRef(blake3(segment).digest(), len(segment)) for segment in segments),
    )
    return [manifest.encode(RUN_KEY), *segments]


def _receive(files: list[bytes], layout: Layout) -> list[Any]:
    """All blocks of an artifact, checked."""
    manifest = Manifest.decode(files[0], RUN_KEY)
    manifest.check_layout(layout)
    for ref, segment in zip(manifest.segments, files[1:], strict=True):
        if blake3(segment).digest() != ref.digest:
            raise SystemExit("segment: hash differs")
    return [block for segment in files[1:] for block in decode_segment(segment, layout)]


def ours_fast(s: Step) -> Format:
    """`sparrow-fast` for one step."""

    def encode(changes: list[Change]) -> list[bytes]:
        blocks = [
            SparseBlock(
                s.layout.number(change.name),
                Box.whole(int(np.prod(change.shape))),
                torch.from_numpy(change.positions),
                torch.from_numpy((change.new - change.old).view(np.int16)),
            )
            for change in changes
        ]
        return _publish(s, blocks, dense=False)

    def decode(files: list[bytes], shapes: dict[str, tuple[int, ...]]) -> Decoded:
        parts: dict[str, list[tuple[Array, Array]]] = {}
        for block in _receive(files, s.layout):
            pair = block.box.flat(block.positions).numpy(), block.steps.numpy().view(np.uint16)
            parts.setdefault(s.layout.tensors[block.tensor].name, []).append(pair)
        return {
            name: pairs[0] if len(pairs) == 1 else tuple(np.concatenate(side) for side in zip(*pairs, strict=True))  # type: ignore[misc]
            for name, pairs in parts.items()
        }

    return Format(encode, decode, step)


def measure(s: Step, codec: str, repeats: int) -> dict[str, Any]:
    """The row of one step and codec; stops if what is decoded is not what was encoded."""
    if codec == "sparrow-dense":
        encode: Callable[[], list[bytes]] = lambda: _publish(s, _all_bits(s), dense=True)  # noqa: E731
        decode: Callable[[list[bytes]], Any] = lambda files: _receive(files, s.layout)  # noqa: E731
    else:
        form = ours_fast(s) if codec == "sparrow-fast" else RIVALS[codec]
        shapes = {spec.name: spec.shape for spec in s.layout.tensors}
        encode = lambda: form.encode(s.changes)  # noqa: E731
        decode = lambda files: form.decode(files, shapes)  # noqa: E731
    encode_ms, files = _timed(encode, repeats)
    decode_ms, decoded = _timed(lambda: decode(files), repeats)
    exact = _same_bits(s, decoded) if codec == "sparrow-dense" else _same_changes(s, decoded, form.new_bits)
    if not exact:
        raise SystemExit(f"{codec}, {s.run}, step {s.number}: decoded something else than what was encoded")
    size = sum(map(len, files))
    return {
        "run": s.run, "step": s.number, "codec": codec, "elements": s.elements, "changed": s.changed,
        "density": round(s.changed / s.elements, 6), "bytes": size, "bits_per_changed": round(8 * size / s.changed, 3),
        **_spread("encode_ms", encode_ms), **_spread("decode_ms", decode_ms), "repeats": repeats,
    }  # fmt: skip


def _all_bits(s: Step) -> list[DenseBlock]:
    return [
        DenseBlock(number, Box.whole(spec.numel), torch.from_numpy(s.bits[spec.name].view(np.int16)))
        for number, spec in enumerate(s.layout.tensors)
    ]


def _timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Processor time in milliseconds of each repetition, after one that is not counted, and what the call gives."""
    result, times = call(), []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(1000 * (time.process_time() - start))
    return times, result


def _spread(name: str, times: list[float]) -> dict[str, float]:
    return {
        name: round(statistics.median(times), 3),
        f"{name}_min": round(min(times), 3),
        f"{name}_max": round(max(times), 3),
    }


def _same_changes(s: Step, decoded: Decoded, new_bits: Callable[[Array, Array], Array]) -> bool:
    return sorted(decoded) == sorted(change.name for change in s.changes) and all(
        np.array_equal(decoded[change.name][0], change.positions)
        and np.array_equal(new_bits(change.old, decoded[change.name][1]), change.new)
        for change in s.changes
    )


def _same_bits(s: Step, blocks: list[DenseBlock]) -> bool:
    seen = 0
    for block in blocks:
        expected = s.bits[s.layout.tensors[block.tensor].name][block.box.start : block.box.end]
        if not block.box.contiguous or not np.array_equal(block.bits.numpy().view(np.uint16), expected):
            return False
        seen += block.count
    return seen == s.elements


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--scope", choices=("mini", "full"), required=True)
    parser.add_argument("--base", type=Path, help="bf16 weights the runs start from; `full` has none of its own")
    parser.add_argument("--codecs", default=",".join((*OURS, *RIVALS)), help="default: all (%(default)s)")
    parser.add_argument("--runs", default="", help="names of runs, comma-separated; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True, help="write all rows here")
    parser.add_argument("--csv", type=Path, help="append them here too")
    args = parser.parse_args()
    unknown = set(args.codecs.split(",")) - {*OURS, *RIVALS}
    if unknown:
        parser.error(f"unknown codecs: {', '.join(sorted(unknown))}")
    args.base = args.base or args.corpus / args.scope / "base_bf16.safetensors"
    if not args.base.exists():
        parser.error(f"{args.base} does not exist: say --base FILE")
    return args


def main() -> None:
    """Measure, print a line a row, write the files."""
    args = arguments()
    torch.set_num_threads(1)
    about = context("torch", "numpy", "numba", "zstandard", "msgpack", "blake3")
    rows = []
    for s in read_steps(args.corpus, args.scope, args.base, [run for run in args.runs.split(",") if run]):
        for codec in args.codecs.split(","):
            row = {"scope": args.scope, **measure(s, codec, args.repeats), **about}
            rows.append(row)
            print(
                f"{row['run']:16} {row['step']:4} {codec:17} {row['bits_per_changed']:9.3f} bits/changed  "
                f"encode {row['encode_ms']:9.2f} ms  decode {row['decode_ms']:9.2f} ms",
                file=sys.stderr,
            )
    if not rows:
        raise SystemExit("no step measured: check --scope and --runs")
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.csv:
        append(args.csv, rows)


if __name__ == "__main__":
    main()
