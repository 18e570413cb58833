"""Whole OpenRLHF jobs on this CPU (examples/gsm8k_grpo/openrlhf), and what openrlhf_recorder.py wrote of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load_file

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize

_TESTS = Path(__file__).parent
_DEADLINE_S = 600


@dataclass(frozen=True)
class Run:
    """One job that has ended."""

    folder: Path
    records: Path
    said: str

    @property
    def states(self) -> list[dict[str, Any]]:
        """One a sync: `version`, and `tensors`: the hash of each parameter as DeepSpeed gathers it."""
        return _lines(self.records / "trainer.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every completion, in an order that does not depend on when it ended."""
        return sorted(_lines(self.records / "samples.jsonl"), key=json.dumps)

    def reports(self, engine: int) -> list[dict[str, Any]]:
        """What an engine reported at each sync."""
        return _lines(self.records / f"engine-{engine}.jsonl")

    def activations(self, engine: int) -> list[dict[str, Any]]:
        """Every change of version of an engine."""
        return [each for report in self.reports(engine) for each in report["activations"]]

    def assert_exact(self, engines: int = 1, journal: Path | None = None) -> None:
        """Every sync made a version that is the trainer's weights, and every engine was proved to be at it."""
        journal = journal or self.folder / "journal"
        credentials = Credentials.load(journal / "credentials.json")
        opened = Journal(journal, credentials.run, credentials.run_key)
        weights = load_file(self.folder / "job" / "model" / "model.safetensors")
        versions = [state["version"] for state in self.states]
        assert versions == list(range(versions[0], versions[0] + len(versions)))
        for state in self.states:
            made = {name: _hash(weight) for name, weight in materialize(opened, state["version"], weights).items()}
            assert made == state["tensors"], f"version {state['version']}"
        for engine in range(engines):
            reports = [report for report in self.reports(engine) if report["condition"] == "exact"]
            assert [report["version"] for report in reports] == versions
            assert all(report["fingerprint_ok"] and report["audit_ok"] for report in reports)
            assert all(report["audited"] == report["version"] for report in reports)
            assert all(each["fingerprint_ok"] and each["aborted"] == 0 for each in self.activations(engine))


def run(
    folder: Path,
    *flags: str,
    backend: str = "sparrow",
    fails: bool = False,
    environment: dict[str, str] | None = None,
    journal: Path | None = None,
    records: str = "records",
    **settings: Any,
) -> Run:
    """Train; the job's own exit status says whether every step was trained, and `fails` that it must not be."""
    done = subprocess.run(
        command_of(folder, *flags, backend=backend, journal=journal, **settings),
        env=environment_of(folder / records, backend) | (environment or {}),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S + 60,
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, said[-6000:]
    return Run(folder, folder / records, said)


def start(
    folder: Path, *flags: str, environment: dict[str, str] | None = None, **settings: Any
) -> subprocess.Popen[bytes]:
    """A job in the background; what it says is in the file `said`."""
    folder.mkdir(exist_ok=True)
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command_of(folder, *flags, **settings),
            env=environment_of(folder / "records", "sparrow") | (environment or {}),
            stdout=said,
            stderr=said,
        )


def command_of(
    folder: Path, *flags: str, backend: str = "sparrow", journal: Path | None = None, **settings: Any
) -> list[str]:
    """The command line of a job in a folder."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    ours = [f"--sparrow.journal_dir={journal or folder / 'journal'}", "--sparrow.audit_every=1", "--sparrow.timeout=60"]
    return [
        *(sys.executable, "-m", "sparrowrl.examples.gsm8k_grpo.openrlhf.cpu", f"--backend={backend}"),
        *(f"--out={folder}/job", f"--deadline={_DEADLINE_S}", *given, "--"),
        *(ours if backend == "sparrow" else ()),
        *flags,
    ]


def environment_of(records: Path, backend: str) -> dict[str, str]:
    """With the recorder in all processes, and OpenRLHF's own way of a sync if that is the backend."""
    modules = [
        "openrlhf_recorder",
        "openrlhf_sleeping",
        *(["openrlhf_full_tensors"] if backend == "full_tensors" else []),
    ]
    records.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)]),
        "PROCESS_MODULES": ",".join(modules),
        "SPARROWRL_TEST_RECORDS": str(records),
        "SPARROWRL_TEST_SEEDS": "1",
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _hash(weight: torch.Tensor) -> str:
    return blake3(weight.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
