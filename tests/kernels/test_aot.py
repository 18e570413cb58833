"""Every Triton kernel compiles for all GPUs that we name, without one, spills nothing and has 64-bit addresses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = 10
TARGETS = {"sm_80", "sm_90", "gfx942"}


def compiled(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """Compile in a process of its own, since the interpreter may be at work in this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/aot.py", "--out", str(folder / "aot.csv"), *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=600)
    with (folder / "aot.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def check(rows: list[dict[str, str]]) -> None:
    assert len({row["kernel"] for row in rows}) == KERNELS
    assert all(0 < int(row["registers"]) <= 255 for row in rows)
    assert [row for row in rows if int(row["spills"]) or int(row["narrow"])] == []


def test_bf16_kernels_for_one_gpu(tmp_path: Path) -> None:
    check(compiled(tmp_path, "--widths", "2", "--targets", "sm_90"))


@pytest.mark.slow
def test_all_kernels_for_all_gpus(tmp_path: Path) -> None:
    rows = compiled(tmp_path)
    check(rows)
    assert {row["target"] for row in rows} == TARGETS
    assert {row["width"] for row in rows} == {"1", "2", "4", "8"}
