"""A small journal on disk, and a way to run the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparrowrl.cli.main import main
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.sink import JournalSink


@dataclass
class Published:
    """A journal with versions 0 to 3, an anchor at 2 and the checkpoints of all versions."""

    root: Path
    key: Path
    journal: Journal
    checkpoints: list[Path]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    credentials = Credentials.new("run")
    credentials.save(tmp_path / "key.json")
    rng = torch.Generator().manual_seed(0)
    weights = {"a.weight": torch.randn(40, 30, generator=rng), "b": torch.arange(5), "scalar": torch.tensor(1.5)}
    sink = JournalSink(tmp_path / "journal", credentials)
    checkpoints = []

    def save() -> None:
        path = tmp_path / f"v{len(checkpoints)}.safetensors"
        save_file({n: t.bfloat16() if t.is_floating_point() else t.clone() for n, t in weights.items()}, path)
        checkpoints.append(path)

    save()
    publisher = Publisher(sink, weights.items(), anchor_every=2)
    for _ in range(3):
        weights["a.weight"] += (torch.rand(40, 30, generator=rng) < 0.1) * 0.5
        publisher.publish(weights.items())
        save()
    sink.close()
    return Published(tmp_path / "journal", tmp_path / "key.json", sink.journal, checkpoints)


@dataclass
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def sparrowrl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `sparrowrl ARGUMENTS` here; returns its status and output."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as left:
            status = int(left.code or 0)
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run
