"""A trainer of two real FSDP2 ranks under Ray, and managers for it, as verl's own trainers make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorkerConfig
from verl_ranks import TrainerRank

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize

_TESTS = Path(__file__).parent
_RANKS = 2


def start_ray(folder: Path) -> None:
    """A Ray of our own, whose processes take the CPU for verl's accelerator."""
    environment = {
        "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}",
        "VERL_USE_EXTERNAL_MODULES": "sparrowrl.examples.gsm8k_grpo.verl.cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ray.init(
        address="local",
        num_cpus=64,
        num_gpus=8,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
        _temp_dir=str(folder),
    )


def model_config(model: Path) -> HFModelConfig:
    """verl's configuration of the model in this folder."""
    return HFModelConfig(path=str(model), use_remove_padding=False, override_config={"attn_implementation": "sdpa"})


class Job:
    """A trainer with its journal."""

    def __init__(self, model: Path, journal: Path, **options: Any) -> None:
        self.options = {"journal_dir": str(journal), "timeout": 60, **options}
        self.journal, self.model = journal, model
        training = TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config(model),
            engine_config=FSDPEngineConfig(strategy="fsdp2", fsdp_size=_RANKS, use_torch_compile=False),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        )
        pool = RayResourcePool(process_on_nodes=[_RANKS], max_colocate_count=3)
        made = RayClassWithInitArgs(cls=ray.remote(TrainerRank), config=training, options=self.options)
        self.trainer = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
        self.trainer.reset()
        self._pool = pool
        self._base = self.full()  # what becomes version 0

    def checkpoint_engine(self, **options: Any) -> CheckpointEngineConfig:
        """verl's configuration of the backend."""
        return CheckpointEngineConfig(backend="sparrow", engine_kwargs={"sparrow": {**self.options, **options}})

    def manager(self, *replicas: Any, **options: Any) -> Any:
        """What verl's trainers make."""
        return CheckpointEngineManager(
            config=self.checkpoint_engine(**options), actor_wg=self.trainer, replicas=list(replicas)
        )

    def full(self) -> dict[str, torch.Tensor]:
        """All weights as verl's own export has them, in bfloat16; the model's head is its embedding, told once."""
        weights: dict[str, torch.Tensor] = self.trainer.full()[0]
        assert weights.pop("lm_head.weight").equal(weights["model.embed_tokens.weight"])
        return weights

    def stored(self) -> Journal:
        """The journal that the trainer writes."""
        credentials = Credentials.load(self.journal / "credentials.json")
        return Journal(self.journal, credentials.run, credentials.run_key)

    def published(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of a version, made from those of version 0 and deltas (or from an anchor, if that is nearer)."""
        return materialize(self.stored(), version, self._base)

    def published_from_anchor(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of a version, for which some anchor must do."""
        return materialize(self.stored(), version)

    def end(self) -> None:
        """Kill the trainer, and give Ray back what it had."""
        for worker in self.trainer.workers:
            ray.kill(worker)
        for group in self._pool.pgs or []:
            ray.util.remove_placement_group(group)
