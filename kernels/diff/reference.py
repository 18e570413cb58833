"""What changed, as plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrowrl.kernels.bits import as_bits, cast_to_wire


def diff(new: Tensor, old: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See sparrowrl.kernels.diff.diff."""
    bits = as_bits(cast_to_wire(new, wire_dtype)).reshape(-1)
    positions = (bits != old).nonzero().reshape(-1)
    return positions, bits[positions] - old[positions]
