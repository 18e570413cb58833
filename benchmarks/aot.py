"""Compile every Triton kernel ahead of time, without a GPU, and record what each needs.

    python benchmarks/aot.py [--widths 1 2 4 8] [--targets sm_80 sm_90 gfx942] [--out benchmarks/results/aot.csv]

Rows are appended: date, commit, triton, target, kernel, width in bytes of an element, registers (of a GPU from AMD:
vector registers), spills (bytes of stack and local memory, which only spilled registers use; of a GPU from AMD: spilled
registers), shared memory in bytes, and narrow: how many addresses are computed with 32 bits, which must be none.
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from record import RESULTS, append, context
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparrowrl.kernels.diff import triton as diff
from sparrowrl.kernels.fingerprint import triton as fingerprint
from sparrowrl.kernels.pack import triton as pack
from sparrowrl.kernels.scatter import triton as scatter
from sparrowrl.kernels.unpack import triton as unpack

ROOT = Path(__file__).parents[1]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COLUMNS = ["target", "kernel", "width", "registers", "spills", "shared_bytes", "narrow"]


class Case(NamedTuple):
    """A kernel, the types of its arguments in order (`*w` is a pointer to weights), and its constants."""

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]


CASES = [
    Case("diff.mark", diff.mark, "*w *w *i32 *i32 i64", {"WORDS": diff.BLOCK // 32}),
    Case("diff.compact", diff.compact, "*w *w *i32 *i64 *i64 *w i64 i64", {"BLOCK": diff.BLOCK}),
    Case("scatter.add", scatter.add, "*w *i64 *w i64", {"BLOCK": scatter.BLOCK}),
    Case(
        "fingerprint.of_box.long",
        fingerprint.of_box,
        "*w *i64 i64 i64 i64 i64 i64",
        {"LONG_ROWS": True, "BLOCK": fingerprint.BLOCK},
    ),
    Case(
        "fingerprint.of_box.short",
        fingerprint.of_box,
        "*w *i64 i64 i64 i64 i32 i64",
        {"LONG_ROWS": False, "BLOCK": fingerprint.BLOCK},
    ),
    Case(
        "fingerprint.of_elements",
        fingerprint.of_elements,
        "*w *i64 *i64 *i64 i64 i64",
        {"BLOCK": fingerprint.BLOCK},
    ),
    Case("pack.magnitude_logs", pack.magnitude_logs, "*w *i64 i64", {"BLOCK": pack.BLOCK}),
    Case("pack.write", pack.write, "*i64 *w *i64 *i64 *i32 i64 i64 i64 i32", {"BLOCK": pack.BLOCK}),
    Case("unpack.select", unpack.select, "*i32 *i64 *i64 *i64 *i64 *i32 *i32", {"BLOCK": unpack.SELECT_BLOCK}),
    Case(
        "unpack.decode",
        unpack.decode,
        "*i32 *i32 *i32 *i64 *i64 *i64 *w *i32 i64 i64 i64",
        {"BLOCK": unpack.BLOCK},
    ),
]


def compiled(case: Case, width: int, target: GPUTarget) -> Any:
    """Compile `case` for weights of `width` bytes."""
    types = [t.replace("*w", f"*i{8 * width}") for t in case.types.split()]
    constants = dict(case.constants)
    if case.kernel is unpack.decode:
        constants["WIDTH"] = 8 * width
    names = case.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | dict(zip(names, types, strict=False))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target)


def needs(binary: Any, target: GPUTarget) -> tuple[int, int]:
    """Return (registers, spills) as the vendor's tools see them."""
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        found = {key: int(value) for key, value in re.findall(r"\.(\w+_(?:count|spill_count)):\s+(\d+)", text)}
        return found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def narrow_addresses(binary: Any) -> int:
    """Return how many pointers have an offset of less than 64 bits added."""
    offsets = re.findall(r"tt\.addptr .* : .*, (?:tensor<(?:\d+x)*)?i(\d+)>?", binary.asm["ttir"])
    if not offsets:
        raise ValueError("expected a kernel that computes addresses, found none")
    return sum(int(bits) < 64 for bits in offsets)


def rows(widths: list[int], targets: list[str]) -> Iterator[dict[str, Any]]:
    """Compile everything and yield one row each; kernels that touch no weights once only."""
    about = context("triton")
    for name in targets:
        for case in CASES:
            for width in widths if "*w" in case.types else widths[:1]:
                binary = compiled(case, width, TARGETS[name])
                figures = (*needs(binary, TARGETS[name]), binary.metadata.shared, narrow_addresses(binary))
                yield dict(zip(COLUMNS, (name, case.name, width, *figures), strict=True)) | about


def main() -> None:
    """Append the rows to the file and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--widths", type=int, nargs="+", choices=[1, 2, 4, 8], default=[1, 2, 4, 8])
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=RESULTS / "aot.csv")
    arguments = parser.parse_args()
    done = list(rows(arguments.widths, arguments.targets))
    for row in done:
        print(*list(row.values())[: len(COLUMNS)])
    append(arguments.out, done)


if __name__ == "__main__":
    main()
