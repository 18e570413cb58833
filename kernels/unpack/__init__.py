"""Decode tile bodies (docs/format.md, section 5.2); every byte of them may be hostile."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrowrl.errors import CorruptData, LayoutError
from sparrowrl.kernels.bits import INT_DTYPES


def unpack(
    counts: Tensor, buckets: Tensor, words: Tensor, elements: int, tile_log2: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Decode counts int32[tiles], buckets int32[tiles] and words int32[...] to (positions int64[n], steps `dtype`[n]).

    The inverse of sparrowrl.kernels.pack.pack. Input that `pack` cannot have written is refused: CorruptData. Raises
    LayoutError for tensors that are not int32 or a dtype that is not a signed integer.
    """
    if any(t.dtype != torch.int32 or t.dim() != 1 for t in (counts, buckets, words)) or dtype not in INT_DTYPES:
        raise LayoutError(f"expected three 1-D int32 tensors and an integer dtype, got {counts.dtype} and {dtype}")
    if not counts.device == buckets.device == words.device:
        raise LayoutError(f"expected all on {words.device}, got {counts.device} and {buckets.device}")
    if not 8 <= tile_log2 <= 20:
        raise CorruptData(f"expected tiles of 2^8 to 2^20 elements, got 2^{tile_log2}: fetch the segment again")
    tiles = -(-elements // (1 << tile_log2))
    if elements < 0 or counts.numel() != tiles or buckets.numel() != tiles:
        raise CorruptData(
            f"expected {tiles} tiles, got {counts.numel()} counts and {buckets.numel()} buckets: fetch it again"
        )
    if words.device.type == "cpu":
        from sparrowrl.kernels.unpack.cpu import unpack as run
    else:
        from sparrowrl.kernels.unpack.triton import unpack as run
    return run(counts.contiguous(), buckets.contiguous(), words.contiguous(), elements, tile_log2, dtype)
