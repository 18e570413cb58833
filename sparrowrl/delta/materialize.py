"""All weights of a version, put together from an anchor or from version 0, and proved by its fingerprints."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparrowrl.delta.apply import apply_block, fingerprint_of, wire_bits
from sparrowrl.delta.box import Box
from sparrowrl.delta.chain import roots
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.layout import Layout
from sparrowrl.delta.segment import decode_segment
from sparrowrl.errors import FingerprintMismatch, LayoutError, WrongBase
from sparrowrl.kernels.bits import INT_OF_WIDTH


def materialize(
    journal: Journal, version: int, base_weights: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The weights of a version by name, in wire dtype, on the CPU.

    Starts from the anchor, or from `base_weights` (version 0's; cast to the wire dtype, never changed, other names
    ignored), that takes the fewest deltas. Raises VersionNotFound if neither leads there, LayoutError or WrongBase if
    the base weights are not version 0's, FormatError for damaged files, FingerprintMismatch if the result is not the
    version.
    """
    anchors = {target: ref for target, ref in roots(journal.artifacts()).items() if ref.kind == "anchor"}
    start, deltas = journal.route(version, {*anchors, 0} if base_weights is not None else set(anchors))
    layout = journal.layout()
    if start in anchors:
        weights = [torch.zeros(spec.numel, dtype=INT_OF_WIDTH[spec.width]) for spec in layout.tensors]
        artifacts = [anchors[start], *deltas]
    else:
        weights = _base(journal, layout, base_weights or {})
        artifacts = deltas
    for artifact in artifacts:
        for ref in journal.manifest(artifact.target, artifact.name).segments:
            for block in decode_segment(journal.segment(artifact.target, artifact.name, ref), layout):
                apply_block(weights[block.tensor], block)
    wrong = first_mismatch(layout, weights, journal.fingerprints(version))
    if wrong is not None:
        raise FingerprintMismatch(f"version {version}: tensor {wrong} came out with other bits than were published")
    return {
        spec.name: bits.view(spec.torch_dtype).reshape(spec.shape)
        for spec, bits in zip(layout.tensors, weights, strict=True)
    }


def bits_of_checkpoint(layout: Layout, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The bits intw[numel] of the layout's tensors, cast to the wire dtype; views where nothing need be cast.

    Raises LayoutError for a tensor that is missing, has another shape, or is an integer where floats are expected.
    """
    found = []
    for spec in layout.tensors:
        if spec.name not in weights:
            raise LayoutError(f"checkpoint: expected a tensor {spec.name}, got {len(weights)} others")
        tensor = weights[spec.name]
        if tuple(tensor.shape) != spec.shape:
            raise LayoutError(f"checkpoint: expected {spec.name} of {list(spec.shape)}, got {list(tensor.shape)}")
        if tensor.dtype != spec.torch_dtype and not (
            tensor.dtype.is_floating_point and spec.torch_dtype.is_floating_point
        ):
            raise LayoutError(f"checkpoint: expected {spec.name} of {spec.dtype}, got {tensor.dtype}")
        found.append(wire_bits(tensor.cpu(), spec.torch_dtype))
    return found


def first_mismatch(layout: Layout, weights: list[torch.Tensor], fingerprints: tuple[int, ...]) -> str | None:
    """The name of the first tensor whose bits do not have its fingerprint; None if all do."""
    for spec, seed, bits, fingerprint in zip(layout.tensors, layout.seeds, weights, fingerprints, strict=True):
        if fingerprint_of(bits, seed, Box.whole(spec.numel)) != fingerprint:
            return spec.name
    return None


def _base(journal: Journal, layout: Layout, base_weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    weights = bits_of_checkpoint(layout, base_weights)
    wrong = first_mismatch(layout, weights, journal.fingerprints(0))
    if wrong is not None:
        raise WrongBase(f"base weights: expected those of version 0, tensor {wrong} has other bits")
    return [bits.clone() for bits in weights]
