"""`sparrowrl inspect`: what a journal, a run or an artifact holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparrowrl.cli.places import journals_at
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.errors import VersionNotFound


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("inspect", help="show what a journal, a run or an artifact holds")
    parser.add_argument("path", type=Path, help="a journal, a run's folder in it, or an artifact's folder")
    parser.add_argument("--json", action="store_true", help="for programs: everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or JSON. Raises ConfigError if there is nothing of the kind, FormatError for damaged files."""
    places = journals_at(args.path)
    artifact = places[0][1] if places else None
    if artifact is not None:
        found: Any = {**_summary(places[0][0], artifact), **_details(places[0][0], artifact)}
        text = _artifact_text(found)
    else:
        found = {"runs": [_run_summary(journal) for journal, _ in places]}
        text = "\n".join(_run_text(each) for each in found["runs"]) or f"{args.path}: no runs\n"
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else text)
    return 0


def _run_summary(journal: Journal) -> dict[str, Any]:
    artifacts = journal.artifacts()
    newest = journal.newest()
    drafts = [f"{draft.target}/{draft.name}" for draft in journal.drafts()]
    head: dict[str, Any] = {"run": journal.run, "newest": newest, "state": None, "tensors": 0, "weights": 0}
    if newest is not None:
        layout = journal.layout()
        head["state"] = journal.manifest_of(newest).target_state.hex()
        head |= {"tensors": len(layout), "weights": sum(spec.numel for spec in layout.tensors)}
    rows = [row for artifact in artifacts if (row := _summary_if_kept(journal, artifact)) is not None]
    return {**head, "artifacts": rows, "drafts": drafts}


def _summary_if_kept(journal: Journal, artifact: ArtifactRef) -> dict[str, Any] | None:
    """None if the artifact is no longer kept: a trainer may be at work on this journal."""
    try:
        return _summary(journal, artifact)
    except VersionNotFound:
        if artifact in journal.at(artifact.target)[0]:
            raise
        return None


def _summary(journal: Journal, artifact: ArtifactRef) -> dict[str, Any]:
    manifest = journal.manifest(artifact.target, artifact.name)
    weights = sum(spec.numel for spec in journal.layout(manifest.layout).tensors)
    size = manifest.payload_bytes + len(manifest.encode(None))
    return {
        "version": manifest.target,
        "kind": manifest.kind,
        "base": manifest.base,
        "codec": manifest.codec,
        "name": artifact.name,
        "changed": manifest.changed,
        "density": manifest.changed / weights if weights else 0.0,
        "tensors": sum(1 for tensor in manifest.tensors if tensor.changed),
        "segments": len(manifest.segments),
        "bytes": size,
        "bits_per_changed": 8 * size / manifest.changed if manifest.changed else None,
        "created": _date(manifest.created_ms),
        "state": manifest.target_state.hex(),
        "base_state": manifest.base_state.hex() if manifest.base_state is not None else None,
        "layout": manifest.layout.hex(),
    }


def _details(journal: Journal, artifact: ArtifactRef) -> dict[str, Any]:
    manifest = journal.manifest(artifact.target, artifact.name)
    layout = journal.layout(manifest.layout)
    manifest.check_layout(layout)
    tensors = []
    for change in manifest.tensors:
        spec = layout.tensors[change.number]
        tensors.append(
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "changed": change.changed,
                "density": change.changed / spec.numel if spec.numel else 0.0,
                "fingerprint": f"{change.fingerprint:016x}",
            }
        )
    segments = [{"blake3": ref.digest.hex(), "bytes": ref.length} for ref in manifest.segments]
    return {"run": manifest.run, "tensor_list": tensors, "segment_list": segments}


def _run_text(found: dict[str, Any]) -> str:
    if found["newest"] is None:
        lines = [f"run {found['run']}: no version yet"]
    else:
        lines = [
            f"run {found['run']}: {found['tensors']} tensors, {found['weights']:,} weights, version {found['newest']}",
            f"state {found['state']}",
        ]
    lines += [f"draft {draft}, not committed" for draft in found["drafts"]]
    head = ("version", "kind", "base", "changed", "density", "tensors", "segments", "size", "bits/change", "created")
    rows = [
        (
            str(each["version"]),
            each["kind"],
            "" if each["base"] is None else str(each["base"]),
            f"{each['changed']:,}",
            f"{100 * each['density']:.3f} %",
            str(each["tensors"]),
            str(each["segments"]),
            _size(each["bytes"]),
            _bits(each["bits_per_changed"]),
            each["created"],
        )
        for each in found["artifacts"]
    ]
    return "\n".join([*lines, *(_table(head, rows) if rows else ())]) + "\n"


def _artifact_text(found: dict[str, Any]) -> str:
    origin = "" if found["base"] is None else f" from {found['base']}"
    lines = [
        f"run {found['run']}: {found['kind']} of version {found['version']}{origin}, created {found['created']}",
        f"{found['changed']:,} weights ({100 * found['density']:.3f} %) in {found['tensors']} tensors, "
        f"{found['segments']} segments, {_size(found['bytes'])}, {_bits(found['bits_per_changed'])} bits per change",
        f"state      {found['state']}",
        *([f"base state {found['base_state']}"] if found["base_state"] else []),
        f"layout     {found['layout']}",
        "",
    ]
    rows = [
        (
            each["name"],
            each["dtype"],
            "x".join(map(str, each["shape"])) or "scalar",
            f"{each['changed']:,}",
            f"{100 * each['density']:.3f} %",
            each["fingerprint"],
        )
        for each in found["tensor_list"]
    ]
    lines += _table(("tensor", "dtype", "shape", "changed", "density", "fingerprint"), rows)
    if found["segment_list"]:
        lines += [
            "",
            *_table(("segment (blake3)", "size"), [(s["blake3"], _size(s["bytes"])) for s in found["segment_list"]]),
        ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns: numbers to the right, words to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    words = {"kind", "created", "tensor", "dtype", "shape", "fingerprint", "segment (blake3)"}
    return [
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def _date(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1e3, UTC).isoformat(timespec="seconds")
    except ValueError:  # after the year 9999
        return f"{milliseconds} ms"


def _size(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _bits(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.2f}"
