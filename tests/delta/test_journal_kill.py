"""A writer that is killed at any moment leaves a journal that is whole and can be written on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.verify import verify_artifact


def write_and_kill(root: Path, random_delay: float) -> int:
    """Start a writer, let it commit at least one version, kill it a moment later; the newest version it spoke of."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    script = str(Path(__file__).with_name("journal_writer.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    assert first == "started\n", process.stderr.read()
    spoken = process.stdout.readline()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=random_delay)
    process.kill()
    rest = process.stdout.read()  # not communicate(), which misses what readline() has read ahead
    assert process.wait(timeout=30) == -9, process.stderr.read()
    lines = [spoken, *rest.splitlines(keepends=True)]
    return int([line for line in lines if line.endswith("\n")][-1])


def check(root: Path, spoken: int) -> None:
    journal = Journal(root, "run", bytes(32))
    newest = journal.newest()
    assert newest is not None and newest in (spoken, spoken + 1)
    for artifact in journal.artifacts():
        verify_artifact(journal, artifact)
    base = {"w": torch.zeros(3000, dtype=torch.bfloat16)}
    materialize(journal, newest, base)  # proves the bits by their fingerprints
    assert len(journal.fingerprints(newest)) == 1


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_a_whole_journal(tmp_path, kills):
    rng = random.Random(kills)
    spoken = 0
    for _ in range(kills):
        before = spoken
        spoken = write_and_kill(tmp_path, rng.random() * 0.3)
        assert spoken > before
        check(tmp_path, spoken)
    journal = Journal(tmp_path, "run", bytes(32))
    with journal.write_lock():
        assert journal.drafts() == []
    run = tmp_path / "runs/run"
    assert sorted(path.name for path in run.iterdir()) == ["layout", "v", "writer.lock"]
    leftovers = [path for path in run.rglob("*") if path.name.endswith(".tmp")]
    assert leftovers == []
    assert len(journal.versions()) <= 6 + 4 + 1  # Retention(6), a way from an anchor, the origin
