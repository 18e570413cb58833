"""OpenRLHF with the sync backend "sparrow" on a CPU, end to end: a real trainer, real vLLM engines, a tiny model.

python -m sparrowrl.examples.gsm8k_grpo.openrlhf.cpu --mode async --steps 10 -- [OpenRLHF's own flags]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparrowrl.examples.gsm8k_grpo import cpu_run, tiny_model
from sparrowrl.examples.gsm8k_grpo.console import Console
from sparrowrl.examples.gsm8k_grpo.openrlhf import data
from sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_job import MODES, PROMPTS, Job
from sparrowrl.examples.gsm8k_grpo.openrlhf.progress import Progress
from sparrowrl.examples.gsm8k_grpo.tasks import sums

# What a run writes into its folder, and the next run there deletes (but for checkpoints, when it is to load one).
_MADE = {"model", "prompts.jsonl", "openrlhf.log", "trained", "tensorboard", "checkpoints"}
_RESUME = "--ckpt.load_enable"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the exit status (cpu_run.status_of)."""

    def work(console: Console) -> None:
        job = _job(sys.argv[1:] if argv is None else list(argv))
        cpu_run.check_environment("openrlhf", "0.11.2")
        if _RESUME not in job.flags:
            cpu_run.clear(job.out, _MADE)
            tiny_model.make(job.out / "model", seed=0)
        data.write_texts(job.out / "prompts.jsonl", sums(job.steps * PROMPTS, seed=1))
        cpu_run.run(job, Progress(job.log, must_be_proved=job.backend == "sparrow"), console)

    return cpu_run.status_of(work)


def _job(argv: list[str]) -> Job:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description="Train a tiny model with OpenRLHF on a CPU; engines follow by SparrowRL."
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="sync", help="async: with partial rollout (default: %(default)s)")
    add("--steps", type=int, default=6, metavar="N", help="training steps in all (default: %(default)s)")
    add("--zero-stage", type=int, choices=(1, 2, 3), default=2, help="DeepSpeed's (default: %(default)s)")
    add("--trainer-ranks", type=int, default=1, metavar="N", help="DeepSpeed ranks (default: %(default)s)")
    add("--engines", type=int, default=1, metavar="N", help="vLLM engines (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="of each engine (default: %(default)s)")
    add("--backend", default="sparrow", help="OpenRLHF's sync backend (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/openrlhf"), metavar="DIR", help="all files (default: %(default)s)")
    add("--deadline", type=float, default=900, metavar="S", help="seconds until all ends (default: %(default)s)")
    parser.epilog = (
        f"What follows -- is given to OpenRLHF: --actor.adam.lr 1e-6. With {_RESUME} an earlier run goes on."
    )
    arguments = parser.parse_args(argv[:split])
    return Job(
        mode=arguments.mode,
        steps=arguments.steps,
        zero_stage=arguments.zero_stage,
        trainer_ranks=arguments.trainer_ranks,
        engines=arguments.engines,
        tensor_parallel_size=arguments.tensor_parallel_size,
        backend=arguments.backend,
        out=arguments.out.resolve(),
        deadline_s=arguments.deadline,
        flags=tuple(argv[split + 1 :]),
    )


if __name__ == "__main__":
    sys.exit(main())
