"""Time every kernel on the device at hand against a copy of the same weights.

    python benchmarks/kernels.py [--device cpu] [--elements 134217728] [--out benchmarks/results/kernels.csv]

The weights are bf16, of which 0.16 % or 1.2 % changed, nearly all by one ULP. Before anything is timed its result is
checked against the reference. Rows are appended: one thread, median and 20th and 80th percentile of the repeats in
milliseconds (on a CPU: of processor time), the median time of a copy, made after each repeat, and this time over the
kernel's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, append, context
from torch import Tensor

from sparrowrl.kernels.diff import diff
from sparrowrl.kernels.diff import reference as diff_reference
from sparrowrl.kernels.fingerprint import fingerprint, fingerprint_at
from sparrowrl.kernels.fingerprint import reference as fingerprint_reference
from sparrowrl.kernels.pack import pack
from sparrowrl.kernels.scatter import scatter_add_
from sparrowrl.kernels.unpack import unpack

ROOT = Path(__file__).parents[1]
DENSITIES = [0.0016, 0.012]
TILE_LOG2 = 14
COLUMNS = ["operation", "elements", "density", "repeats"]
COLUMNS += ["median_ms", "p20_ms", "p80_ms", "copy_ms", "copy_over_median"]


def weights(elements: int, density: float, device: str) -> tuple[Tensor, Tensor]:
    """Return new and old bits, int16[elements]."""
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(elements, generator=generator).mul_(0.02).to(torch.bfloat16).view(torch.int16)
    new = old.clone()
    at = torch.unique(torch.randint(elements, (int(elements * density),), generator=generator))
    steps = torch.randint(0, 2, at.shape, generator=generator) * 2 - 1
    steps[torch.rand(at.numel(), generator=generator) < 0.02] *= 5
    new[at] += steps.to(torch.int16)
    return new.to(device), old.to(device)


def timed(operation: Callable[[], Any], device: str) -> float:
    """Return the milliseconds that `operation` takes: on a CPU of processor time, which others' work disturbs less."""
    if device == "cpu":
        start = time.process_time()
        operation()
        return 1000 * (time.process_time() - start)
    torch.cuda.synchronize()
    start = time.perf_counter()
    operation()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def numpy_diff(new: Tensor, old: Tensor, chunk: int = 1 << 18) -> tuple[Tensor, Tensor]:
    """Return what `diff` does, by numpy in chunks that stay in the cache."""
    positions, steps = [], []
    for start in range(0, new.numel(), chunk):
        a, b = new.numpy()[start : start + chunk], old.numpy()[start : start + chunk]
        at = np.flatnonzero(a != b)
        positions.append(at + start)
        steps.append(a[at] - b[at])
    return torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(steps))


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Say whether all tensors agree in dtype and bits."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def operations(new: Tensor, old: Tensor) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield (name, what to time, whether its result was right)."""
    elements, cpu = new.numel(), new.device.type == "cpu"
    want = diff_reference.diff(new, old, new.dtype)
    positions, steps = changes = diff(new, old)
    yield "diff", lambda: diff(new, old), same(changes, want)
    yield "diff by torch", lambda: diff_reference.diff(new, old, new.dtype), True
    if cpu:
        yield "diff by numpy", lambda: numpy_diff(new, old), same(numpy_diff(new, old), want)
    wide = new.view(torch.bfloat16).float()
    yield "diff of fp32", lambda: diff(wide, old, torch.bfloat16), same(diff(wide, old, torch.bfloat16), want)
    packed = pack(positions, steps, elements, TILE_LOG2)
    decoded = unpack(*packed, elements, TILE_LOG2, steps.dtype)
    yield "pack", lambda: pack(positions, steps, elements, TILE_LOG2), same(decoded, want)
    yield "unpack", lambda: unpack(*packed, elements, TILE_LOG2, steps.dtype), same(decoded, want)
    live = old.clone()
    scatter_add_(live, positions, steps)
    applied = torch.equal(live, new)
    signs = iter([-steps, steps] * 1000)
    yield "scatter", lambda: scatter_add_(live, positions, next(signs)), applied
    part = slice(0, 1 << 20)
    right = torch.equal(fingerprint(new[part], 3), fingerprint_reference.fingerprint(new[part], 3, 0, 1, 1))
    yield "fingerprint", lambda: fingerprint(new, 3), right
    at = fingerprint_at(new, positions, positions, 3)
    right = torch.equal(at, fingerprint_reference.fingerprint_at(new, positions, positions, 3))
    yield "fingerprint_at", lambda: fingerprint_at(new, positions, positions, 3), right


def rows(device: str, elements: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure everything; one row for each operation and density."""
    about = context("torch", "numba", device=torch.cuda.get_device_name() if device != "cpu" else None)
    for density in DENSITIES:
        new, old = weights(elements, density, device)
        copying = partial(torch.empty_like(new).copy_, new)
        for name, operation, checked in operations(new, old):
            if not checked:
                raise SystemExit(f"{name}: wrong result, so no figure")
            operation()
            pairs = [(timed(operation, device), timed(copying, device)) for _ in range(repeats)]
            times, copies = zip(*pairs, strict=True)
            fifths = statistics.quantiles(times, n=5, method="inclusive")
            median, reference = statistics.median(times), statistics.median(copies)
            figures = [round(x, 3) for x in (median, fifths[0], fifths[-1], reference, reference / median)]
            yield dict(zip(COLUMNS, [name, elements, density, repeats, *figures], strict=True)) | about


def main() -> None:
    """Append the rows to the file and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, default=1 << 27)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = []
    for row in rows(arguments.device, arguments.elements, arguments.repeats):
        print(*(row[key] for key in ("operation", "density", "median_ms", "copy_ms", "copy_over_median")))
        done.append(row)
    append(arguments.out, done)


if __name__ == "__main__":
    main()
