"""One vLLM engine of a job, in the process that owns it: told whom to follow, then waited for at each sync."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypedDict, TypeVar

from sparrowrl import errors
from sparrowrl.errors import DeadlineExceeded, EngineDied, FingerprintMismatch, SparrowError
from sparrowrl.transport.node import AgentStatus, EngineStatus, NodeDirectory

_POLL_S = 0.01
_LOOK_S = 1.0  # while a request runs

T = TypeVar("T")


class Report(TypedDict):
    """What a replica says of its engine: `activations` are those since the last report (docs/protocol.md section 4)."""

    version: int | None
    condition: str
    fingerprint_ok: bool | None
    audited: int | None
    audit_ok: bool | None
    activations: list[dict[str, Any]]
    fetched_bytes: int


class Replica:
    """An engine that was started with the weight-transfer backend "sparrow" and SPARROWRL_HUB=later.

    `engine` is vLLM's AsyncLLM, `name` what errors call it.
    """

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self.name = engine, name
        self._node: NodeDirectory | None = None
        self._audit_every = 0
        self._reported = -1  # the last version whose activation was reported

    async def follow(self, settings: Mapping[str, Any]) -> str:
        """Have the engine follow a hub from version 0 on (settings of `sparrow_follow`, docs/protocol.md section 5).

        Returns the engine's condition: "exact", or "unknown" if its weights are not those of version 0, until an
        anchor. Raises what the engine says: ConfigError, TransportError, PlacementError, EngineUnsupported.
        """
        told = {**settings, "engine_id": self.name}
        answer = await self._engine.engine_core.call_utility_async("sparrow_follow", told)
        if (problem := answer["error"]) is not None:
            raise _named(problem["error"])(f"{self.name}: {problem['message']}")
        self._node = NodeDirectory.open(answer["node_dir"])
        self._audit_every = int(settings.get("audit_every", 0))
        self._reported = -1
        return str(answer["condition"])

    async def reach(self, version: int, state: str, seconds: float, has_anchor: bool) -> Report:
        """Wait until the engine is at `version`, in `state` (hex), and has audited it if due; or until at a later one.

        Returns early if the engine is "unknown" and there is no anchor that could help it. Raises EngineDied,
        FingerprintMismatch if live weights were found to be others than they should be, and DeadlineExceeded that says
        what the engine was at.
        """
        assert self._node is not None
        deadline = time.monotonic() + seconds
        while True:
            status, agent = self._node.engine.read() or EngineStatus(), self._node.agent.read()
            _check_proofs(self.name, status)
            at = status.version if status.condition == "exact" else None
            if at is not None and at >= version and not (at == version and self._audit_is_due(status)):
                if at == version and status.state != state:
                    raise FingerprintMismatch(
                        f"{self.name}: expected version {version} in state {state}, got {status.state}"
                    )
                return self._report(status, agent)
            if status.condition == "unknown" and not has_anchor:
                return self._report(status, agent)
            if self._engine.errored:
                raise EngineDied(f"{self.name}: its engine died while version {version} was on its way")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self.name}: expected version {version} within {seconds:.0f} s, got "
                    f"{status.version} ({status.condition}); {self._known_trouble(status, agent)}"
                )
            await asyncio.sleep(_POLL_S)

    async def serving(self, answer: Coroutine[Any, Any, T]) -> T:
        """What a request comes to. An engine that is found to have other weights than it should serves nothing more, so
        whoever waits for it must be told: raises FingerprintMismatch then.
        """
        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_S)
                if self._node is not None and not task.done():
                    _check_proofs(self.name, self._node.engine.read() or EngineStatus())
            return await task
        finally:
            task.cancel()

    def _audit_is_due(self, status: EngineStatus) -> bool:
        version = status.version or 0
        return bool(self._audit_every) and version % self._audit_every == 0 and status.audited != version

    def _report(self, status: EngineStatus, agent: AgentStatus | None) -> Report:
        new = [each for each in status.activations if each.version > self._reported]
        self._reported = max([self._reported, *(each.version for each in new)])
        return Report(
            version=status.version,
            condition=status.condition,
            fingerprint_ok=status.fingerprint_ok,
            audited=status.audited,
            audit_ok=status.audit_ok,
            activations=[dataclasses.asdict(each) for each in new],
            fetched_bytes=0 if agent is None else agent.fetched_bytes,
        )

    def _known_trouble(self, status: EngineStatus, agent: AgentStatus | None) -> str:
        assert self._node is not None
        found = [rank.error for rank in self._node.ranks().values()] + [status.error] + ([agent.error] if agent else [])
        said = "; ".join(f"{error.error}: {error.message}" for error in found if error is not None)
        if status.asleep:
            return said or "its weights sleep: wake them up before a sync"
        return said or "nobody reported an error"


def _check_proofs(name: str, status: EngineStatus) -> None:
    """An engine whose writes did not take, or whose weights changed under it, is broken: no anchor mends that."""
    if status.fingerprint_ok is False or (status.audit_ok is False and status.condition == "unknown"):
        said = "its audit failed" if status.error is None else status.error.message
        last = status.activations[-1].version if status.activations else 0
        raise FingerprintMismatch(f"{name}: after version {last}: {said}; restart this engine")


def _named(name: str) -> type[SparrowError]:
    found = getattr(errors, name, SparrowError)
    return found if isinstance(found, type) and issubclass(found, SparrowError) else SparrowError
