"""Whether artifacts are what they say: hashes, contents, and the chain of states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sparrowrl.delta.apply import fingerprint_of
from sparrowrl.delta.blocks import DenseBlock
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.layout import U64_MASK, Layout
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.materialize import bits_of_checkpoint, first_mismatch
from sparrowrl.delta.segment import decode_segment
from sparrowrl.errors import CorruptData, FingerprintMismatch, LayoutError, VersionNotFound


@dataclass(slots=True)
class _Seen:
    """What an artifact's segments hold of one tensor."""

    boxes: list[Box]
    weights: int = 0
    dense: bool = False
    fingerprint: int = 0


def verify_artifact(journal: Journal, artifact: ArtifactRef) -> bool:
    """Read all of an artifact; returns whether its states could be checked too, which needs a root to start from.

    Checked: the manifest's MAC (if the journal has a run key) and its agreement with key and layout; length, hash and
    full decoding of every segment; that no element is covered twice and every change is in the manifest; an anchor's
    every bit against its fingerprints; a delta's base and target state against its neighbours'. Raises FormatError.
    """
    manifest = journal.manifest(artifact.target, artifact.name)
    try:
        layout = journal.layout(manifest.layout)
        manifest.check_layout(layout)
        seen = _read(journal, artifact, manifest, layout)
    except (LayoutError, VersionNotFound) as error:
        raise CorruptData(f"{artifact.target}/{artifact.name}: {error}") from error
    _compare(f"{artifact.target}/{artifact.name}", manifest, layout, seen)
    return _check_states(journal, artifact, manifest)


def verify_newest(journal: Journal) -> None:
    """Raise CorruptData unless the origin or an anchor leads to the newest version: that way is never given up."""
    newest = journal.newest()
    if newest is None:
        return
    try:
        journal.route(newest)
    except VersionNotFound as error:
        if journal.newest() == newest:  # else a commit came between, and what it made superfluous is gone
            raise CorruptData(f"an artifact that leads to the newest version is missing: {error}") from error


def verify_checkpoint(journal: Journal, version: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise FingerprintMismatch unless a checkpoint holds exactly the weights of a version (other names are ignored).

    Raises VersionNotFound if the version cannot be reached from a root.
    """
    layout, fingerprints = journal.layout(), journal.fingerprints(version)
    try:
        wrong = first_mismatch(layout, bits_of_checkpoint(layout, weights), fingerprints)
    except LayoutError as error:
        raise FingerprintMismatch(str(error)) from error
    if wrong is not None:
        raise FingerprintMismatch(f"checkpoint: tensor {wrong} has other bits than in version {version}")


def _read(journal: Journal, artifact: ArtifactRef, manifest: Manifest, layout: Layout) -> dict[int, _Seen]:
    seen: dict[int, _Seen] = {}
    for ref in manifest.segments:
        for block in decode_segment(journal.segment(artifact.target, artifact.name, ref), layout):
            here = seen.setdefault(block.tensor, _Seen([]))
            here.boxes.append(block.box)
            here.weights += block.count
            if isinstance(block, DenseBlock):
                here.dense = True
                here.fingerprint += fingerprint_of(block.bits, layout.seeds[block.tensor], block.box)
    return seen


def _compare(what: str, manifest: Manifest, layout: Layout, seen: dict[int, _Seen]) -> None:
    """Raise CorruptData unless the segments hold what the manifest says."""
    listed = {tensor.number: tensor for tensor in manifest.tensors if tensor.changed}
    if odd := listed.keys() ^ seen.keys():
        name = layout.tensors[min(odd)].name
        raise CorruptData(f"{what}: tensor {name} is in the manifest or in a segment, but not in both")
    for number, here in seen.items():
        name, tensor = layout.tensors[number].name, listed[number]
        if first_overlap(here.boxes) is not None:
            raise CorruptData(f"{what}: tensor {name} has elements that are covered twice")
        if here.weights < tensor.changed or (not here.dense and here.weights != tensor.changed):
            raise CorruptData(f"{what}: expected {tensor.changed} changes of {name}, the segments have {here.weights}")
        if manifest.kind == "anchor" and here.fingerprint & U64_MASK != tensor.fingerprint:
            raise CorruptData(f"{what}: the bits of {name} do not have the fingerprint that the manifest says")


def _check_states(journal: Journal, artifact: ArtifactRef, manifest: Manifest) -> bool:
    what = f"{artifact.target}/{artifact.name}"
    if journal.manifest_of(artifact.target).target_state != manifest.target_state:
        raise CorruptData(f"{what}: its target state is not that of the version's other artifacts")
    if manifest.base is None:
        return True
    try:
        base_table = journal.fingerprints(manifest.base)
    except VersionNotFound:
        return False
    journal.table_after(base_table, manifest)
    return True
