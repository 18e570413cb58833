"""Apply steps to live weights."""

from __future__ import annotations

from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.bits import INT_DTYPES


def scatter_add_(live: Tensor, positions: Tensor, steps: Tensor) -> None:
    """Add `steps` intw[n] to live intw[N] (1-D, contiguous) at `positions` int64[n], wrapping modulo 2^(8w).

    Positions must be distinct, in any order. Negated steps undo it. Raises LayoutError, before anything is written, if
    a position is outside `live` or if shapes, dtypes or devices do not fit together.
    """
    if live.dtype not in INT_DTYPES or live.dim() != 1 or not live.is_contiguous():
        raise LayoutError(f"expected live bits as a contiguous 1-D integer view, got {live.dtype} {list(live.shape)}")
    if positions.dim() != 1 or positions.shape != steps.shape:
        raise LayoutError(f"expected as many steps as positions, got {list(steps.shape)} and {list(positions.shape)}")
    if positions.dtype.itemsize != 8 or positions.dtype.is_floating_point or steps.dtype != live.dtype:
        raise LayoutError(f"expected int64 positions and {live.dtype} steps, got {positions.dtype} and {steps.dtype}")
    if not live.device == positions.device == steps.device:
        raise LayoutError(f"expected all on {live.device}, got {positions.device} and {steps.device}")
    if positions.numel() == 0:
        return
    low, high = (int(x) for x in positions.aminmax())
    if low < 0 or high >= live.numel():
        raise LayoutError(f"expected positions in [0, {live.numel()}), got {low} to {high}: nothing was written")
    if live.device.type == "cpu":
        from sparrowrl.kernels.scatter.cpu import scatter_add_ as run
    else:
        from sparrowrl.kernels.scatter.triton import scatter_add_ as run
    run(live, positions.contiguous(), steps.contiguous())
