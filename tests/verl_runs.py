"""Whole verl jobs on this CPU (examples/gsm8k_grpo/verl/cpu.py), and what verl_recorder.py wrote down of them."""

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
_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
_DEADLINE_S = 600
# Completions that last longer than a training step of the tiny model, so that syncs find requests in flight.
LONG_COMPLETIONS = (
    "data.max_response_length=384",
    "actor_rollout_ref.rollout.max_model_len=448",
    "actor_rollout_ref.rollout.ignore_eos=True",
)


@dataclass(frozen=True)
class Run:
    """One job that has ended well."""

    folder: Path
    steps: int

    @property
    def states(self) -> list[dict[str, Any]]:
        """One a sync: `global_steps`, and `tensors`: the hash of each tensor as verl's own export gathers it."""
        return _lines(self.folder / "records" / "trainer.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every completion, in an order that does not depend on when it ended."""
        return sorted(_lines(self.folder / "records" / "samples.jsonl"), key=json.dumps)

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """What verl logged, by its step."""
        logged: dict[int, dict[str, Any]] = {}
        for line in _lines(self.folder / "job" / "metrics.jsonl"):
            logged.setdefault(line["step"], {}).update(line["data"])
        return logged

    def reports(self, replica: int) -> list[dict[str, Any]]:
        """What a replica's server reported at each sync."""
        return _lines(self.folder / "records" / f"replica-{replica}.jsonl")

    def activations(self, replica: int) -> list[dict[str, Any]]:
        """Every change of version of a replica's engine."""
        return [each for report in self.reports(replica) for each in report["activations"]]

    def assert_exact(self, replicas: int = 1) -> None:
        """Every sync made a version that is the trainer's weights, and every engine was proved to be at it."""
        syncs = len(self.states)
        assert syncs >= self.steps
        credentials = Credentials.load(self.folder / "journal" / "credentials.json")
        journal = Journal(self.folder / "journal", credentials.run, credentials.run_key)
        base = load_file(self.folder / "job" / "model" / "model.safetensors")
        for version, state in enumerate(self.states):
            hashes = {name: _hash(weight) for name, weight in materialize(journal, version, base).items()}
            expected = dict(state["tensors"])
            assert expected.pop("lm_head.weight") == expected["model.embed_tokens.weight"]  # tied: sent once
            assert hashes == expected, f"version {version}"
        for replica in range(replicas):
            reports = self.reports(replica)
            assert [report["version"] for report in reports] == list(range(syncs))
            assert all(report["condition"] == "exact" and report["fingerprint_ok"] for report in reports)
            assert all(report["audit_ok"] and report["audited"] >= report["version"] - 1 for report in reports)
            activations = self.activations(replica)
            assert [each["version"] for each in activations] == list(range(1, syncs))
            assert all(each["fingerprint_ok"] and each["aborted"] == 0 for each in activations)


def run(
    folder: Path, mode: str, *overrides: str, steps: int = 6, backend: str = "sparrow", ranks: int = 2, **flags: int
) -> Run:
    """Train; the job's own exit status says whether every step was trained."""
    records = folder / "records"
    records.mkdir(parents=True)
    modules, options = ["verl_recorder"], [f"+{_ENGINE}.engine_kwargs.sparrow.audit_every=1"]
    options.append(f"+{_ENGINE}.engine_kwargs.sparrow.journal_dir={folder}/journal")
    if backend != "sparrow":
        modules.append("verl_full_tensors")
        options = [f"{_ENGINE}.custom_backend_module=verl_full_tensors"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "SPARROWRL_TEST_RECORDS": str(records),
        "SPARROWRL_TEST_SEEDS": "1",
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [
        *(sys.executable, "-m", "sparrowrl.examples.gsm8k_grpo.verl.cpu", f"--mode={mode}", f"--steps={steps}"),
        *(f"--backend={backend}", f"--trainer-ranks={ranks}", f"--out={folder}/job", f"--deadline={_DEADLINE_S}"),
        *(*given, "--", *options, *overrides),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S + 60)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return Run(folder, steps)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _hash(weight: torch.Tensor) -> str:
    return blake3(weight.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
