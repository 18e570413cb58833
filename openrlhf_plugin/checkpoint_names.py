"""Which tensors of a checkpoint a parameter of a Hugging Face model is saved as.

A model may have all experts of a layer in one parameter, and a checkpoint has one tensor for each. What transformers
does when it saves is tried on numbers in a parameter's place, so that no weight is touched.
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
    numbers = torch.arange(math.prod(_narrow(shape))).reshape(_narrow(shape))
    try:
        chosen = revert_weight_conversion(model, {name: numbers})
    except (RuntimeError, ValueError) as error:
        raise LayoutError(f"{name} {shape}: expected to see what is saved of it, got {error}") from error
    found = []
    for target, tensor in made.items():
        wanted = tuple(tensor.shape)
        begin = _begin(numbers, chosen[target], shape, wanted) if chosen.keys() == made.keys() else None
        if begin is None:
            raise LayoutError(f"{target}: expected a range of the elements of {name} {shape}, got others as {wanted}")
        found.append(Saved(target, begin, wanted))
    return found


def _narrow(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of that shape, with rows of a few elements: as many as it takes to see a row's order change."""
    return (*shape[:-1], min(shape[-1], 4)) if len(shape) > 1 else shape


def _begin(numbers: torch.Tensor, chosen: torch.Tensor, shape: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    """Where the range that was chosen begins in the tensor of `shape` that `numbers` stands for; None if it is none.

    The range is one of whole rows, which are shorter in `numbers`.
    """
    narrow, row = (numbers.shape[-1], shape[-1]) if len(shape) > 1 else (1, 1)
    flat = chosen.reshape(-1)
    first = int(flat[0]) if flat.numel() else 0
    end = first + flat.numel()
    if end > numbers.numel() or not torch.equal(flat, torch.arange(first, end)):
        return None
    if first % narrow or end % narrow or flat.numel() // narrow * row != math.prod(wanted):
        return None
    return first // narrow * row
