"""The last check: weights exported from the engine against the trainer's, bit for bit, without fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sparrowrl.examples.gsm8k_grpo.report import ExportCheck

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_export(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> ExportCheck:
    """Compare a safetensors file with the trainer's weights, cast to `dtype`.

    A tensor that one side lacks, or that has another dtype or shape, counts with all its elements.
    """
    from safetensors import safe_open

    elements, different, first = 0, 0, None
    with safe_open(path, framework="pt") as file:
        exported = set(file.keys())
        for name in sorted(exported | weights.keys()):
            wanted = weights[name].to("cpu", dtype) if name in weights else None
            got = file.get_tensor(name) if name in exported else None
            count, where = _differences(wanted, got)
            elements += max(tensor.numel() for tensor in (wanted, got) if tensor is not None)
            different += count
            if where is not None and first is None:
                first = f"{name}: {where}"
    return ExportCheck(len(exported), elements, different, first)


def _differences(wanted: Tensor | None, got: Tensor | None) -> tuple[int, str | None]:
    """How many elements differ, and the first of them in words."""
    if wanted is None:
        assert got is not None
        return got.numel(), "the trainer has no such tensor"
    if got is None:
        return wanted.numel(), "it was not exported"
    if (wanted.dtype, wanted.shape) != (got.dtype, got.shape):
        return wanted.numel(), f"expected {wanted.dtype} {tuple(wanted.shape)}, got {got.dtype} {tuple(got.shape)}"
    integers = _BITS[wanted.element_size()]
    wanted_bits, got_bits = (tensor.contiguous().view(integers).flatten() for tensor in (wanted, got))
    places = (wanted_bits != got_bits).nonzero().flatten()
    if not len(places):
        return 0, None
    place = int(places[0])
    width = 8 * wanted.element_size()
    bits = [f"{int(side[place]) % (1 << width):#x}" for side in (wanted_bits, got_bits)]
    return len(places), f"element {place}: expected bits {bits[0]}, got {bits[1]}"
