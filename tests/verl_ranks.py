"""Ray actors for tests of verl's manager: real trainer ranks, and stand-ins for engines, which need no vLLM."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout import RolloutReplica

from sparrowrl.config import Credentials
from sparrowrl.errors import DeadlineExceeded
from sparrowrl.transport.http import error_of
from sparrowrl.verl_plugin.backend import SparrowCheckpointEngine, TrainerWeights


class TrainerRank(TrainingWorker):  # type: ignore[misc]
    """A rank of verl's real FSDP engine, with what verl's ActorRolloutRefWorker adds for checkpoint engines."""

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__(config)
        self.checkpoint_engine = SparrowCheckpointEngine(
            bucket_size=1, is_master=torch.distributed.get_rank() == 0, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def perturb(self, share: float, seed: int) -> None:
        """Change about this share of the weights."""
        generator = torch.Generator().manual_seed(seed + 1000 * torch.distributed.get_rank())
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                local = parameter.to_local()
                local.add_((torch.rand(local.shape, generator=generator) < share) * 0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        """What our patch makes of verl's method of this name."""
        weights = TrainerWeights(self.engine, "bfloat16")
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def full(self) -> dict[str, torch.Tensor]:
        """All weights as verl's own export sees them, in bfloat16."""
        return {name: weight.to(torch.bfloat16).clone() for name, weight in self.engine.get_per_tensor_param()[0]}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As verl's."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def die(self) -> None:
        """As kill -9."""
        os.kill(os.getpid(), 9)


@ray.remote(max_concurrency=100)
class EngineStandIn:
    """What the manager sees of an engine's server: it follows the hub's newest version, but applies nothing."""

    def __init__(self, condition: str = "exact", stuck_at: int | None = None) -> None:
        self._condition, self._stuck_at = condition, stuck_at
        self._settings: dict[str, Any] = {}
        self.global_steps: int | None = None

    async def sparrow_host(self) -> str:
        return socket.gethostname()

    async def sparrow_follow(self, settings: dict[str, Any]) -> str:
        self._settings = settings
        return self._condition

    async def sparrow_reach(
        self, version: int, state: str, global_steps: int | None, seconds: float, has_anchor: bool
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while self._stuck_at == version or (newest := await self._newest()) is None or newest < version:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"expected version {version}")
            await asyncio.sleep(0.01)
        if self._condition == "unknown" and not has_anchor:
            return _report(None, "unknown")
        self.global_steps = global_steps
        self._condition = "exact"
        return _report(version, "exact")

    def told(self) -> tuple[dict[str, Any], int | None]:
        return self._settings, self.global_steps

    async def _newest(self) -> int | None:
        from aiohttp import ClientSession

        credentials = Credentials(**self._settings["credentials"] | {"run_key": b""})
        headers = {"Authorization": f"Bearer {credentials.reader}"}
        async with (
            ClientSession(headers=headers) as session,
            session.get(f"{self._settings['hub']}/runs/{credentials.run}/head") as answer,
        ):
            body = await answer.read()
            if answer.status != 200:
                raise error_of(answer.status, body, "head")
            version = (await answer.json()).get("version")
            return None if version is None else int(version)


def _report(version: int | None, condition: str) -> dict[str, Any]:
    return {
        "version": version,
        "condition": condition,
        "fingerprint_ok": True,
        "audited": 0,
        "audit_ok": True,
        "activations": [],
        "fetched_bytes": 0,
    }


class StandInReplica(RolloutReplica):  # type: ignore[misc]
    """A replica whose server is a stand-in."""

    def __init__(self, **engine: Any) -> None:
        self.servers = [EngineStandIn.remote(**engine)]  # type: ignore[attr-defined]
        self.workers = []

    async def launch_servers(self) -> None:
        """Nothing to launch."""
