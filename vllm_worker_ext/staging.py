"""Making a version ready beside the live weights: decoded, mapped to runtime positions, and proved, but not written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from torch import Tensor

from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.layout import U64_MASK, state_id
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.segment import decode_segment
from sparrowrl.errors import CorruptData, FingerprintMismatch, FormatError, UnknownState, WrongBase
from sparrowrl.transport.node import NextArtifact, NodeDirectory
from sparrowrl.vllm_worker_ext.changes import Change, changes_of, sums
from sparrowrl.vllm_worker_ext.placement import Placement


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: a version, its state id and the fingerprint (u64) of every tensor of the layout.

    `exact` is False for an engine that cannot say what it holds; the rest is then what it held last, or nothing.
    """

    exact: bool
    version: int | None = None
    state: bytes | None = None
    fingerprints: tuple[int, ...] = ()


@dataclass(slots=True)
class Staged:
    """One artifact on its way to activation.

    `before` and `after` are, for each changed tensor, the parts of its fingerprint that the changed weights make up
    now and after the activation; `manifest` is there once everything has been checked.
    """

    artifact: NextArtifact
    changes: list[Change] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    boxes: dict[int, list[Box]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    dense: set[int] = field(default_factory=set)
    before: dict[int, int] = field(default_factory=dict)
    after: dict[int, int] = field(default_factory=dict)
    manifest: Manifest | None = None
    fingerprints: tuple[int, ...] = ()
    milliseconds: float = 0.0

    def take(self, name: str, data: bytes, placement: Placement) -> None:
        """Decode one segment, map it and compute its parts of the fingerprints. Raises FormatError, LayoutError."""
        began = time.perf_counter()
        device = placement.live[0].device
        added: list[Change] = []
        for block in decode_segment(data, placement.layout, device):
            self.boxes.setdefault(block.tensor, []).append(block.box)
            self.counts[block.tensor] = self.counts.get(block.tensor, 0) + block.count
            if isinstance(block, DenseBlock):
                self.dense.add(block.tensor)
            added += changes_of(block, placement)
        if self.artifact.kind == "delta":
            _add(self.before, sums(added, _proofs(added, placement, expected=False)))
        _add(self.after, sums(added, _proofs(added, placement, expected=True)))
        self.changes += added
        self.taken.add(name)
        self.milliseconds += 1000 * (time.perf_counter() - began)

    def finish(self, manifest: Manifest, placement: Placement, held: Held) -> None:
        """Check the whole against its manifest and what is held: after this, activation can only fail by accident.

        Raises WrongBase, UnknownState, CorruptData, FingerprintMismatch or LayoutError.
        """
        began = time.perf_counter()
        layout = placement.layout
        manifest.check_layout(layout)
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
        table = list(held.fingerprints) or [0] * len(layout)
        for tensor in manifest.tensors:
            n = tensor.number
            rest = table[n] - self.before.get(n, 0) if manifest.kind == "delta" else 0
            got = (rest + self.after.get(n, 0)) & U64_MASK
            if got != tensor.fingerprint:
                raise FingerprintMismatch(
                    f"{layout.tensors[n].name}: expected fingerprint {tensor.fingerprint:#x} at version "
                    f"{manifest.target}, staged {got:#x}; nothing was written"
                )
            table[n] = tensor.fingerprint
        if state_id(layout, table) != manifest.target_state:
            raise FingerprintMismatch(f"{self.artifact.key}: its fingerprints do not give its target state")
        self.fingerprints = tuple(table)
        self.milliseconds += 1000 * (time.perf_counter() - began)
        self.manifest = manifest

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


def _proofs(changes: list[Change], placement: Placement, expected: bool) -> list[Tensor]:
    seeds, live = placement.layout.seeds, placement.live
    if expected:
        return [change.expected_proof(live[change.live], seeds[change.tensor]) for change in changes]
    return [change.proof(live[change.live], seeds[change.tensor]) for change in changes]


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for number, value in more.items():
        total[number] = (total.get(number, 0) + value) & U64_MASK


def _hex(state: bytes | None) -> str:
    return "none" if state is None else state.hex()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
