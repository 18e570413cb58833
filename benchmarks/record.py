"""What all benchmarks write alike: when, of which commit, where and with what a figure was taken; and CSV files."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def context(*packages: str, device: str | None = None) -> dict[str, str]:
    """The columns date, commit ("-dirty" if files differ from it), machine (with its load now) and versions."""
    git = ["git", "-C", str(ROOT)]
    changes = subprocess.run([*git, "status", "--porcelain", "-uno"], check=True, capture_output=True, text=True).stdout
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    changed = any(not line[3:].startswith("benchmarks/results/") for line in changes.splitlines())
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": head.strip() + ("-dirty" if changed else ""),
        "machine": f"{device or processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": ", ".join(
            [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
        ),
    }


def processor() -> str:
    """The name of the processor as the system knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows, all with the columns of the file, to it; a new file begins with their names."""
    rows = list(rows)
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            there = next(csv.reader(file))
        if there != columns:
            raise SystemExit(f"{path}: expected its columns to be {columns}, got {there}: name another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
