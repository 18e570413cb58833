"""verl with the backend "sparrow" on a CPU, end to end: a real trainer, real vLLM engines, a tiny model.

python -m sparrowrl.examples.gsm8k_grpo.verl.cpu --mode fully_async --steps 10 -- [verl's own overrides]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparrowrl.examples.gsm8k_grpo import cpu_run, tiny_model
from sparrowrl.examples.gsm8k_grpo.console import Console
from sparrowrl.examples.gsm8k_grpo.tasks import sums
from sparrowrl.examples.gsm8k_grpo.verl import cpu_job, data
from sparrowrl.examples.gsm8k_grpo.verl.cpu_job import PROGRAMS, Job
from sparrowrl.examples.gsm8k_grpo.verl.progress import Progress

# What a run writes into its folder, and the next run there deletes.
_MADE = {"model", "train.parquet", "test.parquet", "hydra", "metrics.jsonl", "verl.log", "checkpoints"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the exit status (cpu_run.status_of)."""

    def work(console: Console) -> None:
        job = _job(sys.argv[1:] if argv is None else list(argv))
        cpu_run.check_environment("verl", "0.9.1")
        cpu_run.clear(job.out, _MADE)
        _prepare(job)
        cpu_run.run(job, Progress(job.metrics), console)

    return cpu_run.status_of(work)


def _job(argv: list[str]) -> Job:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description="Train a tiny model with verl on a CPU; engines follow by SparrowRL.")
    add = parser.add_argument
    add("--mode", choices=PROGRAMS, default="one_step_off", help="which of verl's trainers (default: %(default)s)")
    add("--steps", type=int, default=6, metavar="N", help="training steps (default: %(default)s)")
    add("--trainer-ranks", type=int, default=2, metavar="N", help="FSDP2 ranks (default: %(default)s)")
    add("--replicas", type=int, default=1, metavar="N", help="vLLM engines (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="of each engine (default: %(default)s)")
    add("--backend", default="sparrow", help="verl's checkpoint-engine backend (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/verl"), metavar="DIR", help="model, data, logs (default: %(default)s)")
    add("--deadline", type=float, default=900, metavar="S", help="seconds until all ends (default: %(default)s)")
    parser.epilog = "What follows -- is given to verl: actor_rollout_ref.actor.optim.lr=1e-6"
    arguments = parser.parse_args(argv[:split])
    return Job(
        mode=arguments.mode,
        steps=arguments.steps,
        trainer_ranks=arguments.trainer_ranks,
        replicas=arguments.replicas,
        tensor_parallel_size=arguments.tensor_parallel_size,
        backend=arguments.backend,
        out=arguments.out.resolve(),
        deadline_s=arguments.deadline,
        overrides=tuple(argv[split + 1 :]),
    )


def _prepare(job: Job) -> None:
    tiny_model.make(job.out / "model", seed=0)
    enough = job.steps * cpu_job.PROMPTS + 16 * cpu_job.PROMPTS  # some modes read ahead
    data.write(job.out / "train.parquet", sums(enough, seed=1), data.ARITHMETIC)
    data.write(job.out / "test.parquet", sums(cpu_job.PROMPTS, seed=2), data.ARITHMETIC)


if __name__ == "__main__":
    sys.exit(main())
