"""What is read out of an engine's node directory: a real directory, written here in the engine's place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparrowrl.errors import ConfigError, DeadlineExceeded, EngineDied, FingerprintMismatch, SparrowError
from sparrowrl.job.replica import Replica, Report
from sparrowrl.transport.node import Activation, AgentStatus, EngineStatus, ErrorInfo, NodeDirectory, RankStatus

STATE = "ab" * 32
AT_3 = EngineStatus(version=3, state=STATE, condition="exact", fingerprint_ok=True, audited=3, audit_ok=True)
UNKNOWN = EngineStatus(condition="unknown")


def activation(version: int) -> Activation:
    return Activation(version, version - 1, "delta", 10, 100, 1.0, 2.0, 3.0, 4, 0, 5, True)


class EngineStandIn:
    """What a replica sees of vLLM's AsyncLLM."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.engine_core, self._answer = self, answer
        self.errored = False
        self.told: dict[str, Any] = {}

    async def call_utility_async(self, method: str, settings: dict[str, Any]) -> dict[str, Any]:
        assert method == "sparrow_follow"
        self.told = settings
        return self._answer


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return NodeDirectory.create("engine-0", tmp_path)


@pytest.fixture
def engine(node: NodeDirectory) -> EngineStandIn:
    return EngineStandIn({"error": None, "node_dir": str(node.root), "condition": "exact", "version": 0})


@pytest.fixture
def replica(engine: EngineStandIn) -> Replica:
    replica = Replica(engine, "engine-0")
    assert asyncio.run(replica.follow({"hub": "http://hub"})) == "exact"
    assert engine.told == {"hub": "http://hub", "engine_id": "engine-0"}
    return replica


def reach(replica: Replica, version: int = 3, seconds: float = 0.05, has_anchor: bool = True) -> Report:
    return asyncio.run(replica.reach(version, STATE, seconds, has_anchor))


@pytest.mark.parametrize(("name", "kind"), [("ConfigError", ConfigError), ("OSError", SparrowError)])
def test_an_engine_that_cannot_follow_says_why(name: str, kind: type[SparrowError]) -> None:
    engine = EngineStandIn({"error": {"error": name, "message": "no hub"}})
    with pytest.raises(kind, match=r"^engine-7: no hub$"):
        asyncio.run(Replica(engine, "engine-7").follow({}))


def test_a_report_has_what_is_new(node: NodeDirectory, replica: Replica) -> None:
    node.engine.write(replace(AT_3, activations=(activation(2), activation(3))))
    node.agent.write(AgentStatus(pid=1, hub="http://hub", fetched_bytes=77))
    first = reach(replica)
    assert [each["version"] for each in first["activations"]] == [2, 3]
    assert first["version"] == first["audited"] == 3
    assert first["fingerprint_ok"] and first["audit_ok"] and first["fetched_bytes"] == 77
    assert reach(replica)["activations"] == []
    node.engine.write(replace(AT_3, version=5, state="cd" * 32, activations=(activation(3), activation(5))))
    assert [each["version"] for each in reach(replica)["activations"]] == [5]  # a later version than is awaited will do


def test_it_waits(node: NodeDirectory, replica: Replica) -> None:
    async def arrive() -> Report:
        waiting = asyncio.ensure_future(replica.reach(3, STATE, 30.0, True))
        for status in (replace(AT_3, version=2), UNKNOWN, AT_3):
            node.engine.write(status)
            await asyncio.sleep(0.03)
        return await waiting

    assert asyncio.run(arrive())["version"] == 3


def test_the_right_version_in_another_state_is_a_mismatch_that_names_both(
    node: NodeDirectory, replica: Replica
) -> None:
    node.engine.write(replace(AT_3, state="cd" * 32))
    with pytest.raises(FingerprintMismatch, match=f"engine-0: expected version 3 in state {STATE}, got {'cd' * 32}"):
        reach(replica)


@pytest.mark.parametrize(
    "status",
    [
        replace(AT_3, version=2, fingerprint_ok=False, error=ErrorInfo("FingerprintMismatch", "w: read back 0x1")),
        replace(UNKNOWN, fingerprint_ok=False, error=ErrorInfo("UnknownState", "w: read back 0x1")),
        replace(UNKNOWN, fingerprint_ok=True, audit_ok=False, error=ErrorInfo("FingerprintMismatch", "read back 0x1")),
    ],
)
def test_a_proof_that_failed_is_an_error_at_once(node: NodeDirectory, replica: Replica, status: EngineStatus) -> None:
    node.engine.write(status)
    with pytest.raises(FingerprintMismatch, match=r"engine-0: after version 0: .*read back 0x1; restart"):
        reach(replica, seconds=600.0)


@pytest.mark.parametrize("audited", [2, 3])
def test_an_audit_that_is_due_is_waited_for(node: NodeDirectory, engine: EngineStandIn, audited: int) -> None:
    replica = Replica(engine, "engine-0")
    asyncio.run(replica.follow({"audit_every": 3}))
    node.engine.write(replace(AT_3, audited=audited))
    if audited == 3:
        assert reach(replica)["audited"] == 3
    else:
        with pytest.raises(DeadlineExceeded, match=r"expected version 3"):
            reach(replica)
    node.engine.write(replace(AT_3, version=4, audited=3))
    assert reach(replica, version=4)["version"] == 4  # none is due


def test_a_request_ends_with_its_answer_or_when_the_engine_is_found_to_be_broken(
    node: NodeDirectory, replica: Replica
) -> None:
    async def answer() -> int:
        return 7

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def served() -> None:
        node.engine.write(AT_3)
        assert await replica.serving(answer()) == 7
        request = asyncio.ensure_future(replica.serving(never()))
        node.engine.write(replace(UNKNOWN, audit_ok=False, error=ErrorInfo("FingerprintMismatch", "read back 0x1")))
        with pytest.raises(FingerprintMismatch, match="read back 0x1"):
            await asyncio.wait_for(request, 30)

    asyncio.run(served())


def test_an_unknown_engine_is_waited_for_only_if_there_is_an_anchor(node: NodeDirectory, replica: Replica) -> None:
    node.engine.write(UNKNOWN)
    assert reach(replica, has_anchor=False)["condition"] == "unknown"
    with pytest.raises(DeadlineExceeded, match=r"expected version 3 within 0 s, got None \(unknown\)"):
        reach(replica, has_anchor=True)


def test_who_is_late_is_an_error_with_the_last_known_reasons(node: NodeDirectory, replica: Replica) -> None:
    node.engine.write(replace(AT_3, version=2))
    with pytest.raises(DeadlineExceeded, match=r"got 2 \(exact\); nobody reported an error"):
        reach(replica)
    node.rank(0).write(RankStatus(rank=0, pid=1, error=ErrorInfo("CorruptData", "bad segment")))
    node.agent.write(AgentStatus(pid=1, hub="http://hub", error=ErrorInfo("TransportError", "no route")))
    with pytest.raises(DeadlineExceeded, match="CorruptData: bad segment; TransportError: no route"):
        reach(replica)


def test_an_engine_that_died_is_an_error_at_once(node: NodeDirectory, replica: Replica, engine: EngineStandIn) -> None:
    node.engine.write(replace(AT_3, version=2))
    engine.errored = True
    with pytest.raises(EngineDied, match="engine-0: its engine died while version 3 was on its way"):
        reach(replica, seconds=600.0)
