"""How long OpenRLHF waits for a sync, and for how long engines make no step for it: SparrowRL, and OpenRLHF's own way.

Runs the tiny job of examples/gsm8k_grpo/openrlhf on a CPU with both backends and appends a row a run to a CSV file.
OpenRLHF's own way is its code with full tensors (tests/openrlhf_full_tensors.py: pause, gather, a Ray call and a
broadcast for each parameter, load, resume; only the wire is another, gloo, as NCCL needs GPUs). The model is tiny, so
these are the costs beside the transfer, at their least. `broadcast_ms` is OpenRLHF's own timing of a sync; the first
step's is left out. `paused_ms` is how long engines made no step: ours measure it, OpenRLHF's partial rollout pauses
them for all of its sync, and without it nothing runs at a sync.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, append, context

LONG = ["--rollout.max_new_tokens=300", "--data.max_len=364", "--train.async_queue_size=2"]
MODES: dict[str, list[str]] = {
    "sync": ["--mode=sync", "--zero-stage=2"],
    "async": ["--mode=async", "--zero-stage=3", "--trainer-ranks=2", "--engines=2"],
}
BACKENDS = ("sparrow", "full_tensors")


def main() -> None:
    """Run, then append. Stops if a run did not succeed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path, default=RESULTS / "openrlhf.csv")
    args = parser.parse_args()
    about = context("torch", "openrlhf", "deepspeed", "vllm", "ray")
    rows = [{**measure(mode, backend, args.steps), **about} for mode in MODES for backend in BACKENDS]
    append(args.csv, rows)


def measure(mode: str, backend: str, steps: int) -> dict[str, Any]:
    """One run: medians (and the least and the most) over its syncs."""
    with tempfile.TemporaryDirectory() as folder:
        train(mode, backend, steps, Path(folder))
        logged = read(Path(folder) / "tensorboard")
    broadcast = [1000 * value for value in logged["timing/broadcast"][1:]]
    paused = logged.get("sparrow/pause_ms", broadcast if mode == "async" else [0.0])
    row: dict[str, Any] = {"mode": mode, "backend": backend, "syncs": len(broadcast)}
    row |= {
        "broadcast_ms": statistics.median(broadcast),
        "broadcast_ms_min": min(broadcast),
        "broadcast_ms_max": max(broadcast),
        "paused_ms": statistics.median(paused),
        "paused_ms_max": max(paused),
    }
    for name in ("payload_bytes", "density", "requests_in_flight", "tokens_during_transfer", "requests_aborted"):
        values = logged.get(f"sparrow/{name}", [])
        row[name] = statistics.median(values) if values else ""
    return row


def train(mode: str, backend: str, steps: int, out: Path) -> None:
    """Run the job of the example."""
    modules = {"sparrow": "", "full_tensors": "openrlhf_full_tensors"}[backend]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PROCESS_MODULES": modules}
    command = [
        *(sys.executable, "-m", "sparrowrl.examples.gsm8k_grpo.openrlhf.cpu", *MODES[mode], f"--backend={backend}"),
        *(f"--steps={steps}", f"--out={out}", "--", *(LONG if mode == "async" else [])),
    ]
    subprocess.run(command, env=environment, check=True, timeout=1200)


def read(folder: Path) -> dict[str, list[float]]:
    """What OpenRLHF has told TensorBoard in a run, by name, a number a step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag.startswith("train/")]
    return {tag.removeprefix("train/"): [event.value for event in accumulator.Scalars(tag)] for tag in tags}


if __name__ == "__main__":
    main()
