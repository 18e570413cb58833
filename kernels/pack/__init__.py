"""Encode what changed into tile bodies (docs/format.md, section 5.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparrowrl.errors import LayoutError
from sparrowrl.kernels.bits import INT_DTYPES

TILE_LOG2_MIN, TILE_LOG2_MAX = 8, 20


class Packed(NamedTuple):
    """Tiles: `counts` int32[tiles] (n), `buckets` int32[tiles] (s) and `words` int32[...], all bodies in order."""

    counts: Tensor
    buckets: Tensor
    words: Tensor


def pack(positions: Tensor, steps: Tensor, elements: int, tile_log2: int) -> Packed:
    """Encode positions int64[n] (ascending, distinct, below `elements`) and steps intw[n] (none 0).

    Tiles have 2^tile_log2 elements, 8 <= tile_log2 <= 20; the last may be shorter. Raises LayoutError for any other
    input.
    """
    if not TILE_LOG2_MIN <= tile_log2 <= TILE_LOG2_MAX:
        raise LayoutError(f"expected tile_log2 in [{TILE_LOG2_MIN}, {TILE_LOG2_MAX}], got {tile_log2}")
    if positions.dim() != 1 or positions.shape != steps.shape or positions.device != steps.device:
        raise LayoutError(f"expected as many steps as positions, got {list(steps.shape)} and {list(positions.shape)}")
    if positions.dtype != torch.int64 or steps.dtype not in INT_DTYPES:
        raise LayoutError(f"expected int64 positions and integer steps, got {positions.dtype} and {steps.dtype}")
    if positions.device.type == "cpu":
        from sparrowrl.kernels.pack.cpu import pack as run
    else:
        from sparrowrl.kernels.pack.triton import pack as run
    return run(positions.contiguous(), steps.contiguous(), elements, tile_log2)
