"""What is started: OpenRLHF's own command line and environment, for a tiny job on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo import cpu_run

MODES = ("sync", "async")
PLATFORM = "sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_platform"
PROCESS_MODULES = "PROCESS_MODULES"
_START = "sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_start"

PROMPTS = 4  # of a step
COMPLETIONS = 4  # of a prompt
LONGEST = 88  # a prompt with its completion
LONGEST_COMPLETION = 24


@dataclass(frozen=True, slots=True)
class Job:
    """The flags of cpu.py. `flags` are OpenRLHF's, and win over ours."""

    mode: str
    steps: int
    zero_stage: int
    trainer_ranks: int
    engines: int
    tensor_parallel_size: int
    backend: str
    out: Path
    deadline_s: float
    flags: tuple[str, ...]

    framework = "openrlhf"

    def __post_init__(self) -> None:
        """Raise ConfigError that names the flag whose value makes no sense."""
        for name in ("steps", "trainer_ranks", "engines", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(self, name)}")
        if not self.deadline_s > 0:
            raise ConfigError(f"--deadline: expected a number of seconds, got {self.deadline_s:g}")

    def __str__(self) -> str:
        return f"{self.mode}, ZeRO-{self.zero_stage}, backend {self.backend}"

    @property
    def log(self) -> Path:
        """What all of OpenRLHF's processes say."""
        return self.out / "openrlhf.log"

    def command(self, temporary: Path) -> list[str]:
        """OpenRLHF's command line. Ray keeps its sockets in `temporary`, whose name must be short."""
        gpus = self.trainer_ranks + self.engines * self.tensor_parallel_size
        own = [*_task(self), *_trainer(self), *_engines(self)]
        return [sys.executable, "-m", _START, f"{temporary}/ray", str(gpus), *own, *self.flags]

    def environment(self, temporary: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """OpenRLHF's environment: the CPU platform in all processes, and what all frameworks are told."""
        modules = [PLATFORM, *filter(None, inherited.get(PROCESS_MODULES, "").split(","))]
        paths = [str(Path(__file__).with_name("site")), *filter(None, [inherited.get("PYTHONPATH")])]
        return {
            **cpu_run.environment(temporary, inherited),
            PROCESS_MODULES: ",".join(modules),
            "PYTHONPATH": os.pathsep.join(paths),
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_DATASETS_CACHE": str(temporary / "datasets"),
        }


def _task(job: Job) -> list[str]:
    return [
        f"--data.prompt_dataset={job.out}/prompts.jsonl",
        "--data.input_key=input",
        "--data.label_key=label",
        f"--data.max_samples={job.steps * PROMPTS}",
        f"--data.max_len={LONGEST}",
        f"--reward.remote_url={Path(__file__).with_name('reward.py')}",
        "--algo.advantage.estimator=group_norm",  # GRPO
        "--algo.kl.init_coef=0",
        f"--rollout.batch_size={PROMPTS}",
        f"--rollout.n_samples_per_prompt={COMPLETIONS}",
        f"--rollout.max_new_tokens={LONGEST_COMPLETION}",
        "--rollout.micro_batch_size=4",
    ]


def _trainer(job: Job) -> list[str]:
    return [
        f"--actor.model_name_or_path={job.out}/model",
        f"--actor.num_gpus_per_node={job.trainer_ranks}",
        "--actor.adam.lr=1e-5",
        "--actor.lr_scheduler=constant",
        "--actor.lr_warmup_ratio=0",
        f"--ds.zero_stage={job.zero_stage}",
        "--ds.param_dtype=bf16",
        "--ds.attn_implementation=sdpa",  # flash-attn needs a GPU
        f"--train.batch_size={PROMPTS * COMPLETIONS}",
        "--train.micro_batch_size=4",
        *(("--train.async_enable", "--train.partial_rollout_enable") if job.mode == "async" else ()),
        f"--ckpt.output_dir={job.out}/trained",
        f"--ckpt.path={job.out}/checkpoints",
        f"--logger.tensorboard_dir={job.out}/tensorboard",
    ]


def _engines(job: Job) -> list[str]:
    return [
        f"--vllm.sync_backend={job.backend}",
        f"--vllm.num_engines={job.engines}",
        f"--vllm.tensor_parallel_size={job.tensor_parallel_size}",
        "--vllm.enforce_eager",
        "--vllm.gpu_memory_utilization=0.1",  # of the machine's memory, on a CPU
    ]
