"""Which tensors of a checkpoint a parameter of a Hugging Face model is saved as.

A model may have all experts of a layer in one parameter, and a checkpoint has one tensor for each. What transformers
does when it saves is tried on the numbers of a parameter's rows, so that no weight is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sparrowrl.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of the checkpoint: the elements of a parameter from `begin` on, row by row, that fill `shape`."""

    name: str
    begin: int
    shape: tuple[int, ...]


def saved_as(model: Any, name: str, shape: tuple[int, ...]) -> list[Saved]:
    """The checkpoint's tensors that a parameter of the model becomes, as `save_pretrained` writes them.

    Raises LayoutError where one of them is no range of the parameter's elements.
    """
    from transformers.core_model_loading import revert_weight_conversion

    whole = torch.empty(shape, device="meta")
    made = revert_weight_conversion(model, {name: whole})
    if len(made) == 1 and (only := next(iter(made))) and made[only] is whole:
        return [Saved(only, 0, shape)]
    row = shape[-1] if len(shape) > 1 else 1
    numbers = torch.arange(math.prod(shape) // row).reshape(*shape[:-1], *([1] if len(shape) > 1 else []))
    found = []
    for target, chosen in revert_weight_conversion(model, {name: numbers}).items():
        wanted, flat = tuple(made[target].shape), chosen.reshape(-1)
        first = int(flat[0]) if flat.numel() else 0
        is_range = torch.equal(flat, torch.arange(first, first + flat.numel()))
        if not is_range or flat.numel() * row != math.prod(wanted):
            raise LayoutError(f"{target}: expected a range of the elements of {name} {shape}, got others as {wanted}")
        found.append(Saved(target, first * row, wanted))
    return found
