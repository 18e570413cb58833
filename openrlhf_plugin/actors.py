"""OpenRLHF's Ray actors with our sync in them, put in the places where its command line looks for them.

Ray pickles a decorated class by value, so a name that is changed in a module changes nothing in other processes, nor in
methods that are inherited. These classes are ordinary ones, which every process imports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import ppo_actor, vllm_engine
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from sparrowrl.errors import EngineDied
from sparrowrl.job.replica import Replica, Report
from sparrowrl.openrlhf_plugin.flags import BACKEND

Metrics = dict[str, float]


def install() -> None:
    """Have OpenRLHF's command line, in this process, start our actors instead of its own."""
    vllm_engine.RolloutRayActor = ray.remote(SparrowRolloutActor)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(SparrowPolicyActor)
    ppo_trainer.PPOTrainer = ray.remote(SparrowPPOTrainer)
    ppo_trainer_async.TrainingActor = ray.remote(SparrowTrainingActor)


def _undecorated(actor: Any) -> Any:
    """The class that OpenRLHF wrote, of a Ray actor class, from which Ray forbids to inherit."""
    modified = actor.__ray_metadata__.modified_class
    return getattr(modified, "__ray_actor_class__", modified)


class SparrowRolloutActor(_undecorated(vllm_engine.RolloutRayActor)):  # type: ignore[misc]
    """The owner of one engine, which follows the trainer's hub once it is told to."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        """Start the engine. It makes no step before it follows."""
        os.environ["SPARROWRL_HUB"] = "later"
        del kwargs["worker_extension_cls"]  # with which OpenRLHF's engines receive weights
        kwargs["weight_transfer_config"] = {"backend": BACKEND}
        await super().__init__(*args, **kwargs)
        self._replica: Replica | None = None

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As OpenRLHF's. Raises EngineDied and FingerprintMismatch that name the engine."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._replica is None:
            return await super().generate(*args, **kwargs)
        try:
            return await self._replica.serving(super().generate(*args, **kwargs))
        except EngineDeadError as error:
            raise EngineDied(f"{self._replica.name}: its engine died while it served a request") from error

    async def sparrow_host(self) -> str:
        """Name of the engine's machine."""
        return socket.gethostname()

    async def sparrow_follow(self, name: str, settings: Mapping[str, Any]) -> str:
        """Have the engine follow a hub; returns its condition. Raises as Replica.follow."""
        self._replica = Replica(self.llm, name)
        return await self._replica.follow(settings)

    async def sparrow_reach(self, version: int, state: str, seconds: float, has_anchor: bool) -> Report:
        """Wait for a version. Raises as Replica.reach."""
        assert self._replica is not None
        return await self._replica.reach(version, state, seconds, has_anchor)


class SparrowPolicyActor(_undecorated(ppo_actor.PolicyModelActor)):  # type: ignore[misc]
    """A rank of the trainer."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """OpenRLHF looks the trainer's class up in its module, which is this process's own."""
        from sparrowrl.openrlhf_plugin.trainer import SparrowActorPPOTrainer

        ppo_actor.ActorPPOTrainer = SparrowActorPPOTrainer
        super().init_model_from_pretrained(*args, **kwargs)

    def broadcast_to_vllm(self) -> Metrics:
        """Sync; on rank 0, its metrics."""
        metrics: Metrics = self.trainer.broadcast_to_vllm()
        return metrics

    def save_model(self) -> None:
        """The last that OpenRLHF calls: after it Ray kills this process, and whatever it has started."""
        super().save_model()
        self.trainer.leave_run()


class _Synced:
    """What both of OpenRLHF's controllers do about a sync: they call all ranks, and log what it came to."""

    args: Any
    vllm_engines: Any
    actor_model_group: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As OpenRLHF's, which must not be inherited: Ray would copy it, and its `super()` then names another class."""
        super().__init__(*args, **kwargs)
        self._sync_metrics: Metrics = {}

    def broadcast_to_vllm(self) -> None:
        """Have all ranks sync. Raises what they raise."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        self._sync_metrics = ray.get(self.actor_model_group.async_run_method(method_name="broadcast_to_vllm"))[0]

    def train_step(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], int]:
        """OpenRLHF's, whose status goes to its loggers."""
        status, global_step = super().train_step(*args, **kwargs)  # type: ignore[misc]
        return {**status, **self._sync_metrics}, global_step


class SparrowPPOTrainer(_Synced, _undecorated(ppo_trainer.PPOTrainer)):  # type: ignore[misc]
    """The controller of a synchronous job."""


class SparrowTrainingActor(_Synced, _undecorated(ppo_trainer_async.TrainingActor)):  # type: ignore[misc]
    """The controller of an asynchronous job."""

    def broadcast_to_vllm(self) -> None:
        """Sync while nobody else holds the engines: without partial rollout that is every generation, and an
        evaluation always. With partial rollout OpenRLHF pauses the engines for its sync; ours needs no pause.
        """
        ray.get(self.vllm_lock.acquire.remote())
        try:
            super().broadcast_to_vllm()
        finally:
            ray.get(self.vllm_lock.release.remote())
