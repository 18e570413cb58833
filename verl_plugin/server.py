"""What verl's vLLM server gets in addition: its engine follows the trainer's hub when it is told to.

The functions become methods of verl's `vLLMHttpServer`, a Ray actor on the engine's node (hooks.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import time
from typing import Any, TypedDict

from sparrowrl import errors
from sparrowrl.errors import DeadlineExceeded, EngineDied, SparrowError
from sparrowrl.transport.node import AgentStatus, EngineStatus, NodeDirectory
from sparrowrl.verl_plugin import hooks, support

_POLL_S = 0.01

logger = logging.getLogger(__name__)


class Report(TypedDict):
    """What a server says of its engine: `activations` are those since the last report (docs/protocol.md section 4)."""

    version: int | None
    condition: str
    fingerprint_ok: bool | None
    audited: int | None
    audit_ok: bool | None
    activations: list[dict[str, Any]]
    fetched_bytes: int


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
    """Have the engine follow a hub (settings as of `sparrow_follow`, docs/protocol.md section 5), from version 0 on.

    Returns the engine's condition: "exact", or "unknown" if its weights are not those of version 0, until an anchor.
    Raises what the engine says: ConfigError, TransportError, PlacementError, EngineUnsupported.
    """
    settings = {**settings, "engine_id": f"replica-{server.replica_rank}"}
    answer = await server.engine.engine_core.call_utility_async("sparrow_follow", settings)
    if (problem := answer["error"]) is not None:
        raise _named(problem["error"])(f"replica {server.replica_rank}: {problem['message']}")
    server.sparrow_node = NodeDirectory.open(answer["node_dir"])
    server.sparrow_reported = -1
    return str(answer["condition"])


async def reach(server: Any, version: int, global_steps: int | None, seconds: float, has_anchor: bool) -> Report:
    """Wait until the engine is at `version` (or a later one), and tag its rollouts with `global_steps` from then on.

    Returns early if the engine is "unknown" and there is no anchor that could help it. Raises EngineDied, and
    DeadlineExceeded that says what the engine was at.
    """
    node: NodeDirectory = server.sparrow_node
    deadline = time.monotonic() + seconds
    while True:
        status, agent = node.engine.read() or EngineStatus(), node.agent.read()
        at = status.version if status.condition == "exact" else None
        if at is not None and at >= version:
            server.global_steps = global_steps
            return _report(server, status, agent)
        if status.condition == "unknown" and not has_anchor:
            return _report(server, status, agent)
        if server.engine.errored:
            raise EngineDied(f"replica {server.replica_rank}: its engine died while version {version} was on its way")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"replica {server.replica_rank}: expected version {version} within {seconds:.0f} s, got "
                f"{status.version} ({status.condition}); {_known_trouble(node, status, agent)}"
            )
        await asyncio.sleep(_POLL_S)


def _report(server: Any, status: EngineStatus, agent: AgentStatus | None) -> Report:
    new = [each for each in status.activations if each.version > server.sparrow_reported]
    server.sparrow_reported = max([server.sparrow_reported, *(each.version for each in new)])
    return Report(
        version=status.version,
        condition=status.condition,
        fingerprint_ok=status.fingerprint_ok,
        audited=status.audited,
        audit_ok=status.audit_ok,
        activations=[dataclasses.asdict(each) for each in new],
        fetched_bytes=0 if agent is None else agent.fetched_bytes,
    )


def _known_trouble(node: NodeDirectory, status: EngineStatus, agent: AgentStatus | None) -> str:
    found = [rank.error for rank in node.ranks().values()] + [status.error] + ([agent.error] if agent else [])
    said = "; ".join(f"{error.error}: {error.message}" for error in found if error is not None)
    return said or "nobody reported an error"


def _named(name: str) -> type[SparrowError]:
    found = getattr(errors, name, SparrowError)
    return found if isinstance(found, type) and issubclass(found, SparrowError) else SparrowError
