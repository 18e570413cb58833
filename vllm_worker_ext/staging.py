"""Making a version ready beside the live weights: decoded, mapped to runtime positions, and proved, but not written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3

from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.layout import U64_MASK, state_id
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.segment import decode_segment
from sparrowrl.errors import CorruptData, FingerprintMismatch, FormatError, UnknownState, WrongBase
from sparrowrl.transport.node import NextArtifact, NodeDirectory
from sparrowrl.vllm_worker_ext.census import Census, Parts
from sparrowrl.vllm_worker_ext.changes import Change, Write, as_writes, changes_of, parts
from sparrowrl.vllm_worker_ext.placement import Placement


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: a version, its state id and the fingerprint (u64) of every tensor of the layout.

    `parts` is what this rank's own weights add to each fingerprint. `exact` is False for an engine that cannot say what
    it holds; the rest is then what it held last, or nothing.
    """

    exact: bool
    version: int | None = None
    state: bytes | None = None
    fingerprints: tuple[int, ...] = ()
    parts: Parts | None = None


@dataclass(slots=True)
class Staged:
    """One artifact on its way to activation.

    `before` and `after` are, for each changed tensor, what the changed weights of this rank add to its fingerprint now
    and after the activation. When all segments are there, `manifest` is set, and `parts` is what all of the rank's
    weights will add, which the other ranks are told as the event `offered`; when those of all ranks add up to what the
    manifest says, the artifact is `complete`.
    """

    artifact: NextArtifact
    changes: list[Change] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    boxes: dict[int, list[Box]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    dense: set[int] = field(default_factory=set)
    before: dict[int, int] = field(default_factory=dict)
    after: dict[int, int] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    manifest: Manifest | None = None
    parts: Parts | None = None
    fingerprints: tuple[int, ...] = ()
    offered: str = ""
    complete: bool = False
    milliseconds: float = 0.0

    def take(self, name: str, data: bytes, placement: Placement) -> None:
        """Decode one segment, map it and compute its parts of the fingerprints. Raises FormatError, LayoutError."""
        began = time.perf_counter()
        added: list[Change] = []
        for block in decode_segment(data, placement.layout, placement.device):
            self.boxes.setdefault(block.tensor, []).append(block.box)
            self.counts[block.tensor] = self.counts.get(block.tensor, 0) + block.count
            if isinstance(block, DenseBlock):
                self.dense.add(block.tensor)
            added += changes_of(block, placement)
        before, after = parts(added, placement)
        _add(self.before, before)
        _add(self.after, after)
        self.changes += added
        self.taken.add(name)
        self.milliseconds += 1000 * (time.perf_counter() - began)

    def finish(self, manifest: Manifest, placement: Placement, held: Held) -> None:
        """Check this rank's work against the manifest and what is held, and get the writes ready.

        Raises WrongBase, UnknownState, CorruptData or LayoutError.
        """
        began = time.perf_counter()
        manifest.check_layout(placement.layout)
        check_base(self.artifact, held)
        if manifest.kind == "delta" and manifest.base_state != held.state:
            raise WrongBase(
                f"{self.artifact.key}: expected base state {_hex(held.state)}, got {_hex(manifest.base_state)}"
            )
        if (manifest.kind, manifest.base, manifest.target) != (
            self.artifact.kind,
            self.artifact.base,
            self.artifact.target,
        ):
            raise CorruptData(f"{self.artifact.key}: its manifest is that of another artifact")
        if {ref.digest.hex() for ref in manifest.segments} != self.taken:
            raise CorruptData(f"{self.artifact.key}: expected the {len(manifest.segments)} segments of its manifest")
        self._check_counts(manifest)
        self.parts = self._own_parts(manifest, placement, held)
        self.writes, self.changes = as_writes(self.changes, placement.live), []
        self.milliseconds += 1000 * (time.perf_counter() - began)
        self.manifest = manifest

    def agree(self, parts: Sequence[Parts], census: Census, held: Held) -> None:
        """Check what all ranks will hold, their `parts` in rank order: after this only an accident can go wrong.

        Raises FingerprintMismatch.
        """
        manifest, layout = self.manifest, census.layout
        assert manifest is not None
        totals = census.totals(parts).tolist()
        table = list(held.fingerprints) or [0] * len(layout)
        for tensor in manifest.tensors:
            table[tensor.number] = tensor.fingerprint
        for n, (total, expected) in enumerate(zip(totals, table, strict=True)):
            if total != expected and n not in census.unused:
                raise FingerprintMismatch(
                    f"{layout.tensors[n].name}: expected fingerprint {expected:#x} at version {manifest.target}, "
                    f"staged {total:#x}; nothing was written"
                )
        if state_id(layout, table) != manifest.target_state:
            raise FingerprintMismatch(f"{self.artifact.key}: its fingerprints do not give its target state")
        self.fingerprints, self.complete = tuple(table), True

    def _own_parts(self, manifest: Manifest, placement: Placement, held: Held) -> Parts:
        known = held.parts if manifest.kind == "delta" else None
        parts = np.zeros(len(placement.layout), dtype=np.uint64) if known is None else known.copy()
        for n in self.after:
            rest = int(parts[n]) - self.before.get(n, 0) if manifest.kind == "delta" else 0
            parts[n] = (rest + self.after[n]) & U64_MASK
        return parts

    def _check_counts(self, manifest: Manifest) -> None:
        expected = {tensor.number: tensor.changed for tensor in manifest.tensors if tensor.changed}
        for n in sorted({*expected, *self.counts}):
            changed, carried = expected.get(n, 0), self.counts.get(n, 0)
            # A dense block also carries the weights between those that changed.
            if not changed or carried < changed or (carried > changed and n not in self.dense):
                raise CorruptData(f"{self.artifact.key}: expected {changed} changes of tensor {n}, got {carried}")
        for n, boxes in self.boxes.items():
            if (pair := first_overlap(boxes)) is not None:
                raise CorruptData(f"{self.artifact.key}: tensor {n}: blocks overlap: {pair[0]} and {pair[1]}")


def check_base(artifact: NextArtifact, held: Held) -> None:
    """Raise UnknownState or WrongBase if a delta does not start at what is held."""
    if artifact.kind != "delta":
        return
    if not held.exact:
        raise UnknownState(f"{artifact.key}: expected an anchor, because it is not known what this engine holds")
    if artifact.base != held.version:
        raise WrongBase(f"{artifact.key}: expected a delta from version {held.version}")


def read_segment(node: NodeDirectory, artifact: NextArtifact, name: str) -> bytes:
    """A segment's bytes. Raises FileNotFoundError, or CorruptData if they are not those of its name.

    Such a file is deleted, so that an agent fetches it again.
    """
    path = node.key_path(f"{artifact.key}/{name}.seg")
    data = path.read_bytes()
    if blake3(data).hexdigest() != name:
        path.unlink(missing_ok=True)
        raise CorruptData(f"{artifact.key}/{name}.seg: its {len(data)} bytes do not have the hash that is its name")
    return data


def read_manifest(node: NodeDirectory, artifact: NextArtifact, run: str, run_key: bytes) -> Manifest:
    """An artifact's manifest, MAC checked. Raises FileNotFoundError, FormatError; a file that is bad is deleted."""
    path = node.key_path(f"{artifact.key}/manifest")
    try:
        manifest = Manifest.decode(path.read_bytes(), run_key)
    except FormatError:
        path.unlink(missing_ok=True)
        raise
    if manifest.run != run:
        raise CorruptData(f"{artifact.key}: expected run {run}, got {manifest.run}")
    return manifest


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for number, value in more.items():
        total[number] = (total.get(number, 0) + value) & U64_MASK


def _hex(state: bytes | None) -> str:
    return "none" if state is None else state.hex()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
