"""verl with the backend "sparrow" on a CPU, end to end: a real trainer, real vLLM engines, a tiny model.

python -m sparrowrl.examples.gsm8k_grpo.verl.cpu --mode fully_async --steps 10 -- [verl's own overrides]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sparrowrl.errors import ConfigError, DeadlineExceeded, EngineDied, SparrowError
from sparrowrl.examples.gsm8k_grpo.console import Console
from sparrowrl.examples.gsm8k_grpo.verl import cpu_job, data, tiny_model
from sparrowrl.examples.gsm8k_grpo.verl.cpu_job import PROGRAMS, Job
from sparrowrl.examples.gsm8k_grpo.verl.process_tree import ProcessTree
from sparrowrl.examples.gsm8k_grpo.verl.progress import Progress, header, last_words

# What a run writes into its folder, and the next run there deletes.
_MADE = {"model", "train.parquet", "test.parquet", "hydra", "metrics.jsonl", "verl.log", "checkpoints"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the exit status.

    0 if all steps were trained and all engines were proved exact, 1 if not, 2 for wrong settings, 130 if interrupted.
    """
    console = Console()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        job = _job(sys.argv[1:] if argv is None else list(argv))
        _check_environment()
        _clear(job.out)
        _prepare(job)
        run(job, console)
    except ConfigError as error:
        console.say(f"ConfigError: {error}")
        return 2
    except SparrowError as error:
        console.say(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(job: Job, console: Console) -> None:
    """Train, and tell `console` of each step. Whatever happens, no process is left behind.

    Raises EngineDied if verl ended before the last step or failed, DeadlineExceeded, ConfigError.
    """
    # Under /tmp, because Ray's sockets have long names and a socket's name at most 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="sparrowrl-", dir="/tmp"))
    tree, progress = None, Progress(job.metrics)
    try:
        environment = cpu_job.environment(job, temporary, os.environ)
        tree = ProcessTree(cpu_job.command(job, temporary), job.out, job.log, environment)
        console.say(f"verl     {job.mode}, backend {job.backend}; its log is {job.log}")
        for line in header():
            console.say(line)
        _follow(job, console, tree, progress)
    except SparrowError:
        for line in last_words(job.log) if tree is not None else []:
            console.say(line)
        raise
    finally:
        _end(tree, temporary)
    console.say(f"result   {progress.trained} steps trained; {job.metrics} has all metrics")


def _follow(job: Job, console: Console, tree: ProcessTree, progress: Progress) -> None:
    deadline = time.monotonic() + job.deadline_s
    ended = False
    while not ended:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"verl has not ended within {job.deadline_s:g} s; see --deadline and {job.log}")
        time.sleep(_POLL_S)
        ended = tree.status is not None
        for line in progress.news():
            console.say(line)
        console.progress(f"{progress.trained} of {job.steps} steps")
    if tree.status != 0 or progress.trained < job.steps or progress.wrong:
        raise EngineDied(
            f"verl: expected {job.steps} steps with exact engines, got {progress.trained}, {progress.wrong} of them "
            f"with others, and exit status {tree.status}"
        )


def _end(tree: ProcessTree | None, temporary: Path) -> None:
    """Nothing interrupts this."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if tree is not None:
        tree.end()
    shutil.rmtree(temporary, ignore_errors=True)


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


def _check_environment() -> None:
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("expected verl 0.9.1, got none; run `make .venv-frameworks/.installed`")
    try:
        vllm = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        vllm = "none"
    if "cpu" not in vllm:
        raise ConfigError(f"expected vLLM's CPU build, got {vllm}; on a GPU run the scripts beside this file")


def _prepare(job: Job) -> None:
    tiny_model.make(job.out / "model", seed=0)
    enough = job.steps * cpu_job.PROMPTS + 16 * cpu_job.PROMPTS  # some modes read ahead
    data.write(job.out / "train.parquet", data.sums(enough, seed=1), data.ARITHMETIC)
    data.write(job.out / "test.parquet", data.sums(cpu_job.PROMPTS, seed=2), data.ARITHMETIC)


def _clear(out: Path) -> None:
    """Make the folder of the run, without what an earlier run left. Raises ConfigError if it holds anything else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted({path.name for path in out.iterdir()} - _MADE)
        if foreign:
            raise ConfigError(
                f"--out {out}: expected a new folder or that of an earlier run, but it holds {foreign[0]}"
            )
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from error


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
