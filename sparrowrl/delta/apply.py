"""Blocks applied to a flat tensor of bits in checkpoint coordinates."""

from __future__ import annotations

import torch

from sparrowrl.delta.blocks import Block, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.kernels.bits import as_bits, cast_to_wire
from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.kernels.scatter import scatter_add_


def box_view(flat: torch.Tensor, box: Box) -> torch.Tensor:
    """A view [rows, row_length] of the box's elements in a contiguous 1-D tensor."""
    return flat.as_strided((box.rows, box.row_length), (box.stride, 1), flat.storage_offset() + box.start)


def apply_block(live: torch.Tensor, block: Block) -> None:
    """Apply a block to `live` intw[numel], a whole tensor's bits: add its steps, or write its bits."""
    if isinstance(block, SparseBlock):
        scatter_add_(live, block.box.flat(block.positions), block.steps)
    else:
        box_view(live, block.box).copy_(block.bits.view(block.box.rows, block.box.row_length))


def wire_bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits intw[numel] of `tensor` cast to `dtype`, contiguous in row-major order; a view where nothing changes."""
    return as_bits(cast_to_wire(tensor.detach(), dtype).contiguous()).reshape(-1)


def fingerprint_of(bits: torch.Tensor, seed: int, box: Box) -> int:
    """The fingerprint (u64) of a box's elements, `bits` intw[box.elements] in the box's own numbering."""
    if not bits.numel():
        return 0
    return int(fingerprint(bits, seed, box.start, box.row_length, box.stride)) % (1 << 64)
