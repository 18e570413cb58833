"""Compare new weights with old bits and keep what changed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.bits import INT_DTYPES


def diff(new: Tensor, old: Tensor, wire_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return (positions int64[n], steps intw[n]) of the elements whose bits changed.

    `new` has any shape and strides and is read in row-major order. `old`, intw[new.numel()] contiguous, holds the old
    bits. If `wire_dtype` differs from new.dtype, `new` is cast to it first (chunk by chunk), see
    sparrowrl.kernels.bits.cast_to_wire. Positions ascend; a step is new bits minus old bits modulo 2^(8w), never 0.

    Raises LayoutError if sizes, widths or devices do not fit together.
    """
    wire = new.dtype if wire_dtype is None else wire_dtype
    if old.dtype not in INT_DTYPES or old.element_size() != wire.itemsize:
        raise LayoutError(f"expected old bits as integers of {wire.itemsize} bytes ({wire}), got {old.dtype}")
    if old.dim() != 1 or not old.is_contiguous() or old.numel() != new.numel():
        raise LayoutError(f"expected old bits contiguous of shape [{new.numel()}], got {list(old.shape)}")
    if new.device != old.device:
        raise LayoutError(f"expected new and old on one device, got {new.device} and {old.device}")
    if new.device.type == "cpu":
        from sparrowrl.kernels.diff.cpu import diff as run
    else:
        from sparrowrl.kernels.diff.triton import diff as run
    return run(new, old, wire)
