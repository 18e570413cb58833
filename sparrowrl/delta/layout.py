"""The layout of a run: which tensors there are, and the id of a state of them (docs/format.md sections 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from blake3 import blake3

from sparrowrl.delta import limits, wire
from sparrowrl.errors import CorruptData, LayoutError, UnsupportedFormat
from sparrowrl.kernels.fingerprint import tensor_seed

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
U64_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout. Raises FormatError if a field is not what docs/format.md allows."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise CorruptData(f"tensor name: expected a string that is not empty, got {self.name!r}")
        try:
            encoded = self.name.encode()
        except UnicodeEncodeError as error:
            raise CorruptData(f"tensor name: expected valid Unicode, got {ascii(self.name)[:100]}") from error
        limits.check_at_most("tensor name in bytes", len(encoded), limits.NAME_BYTES)
        if self.dtype not in DTYPES:
            raise CorruptData(f"dtype of {self.name}: expected {' '.join(DTYPES)}, got {ascii(self.dtype)[:40]}")
        limits.check_at_most(f"dimensions of {self.name}", len(self.shape), limits.DIMENSIONS)
        for size in self.shape:
            limits.check_int(f"shape of {self.name}", size, 0, limits.TENSOR_ELEMENTS + 1)
        limits.check_at_most(f"elements of {self.name}", self.numel, limits.TENSOR_ELEMENTS)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights on the wire."""
        return DTYPES[self.dtype]

    @property
    def width(self) -> int:
        """Bytes of an element: 1, 2, 4 or 8."""
        return self.torch_dtype.itemsize


class Layout:
    """All tensors of a run, sorted by the UTF-8 bytes of their names; a tensor's number is its place here."""

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        """Sorts the tensors. Raises LayoutError if two have one name, LimitExceeded if there are too many."""
        self.tensors: tuple[TensorSpec, ...] = tuple(sorted(tensors, key=lambda spec: spec.name.encode()))
        limits.check_at_most("tensors of a layout", len(self.tensors), limits.TENSORS)
        self._numbers = {spec.name: number for number, spec in enumerate(self.tensors)}
        if len(self._numbers) != len(self.tensors):
            names = [spec.name for spec in self.tensors]
            twice = next(a for a, b in pairwise(names) if a == b)
            raise LayoutError(f"layout: expected distinct tensor names, got {twice!r} twice")

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.tensors == other.tensors

    def __hash__(self) -> int:
        return hash(self.id)

    def number(self, name: str) -> int:
        """The number of the tensor of that name. Raises LayoutError if there is none."""
        try:
            return self._numbers[name]
        except KeyError:
            raise LayoutError(f"tensor {name!r} is not in the layout of {len(self)} tensors") from None

    def find(self, name: str) -> int | None:
        """The number of the tensor of that name; None if there is none."""
        return self._numbers.get(name)

    @cached_property
    def id(self) -> bytes:
        """The layout id: 32 bytes."""
        return blake3(self.to_bytes()).digest()

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The fingerprint seed of each tensor, an unsigned 64-bit number."""
        return tuple(tensor_seed(spec.name) for spec in self.tensors)

    def to_bytes(self) -> bytes:
        """The bytes of docs/format.md section 3. Raises LimitExceeded if they are too many."""
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]
        data = wire.pack({"format": limits.FORMAT_VERSION, "tensors": rows})
        limits.check_at_most("layout in bytes", len(data), limits.LAYOUT_BYTES)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Read a layout. Raises UnsupportedFormat, CorruptData or LimitExceeded."""
        limits.check_at_most("layout in bytes", len(data), limits.LAYOUT_BYTES)
        body = wire.unpack_map("layout", data, ("format", "tensors"), limits.TENSORS)
        if body["format"] != limits.FORMAT_VERSION:
            raise UnsupportedFormat(f"layout: expected format 1, got {ascii(body['format'])[:40]}")
        try:
            layout = cls(_spec(row) for row in limits.check_list("layout tensors", body["tensors"]))
        except LayoutError as error:
            raise CorruptData(str(error)) from error
        if layout.to_bytes() != data:
            raise CorruptData("layout: expected tensors sorted by name and numbers in their shortest form")
        return layout


def _spec(row: object) -> TensorSpec:
    name, dtype, shape = limits.check_list("layout tensor", row, 3)
    if type(name) is not str or type(dtype) is not str:
        raise CorruptData("layout tensor: expected a name, a dtype and a shape")
    return TensorSpec(name, dtype, tuple(limits.check_list(f"shape of {name[:100]!a}", shape)))  # type: ignore[arg-type]


def state_id(layout: Layout, fingerprints: Sequence[int]) -> bytes:
    """The id, 32 bytes, of the state whose tensors have these fingerprints (64-bit, signed or not; in layout order).

    Raises LayoutError unless there is one fingerprint a tensor.
    """
    if len(fingerprints) != len(layout):
        raise LayoutError(f"state id: expected {len(layout)} fingerprints, got {len(fingerprints)}")
    table = b"".join((value & U64_MASK).to_bytes(8, "little") for value in fingerprints)
    return blake3(layout.id + table).digest()
