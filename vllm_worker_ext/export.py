"""Writing the live weights of an engine to a file, in checkpoint coordinates."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from sparrowrl.vllm_worker_ext.agreement import Agreement
from sparrowrl.vllm_worker_ext.placement import Placement


def write(placement: Placement, path: Path, version: str, ranks: Agreement, event: str) -> str:
    """Write all tensors that the ranks hold, as they are live, to a safetensors file at `path`.

    Rank 0 puts it together. Of an opaque tensor it is the mirror. `version` goes into the file's metadata. All ranks
    must call this together; returns the path, or "" on ranks other than 0.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    own = path.with_name(f".{path.name}.rank{ranks.rank}")
    try:
        save_file(_regions(placement), own)
        ranks.share(f"{event}-written", b"", event)
        if ranks.rank == 0:
            tensors: dict[str, Tensor] = {}
            for rank in range(ranks.world):
                with safe_open(path.with_name(f".{path.name}.rank{rank}"), "pt") as file:
                    for key in file.keys():  # noqa: SIM118 - not a dict
                        _place(placement, tensors, key, file.get_tensor(key))
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            save_file(tensors, temporary, {"format": "pt", "version": version})
            os.replace(temporary, path)
        ranks.share(f"{event}-read", b"", event)
    finally:
        own.unlink(missing_ok=True)
    return str(path) if ranks.rank == 0 else ""


def _regions(placement: Placement) -> dict[str, Tensor]:
    """The bits of each region that this rank holds, named by tensor number and the region in numbers."""
    found = {}
    for n, pieces in enumerate(placement.pieces):
        for piece in pieces:
            bits = placement.live[piece.live].as_strided(piece.sizes, piece.target_strides, piece.target)
            key = f"{n}/{piece.source}/{','.join(map(str, piece.source_strides))}"
            found[key] = bits.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return found


def _place(placement: Placement, tensors: dict[str, Tensor], key: str, bits: Tensor) -> None:
    number, offset, strides = key.split("/")
    spec = placement.layout.tensors[int(number)]
    if spec.name not in tensors:
        tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype)
    whole = tensors[spec.name].view(-1).view(bits.dtype)
    whole.as_strided(bits.shape, [int(s) for s in strides.split(",")], int(offset)).copy_(bits)
