"""The 64-bit sum that says whether two tensors hold the same bits (docs/format.md, section 4)."""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.bits import INT_DTYPES


def tensor_seed(name: str) -> int:
    """Return the seed of the tensor called `name`, in [0, 2^64)."""
    return int.from_bytes(blake3(name.encode()).digest(length=8), "little")


def fingerprint(bits: Tensor, seed: int, start: int = 0, row_length: int = 1, stride: int = 1) -> Tensor:
    """Return the sum, modulo 2^64 and as a 0-d int64 tensor on the device of `bits`, of the mixes of all elements.

    `bits` is intw[n], contiguous. Element k has the flat index start + (k // row_length) * stride + k % row_length; as
    long as row_length equals stride that is start + k.

    Raises LayoutError for another shape or dtype or an impossible box.
    """
    _check_bits(bits)
    if start < 0 or row_length < 1 or stride < row_length:
        raise LayoutError(f"expected start >= 0 and 1 <= row_length <= stride, got {start}, {row_length}, {stride}")
    if row_length == stride:
        row_length = stride = max(bits.numel(), 1)
    if bits.device.type == "cpu":
        from sparrowrl.kernels.fingerprint.cpu import fingerprint as run
    else:
        from sparrowrl.kernels.fingerprint.triton import fingerprint as run
    return run(bits, seed, start, row_length, stride)


def fingerprint_at(live: Tensor, positions: Tensor, indices: Tensor, seed: int) -> Tensor:
    """Return the sum, as `fingerprint` does, over the elements live[positions[j]], whose flat indices are indices[j].

    `live` is intw[N], contiguous; `positions` and `indices` are int64[n]. Raises LayoutError for another shape or dtype
    or a position outside `live`.
    """
    _check_bits(live)
    if positions.dim() != 1 or positions.shape != indices.shape:
        raise LayoutError(f"expected as many indices as positions, got {list(indices.shape)}, {list(positions.shape)}")
    if positions.dtype != torch.int64 or indices.dtype != torch.int64:
        raise LayoutError(f"expected int64 positions and indices, got {positions.dtype} and {indices.dtype}")
    if not live.device == positions.device == indices.device:
        raise LayoutError(f"expected all on {live.device}, got {positions.device} and {indices.device}")
    if positions.numel():
        low, high = (int(x) for x in positions.aminmax())
        if low < 0 or high >= live.numel():
            raise LayoutError(f"expected positions in [0, {live.numel()}), got {low} to {high}")
    if live.device.type == "cpu":
        from sparrowrl.kernels.fingerprint.cpu import fingerprint_at as run
    else:
        from sparrowrl.kernels.fingerprint.triton import fingerprint_at as run
    return run(live, positions.contiguous(), indices.contiguous(), seed)


def fingerprint_each(bits: Tensor, indices: Tensor, counts: Tensor, seeds: Tensor) -> Tensor:
    """Return int64[g], the sums, as `fingerprint` makes them, of g groups of elements one after another.

    `bits` intw[n] with flat indices `indices` int64[n]; group j has counts[j] elements and the seed seeds[j].
    Raises LayoutError for another shape or dtype, or counts that do not add up to n.
    """
    _check_bits(bits)
    if indices.shape != bits.shape or counts.shape != seeds.shape or counts.dim() != 1:
        raise LayoutError(f"expected an index for each of {bits.numel()} bits and a seed for each group")
    if not indices.dtype == counts.dtype == seeds.dtype == torch.int64:
        raise LayoutError(f"expected int64 indices, counts, seeds, got {indices.dtype}, {counts.dtype}, {seeds.dtype}")
    if not bits.device == indices.device == counts.device == seeds.device:
        raise LayoutError(f"expected all on {bits.device}")
    if int(counts.sum()) != bits.numel() or bool((counts < 0).any()):
        raise LayoutError(f"expected counts that add up to {bits.numel()}, got {int(counts.sum())}")
    if bits.device.type == "cpu":
        from sparrowrl.kernels.fingerprint.cpu import fingerprint_each as run
    else:  # called once a segment, beside the engine's work: no kernel of its own
        from sparrowrl.kernels.fingerprint.reference import fingerprint_each as run
    return run(bits, indices.contiguous(), counts, seeds)


def _check_bits(bits: Tensor) -> None:
    if bits.dtype not in INT_DTYPES or bits.dim() != 1 or not bits.is_contiguous():
        raise LayoutError(f"expected bits as a contiguous 1-D integer view, got {bits.dtype} {list(bits.shape)}")
