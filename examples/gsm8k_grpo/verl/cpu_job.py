"""What is started: verl's own command line and environment, for a tiny job on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo import cpu_run

PROGRAMS = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
    "separate_async": "verl.trainer.main_ppo",
}
PLATFORM = "sparrowrl.examples.gsm8k_grpo.verl.cpu_platform"
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"

PROMPTS = 4  # of a step
COMPLETIONS = 4  # of a prompt
LONGEST_PROMPT = 64
LONGEST_COMPLETION = 24


@dataclass(frozen=True, slots=True)
class Job:
    """The flags of cpu.py. `overrides` are verl's, in hydra's form, and win over ours."""

    mode: str
    steps: int
    trainer_ranks: int
    replicas: int
    tensor_parallel_size: int
    backend: str
    out: Path
    deadline_s: float
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError that names the flag whose value makes no sense."""
        for name in ("steps", "trainer_ranks", "replicas", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(self, name)}")
        if not self.deadline_s > 0:
            raise ConfigError(f"--deadline: expected a number of seconds, got {self.deadline_s:g}")

    framework = "verl"

    def __str__(self) -> str:
        return f"{self.mode}, backend {self.backend}"

    @property
    def metrics(self) -> Path:
        """Where verl writes its metrics, a JSON object a line."""
        return self.out / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What all of verl's processes say."""
        return self.out / "verl.log"

    @property
    def engine_devices(self) -> int:
        """As many made-up GPUs do the engines need."""
        return self.replicas * self.tensor_parallel_size

    def command(self, temporary: Path) -> list[str]:
        """verl's command line. Ray keeps its sockets in `temporary`, whose name must be short."""
        own = [*_common(self), *_of_mode(self), *_private_ray(self, temporary)]
        return [sys.executable, "-m", PROGRAMS[self.mode], *own, *self.overrides]

    def environment(self, temporary: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """verl's environment: the CPU platform, and what all frameworks are told."""
        modules = [PLATFORM, *filter(None, inherited.get(EXTERNAL_MODULES, "").split(","))]
        return {
            **cpu_run.environment(temporary, inherited),
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            EXTERNAL_MODULES: ",".join(modules),
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # verl has its FSDP engine registered for GPUs only; a CPU runs it as it is
            # verl 0.9.1 fails on a line that v1's separate_async logs at INFO (`flush=True`).
            "VERL_LOGGING_LEVEL": "WARNING",
            "HYDRA_FULL_ERROR": "1",
        }


def _common(job: Job) -> list[str]:
    reward = Path(__file__).with_name("reward.py")
    rollout, engine = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.checkpoint_engine"
    return [
        "hydra.run.dir=hydra",
        "hydra.searchpath=[pkg://verl.trainer.config]",
        # What SparrowRL is about.
        f"{engine}.backend={job.backend}",
        *([f"{engine}.custom_backend_module=sparrowrl.verl_plugin"] if job.backend == "sparrow" else []),
        f"{rollout}.load_format=auto",  # engines load version 0, and need nothing sent at the start
        # The task.
        f"data.train_files={job.out}/train.parquet",
        f"data.val_files={job.out}/test.parquet",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={LONGEST_COMPLETION}",
        "data.dataloader_num_workers=0",
        "data.filter_overlong_prompts=False",
        "data.seed=1",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        # The trainer.
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.hybrid_engine=False",
        f"actor_rollout_ref.model.path={job.out}/model",
        "actor_rollout_ref.model.use_remove_padding=False",  # needs flash-attn
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        f"trainer.n_gpus_per_node={job.trainer_ranks}",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={job.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        # The engines.
        f"{rollout}.name=vllm",
        f"{rollout}.n={COMPLETIONS}",
        f"{rollout}.tensor_model_parallel_size={job.tensor_parallel_size}",
        f"{rollout}.enforce_eager=True",
        f"+{rollout}.enable_sleep_mode=False",  # CUDA's
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.max_model_len={LONGEST_PROMPT + LONGEST_COMPLETION}",
        f"{rollout}.max_num_seqs={PROMPTS * COMPLETIONS}",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"{engine}.update_weights_bucket_megabytes=16",
    ]


def _of_mode(job: Job) -> list[str]:
    beside = ["rollout.nnodes=1", f"rollout.n_gpus_per_node={job.engine_devices}"]
    if job.mode == "one_step_off":
        return beside
    if job.mode == "fully_async":
        return [
            *beside,
            f"rollout.n={COMPLETIONS}",
            f"rollout.total_rollout_steps={job.steps * PROMPTS}",
            "data.train_batch_size=0",
            "data.gen_batch_size=1",
            "data.return_raw_chat=True",
            "async_training.staleness_threshold=0.5",
            "async_training.trigger_parameter_sync_step=1",
            "async_training.require_batches=1",
            "async_training.partial_rollout=True",
        ]
    return [
        *(f"actor_rollout_ref.{key}" for key in beside),
        "trainer.use_v1=True",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
    ]


def _private_ray(job: Job, temporary: Path) -> list[str]:
    ray = "ray_kwargs.ray_init"
    return [
        f"+{ray}.address=local",  # not a cluster that happens to run here
        f"+{ray}._temp_dir={temporary}/ray",
        f"+{ray}.include_dashboard=False",
        f"{ray}.num_cpus=64",  # what verl's processes ask for, though they share the cores that there are
        f"+{ray}.num_gpus={job.trainer_ranks + job.engine_devices}",
    ]
