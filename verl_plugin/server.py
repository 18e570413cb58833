"""What verl's vLLM server gets in addition: its engine follows the trainer's hub when it is told to.

The functions become methods of verl's `vLLMHttpServer`, a Ray actor on the engine's node (hooks.py).
"""

from __future__ import annotations

import os
import socket
from typing import Any

from sparrowrl.job.replica import Replica, Report
from sparrowrl.verl_plugin import hooks, support


def prepare(original: Any, server: Any, engine_kwargs: dict[str, Any]) -> None:
    """Have the engine of a standalone server started with the weight-transfer backend, to be told later whom to follow.

    Raises FrameworkUnsupported.
    """
    from verl.workers.rollout.replica import RolloutMode

    original(server, engine_kwargs)
    checkpoint_engine = getattr(server.config, "checkpoint_engine", None)
    if getattr(checkpoint_engine, "backend", None) != hooks.BACKEND or server.rollout_mode != RolloutMode.STANDALONE:
        return
    hooks.check_usable()
    support.check_server(server.config, engine_kwargs, server.nnodes)
    engine_kwargs["weight_transfer_config"] = {"backend": hooks.BACKEND}
    engine_kwargs["enable_sleep_mode"] = False  # verl does not let standalone servers sleep, but for a sync of its own
    os.environ["SPARROWRL_HUB"] = "later"


async def host(server: Any) -> str:
    """Name of the server's machine."""
    return socket.gethostname()


async def follow(server: Any, settings: dict[str, Any]) -> str:
    """Have the engine follow a hub; returns its condition. Raises as Replica.follow."""
    server.sparrow = Replica(server.engine, f"replica-{server.replica_rank}")
    return str(await server.sparrow.follow(settings))


async def generate(original: Any, server: Any, *args: Any, **kwargs: Any) -> Any:
    """As verl's; a broken engine is told of, as Replica.serving does."""
    replica: Replica | None = getattr(server, "sparrow", None)
    answer = original(server, *args, **kwargs)
    return await (answer if replica is None else replica.serving(answer))


async def reach(
    server: Any, version: int, state: str, global_steps: int | None, seconds: float, has_anchor: bool
) -> Report:
    """Wait for a version as Replica.reach does, and tag the rollouts with `global_steps` from then on."""
    report: Report = await server.sparrow.reach(version, state, seconds, has_anchor)
    if report["condition"] == "exact":
        server.global_steps = global_steps
    return report
