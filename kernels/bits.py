"""Weights as bit patterns: integer views and the cast from the trainer's dtype to the wire's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparrowrl.errors import LayoutError

INT_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
INT_DTYPES = frozenset(INT_OF_WIDTH.values())

# Casts differ in the NaN that they produce (x86 vector code, scalar code and CUDA disagree for bf16), so a cast NaN is
# always replaced by the positive quiet one without payload.
_QUIET_NAN = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC0_0000,
    torch.float64: 0x7FF8_0000_0000_0000,
}


def as_bits(t: Tensor) -> Tensor:
    """View `t` (any dtype of 1, 2, 4 or 8 bytes, any strides) as signed integers of the same width; no copy.

    Raises LayoutError for another width.
    """
    width = t.element_size()
    if width not in INT_OF_WIDTH:
        raise LayoutError(f"expected a dtype of 1, 2, 4 or 8 bytes, got {t.dtype} of {width}: leave this tensor out")
    return t.detach().view(INT_OF_WIDTH[width])


def cast_to_wire(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t` as `dtype`, rounded to nearest even, every NaN canonical; `t` itself if it has that dtype already.

    Raises LayoutError if `dtype` is a floating-point type that has no canonical NaN here.
    """
    if t.dtype == dtype:
        return t
    cast = t.detach().to(dtype)
    if not (dtype.is_floating_point and t.dtype.is_floating_point):
        return cast
    if dtype not in _QUIET_NAN:
        raise LayoutError(f"expected a wire dtype among {sorted(map(str, _QUIET_NAN))}, got {dtype}")
    # A finite sum has no NaN in it. To look for NaNs takes a CPU several times as long as the cast.
    if t.device.type == "cpu" and dtype == torch.bfloat16 and t.itemsize > 1 and bool(t.detach().sum().isfinite()):
        return cast
    as_bits(cast).masked_fill_(cast.isnan(), _QUIET_NAN[dtype])
    return cast


def wire_chunks(new: Tensor, dtype: torch.dtype, elements: int) -> Iterator[Tensor]:
    """Yield the bits of `new` cast to `dtype`, in row-major order, as contiguous 1-D integer tensors.

    What must be copied (cast, or made contiguous) is copied in chunks of at most `elements`; what need not be is
    yielded whole.
    """
    if new.is_contiguous():
        flat = new.detach().reshape(-1)
        step = max(flat.numel(), 1) if new.dtype == dtype else elements
        for start in range(0, flat.numel(), step):
            yield as_bits(cast_to_wire(flat[start : start + step], dtype))
        return
    row = new[0].numel()
    if row > elements:
        for part in new:
            yield from wire_chunks(part, dtype, elements)
        return
    for start in range(0, new.shape[0], elements // row):
        yield as_bits(cast_to_wire(new[start : start + elements // row].contiguous(), dtype)).reshape(-1)
