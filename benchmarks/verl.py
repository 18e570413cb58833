"""How long verl waits for a sync, and what it costs the requests that run: SparrowRL, and verl's own way.

Runs the tiny job of examples/gsm8k_grpo/verl on a CPU with both backends and appends a row a run to a CSV file. verl's
own way is its stock manager with full tensors (tests/verl_full_tensors.py: abort, free, gather, reload, resume; only
the wire is ours, as NCCL needs GPUs). The model is tiny, so these are the costs beside the transfer, at their least.
`update_ms` is verl's own timing of a sync; the first sync, which connects, and the first step's are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, append, context

MODES = {"one_step_off": "timing_s/update_weights", "fully_async": "timing_s/timing_s/param_sync"}
BACKENDS = ("sparrow", "full_tensors")
LONG = ["data.max_response_length=384", "actor_rollout_ref.rollout.max_model_len=448", "rollout.n=4"]
LONG += ["actor_rollout_ref.rollout.ignore_eos=True", "async_training.staleness_threshold=3"]


def main() -> None:
    """Run, then append. Stops if a run did not succeed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path, default=RESULTS / "verl.csv")
    args = parser.parse_args()
    about = context("torch", "verl", "vllm", "ray")
    rows = [{**measure(mode, backend, args.steps), **about} for mode in MODES for backend in BACKENDS]
    append(args.csv, rows)


def measure(mode: str, backend: str, steps: int) -> dict[str, Any]:
    """One run: medians (and the least and the most) over its syncs."""
    with tempfile.TemporaryDirectory() as folder:
        train(mode, backend, steps, Path(folder))
        logged: dict[int, dict[str, float]] = {}
        for line in (Path(folder) / "job" / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            logged.setdefault(entry["step"], {}).update(entry["data"])
        samples = [json.loads(line) for line in (Path(folder) / "samples.jsonl").read_text().splitlines()]
    syncs = [data for step, data in sorted(logged.items()) if step > 1 and MODES[mode] in data]
    update = [1000 * data[MODES[mode]] for data in syncs]
    row: dict[str, Any] = {"mode": mode, "backend": backend, "syncs": len(syncs)}
    row |= {"update_ms": statistics.median(update), "update_ms_min": min(update), "update_ms_max": max(update)}
    for name in ("payload_bytes", "density", "pause_ms", "requests_in_flight", "tokens_during_transfer"):
        values = [data[f"sparrow/{name}"] for data in syncs if f"sparrow/{name}" in data]
        row[name] = statistics.median(values) if values else ""
    return {**row, "completions": len(samples), "aborted": sum(each["stop"] == "aborted" for each in samples)}


def train(mode: str, backend: str, steps: int, folder: Path) -> None:
    """Run the job of the example."""
    modules, given = ["verl_recorder"], list(LONG) if mode == "fully_async" else []
    if backend == "full_tensors":
        modules.append("verl_full_tensors")
        given.append("actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_full_tensors")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "SPARROWRL_TEST_RECORDS": str(folder),
    }
    command = [
        *(sys.executable, "-m", "sparrowrl.examples.gsm8k_grpo.verl.cpu", "--mode", mode, "--backend", backend),
        *("--steps", str(steps), "--out", str(folder / "job"), "--", *given),
    ]
    subprocess.run(command, env=environment, check=True, timeout=1200)


if __name__ == "__main__":
    main()
