"""A real hub and a real agent, which is a process; the rank is a fake that checks files and writes its status."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Publisher
from sparrowrl.transport import agent as agent_module
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.node import (
    Answer,
    EngineStatus,
    ErrorInfo,
    NextArtifact,
    NodeDirectory,
    Request,
    write_atomically,
)
from sparrowrl.transport.remote import HubClient

SECONDS = 30.0


def again(artifact: NextArtifact | None) -> NextArtifact | None:
    """All but the time it took."""
    return artifact and replace(artifact, fetch_ms=0.0)


def files_of(node: NodeDirectory) -> list[str]:
    return sorted(str(path.relative_to(node.root / "runs")) for path in (node.root / "runs").rglob("*.seg"))


def test_twenty_versions_arrive_bit_exactly_and_in_order(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    rank.say(0, trainer.state)
    start_agent(hub.url, node)
    rank.start()
    for version in range(1, 21):
        assert trainer.publish(segments=version % 4, size=30_000) == version
        wait_for(lambda version=version: rank.version == version, SECONDS, f"version {version}")
    assert [artifact.target for artifact in rank.staged] == list(range(1, 21))
    assert [rank.digests[f"runs/run-1/v/{v}/{v - 1}.fast"] for v in range(1, 21)] == [
        trainer.published[v] for v in range(1, 21)
    ]
    wait_for(lambda: node.next.read() is None, SECONDS, "next.json to say that there is nothing to do")
    wait_for(lambda: not files_of(node), SECONDS, "old artifacts to be deleted")
    status = node.agent.read()
    assert status is not None
    assert (status.newest, status.error) == (20, None)
    assert status.fetched_bytes > 20 * 30_000


def test_layout_and_origin_come_before_any_rank_speaks(
    hub: Any, trainer: Any, node: NodeDirectory, start_agent: Any, journal_root: Path
) -> None:
    start_agent(hub.url, node)
    origin = "runs/run-1/v/0/origin/manifest"
    layout = f"runs/run-1/layout/{trainer.layout.id.hex()}"
    wait_for(lambda: node.key_path(origin).exists(), SECONDS, "the origin")
    assert node.key_path(layout).read_bytes() == trainer.layout.to_bytes()
    assert node.key_path(origin).read_bytes() == (journal_root / origin).read_bytes()
    trainer.publish()
    wait_for(lambda: (s := node.agent.read()) is not None and s.newest == 1, SECONDS, "the agent to hear of version 1")
    assert node.next.read() is None, "no rank has said what it needs"


def test_a_late_engine_gets_one_merged_delta_and_follows_on(
    hub: Any,
    sink: HubSink,
    node: NodeDirectory,
    rank: Any,
    start_agent: Any,
    journal_root: Path,
    credentials: Credentials,
) -> None:
    weights = {"w": torch.arange(3000, dtype=torch.float32).bfloat16()}
    publisher = Publisher(sink, weights.items())
    head = sink.newest()
    assert head is not None
    for step in range(1, 8):
        weights["w"][step::7] += step
        publisher.publish(weights.items())
    rank.say(0, head.state.hex())
    rank.start()
    start_agent(hub.url, node)
    wait_for(lambda: rank.version == 7, SECONDS, "version 7")
    assert [(artifact.base, artifact.target) for artifact in rank.staged] == [(0, 7)]
    merged = Journal(journal_root, "run-1", credentials.run_key).manifest(7, "0.fast")
    assert rank.digests["runs/run-1/v/7/0.fast"] == [segment.digest.hex() for segment in merged.segments]
    weights["w"] *= 2
    publisher.publish(weights.items())
    wait_for(lambda: rank.version == 8, SECONDS, "version 8")
    assert (rank.staged[-1].base, rank.staged[-1].target) == (7, 8)


def test_an_engine_that_restarts_gets_a_merged_delta_from_version_0(
    hub: Any, sink: HubSink, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    weights = {"w": torch.zeros(100, dtype=torch.bfloat16)}
    publisher = Publisher(sink, weights.items())
    head = sink.newest()
    assert head is not None
    rank.say(0, head.state.hex())
    rank.start()
    start_agent(hub.url, node)
    for step in range(1, 4):
        weights["w"][step] = step
        publisher.publish(weights.items())
        wait_for(lambda step=step: rank.version == step, SECONDS, f"version {step}")
    rank.activate = False
    rank.say(None)
    weights["w"][9] = 9
    publisher.publish(weights.items())
    wait_for(lambda: (s := node.agent.read()) is not None and s.newest == 4, SECONDS, "the agent to hear of version 4")
    assert node.next.read() is None, "an engine that is loading needs nothing"
    rank.activate = True
    rank.say(0, head.state.hex())
    wait_for(lambda: rank.version == 4, SECONDS, "version 4")
    assert (rank.staged[-1].base, rank.staged[-1].target) == (0, 4)


def test_an_unknown_engine_gets_the_anchor_and_then_the_delta_from_it(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    trainer.publish()
    trainer.publish(kind="anchor")
    trainer.publish()
    rank.say(1, "ab" * 32, "unknown")
    rank.start()
    start_agent(hub.url, node)
    wait_for(lambda: rank.version == 3, SECONDS, "version 3")
    assert [(artifact.kind, artifact.base, artifact.target) for artifact in rank.staged] == [
        ("anchor", None, 2),
        ("delta", 2, 3),
    ]


def test_an_engine_in_another_state_than_it_should_be_gets_an_anchor(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    trainer.publish(kind="anchor")
    trainer.publish()
    rank.say(1, "ab" * 32)
    rank.start()
    start_agent(hub.url, node)
    wait_for(lambda: rank.version == 2, SECONDS, "version 2")
    assert [artifact.kind for artifact in rank.staged] == ["anchor", "delta"]


def test_a_delta_that_a_worker_refuses_for_its_sums_is_given_up_for_an_anchor(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    rank.activate = False
    rank.start()
    start_agent(hub.url, node)
    trainer.publish()
    wait_for(lambda: (n := node.next.read()) is not None and n.committed, SECONDS, "the delta")
    status = node.rank(0).read()
    assert status is not None
    node.rank(0).write(replace(status, error=ErrorInfo("FingerprintMismatch", "expected other sums")))
    wait_for(lambda: node.next.read() is None, SECONDS, "the delta to be taken back")
    wait_for(lambda: "anchor" in str((s := node.agent.read()) and s.error), SECONDS, "the error in agent.json")
    rank.activate = True
    trainer.publish(kind="anchor")
    wait_for(lambda: rank.version == 2, SECONDS, "version 2")
    assert [artifact.kind for artifact in rank.staged] == ["anchor"]


def test_no_way_to_the_newest_is_said_and_ends_with_an_anchor(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    trainer.publish()
    rank.say(0, None, "unknown")
    rank.start()
    start_agent(hub.url, node)
    wait_for(lambda: "anchor" in str((s := node.agent.read()) and s.error), SECONDS, "the error in agent.json")
    trainer.publish(kind="anchor")
    wait_for(lambda: rank.version == 2, SECONDS, "version 2")
    wait_for(lambda: (s := node.agent.read()) is not None and s.error is None, SECONDS, "the error to go")


def test_a_draft_is_followed_and_dropped_and_begun_anew(
    hub: Any, trainer: Any, sink: HubSink, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    rank.say(0, trainer.state)
    rank.start()
    start_agent(hub.url, node)
    bodies = trainer.bodies(3, 9000)
    names = [blake3(body).hexdigest() for body in bodies]
    draft = sink.open(1, "0.fast")

    def listed() -> set[str]:
        artifact = node.next.read()
        return set(artifact.segments) if artifact is not None else set()

    draft.put(bodies[0])
    wait_for(lambda: listed() == {names[0]}, SECONDS, "the first segment, before the commit")
    draft.put(bodies[1])
    wait_for(lambda: listed() == set(names[:2]), SECONDS, "the second segment")
    artifact = node.next.read()
    assert artifact is not None and not artifact.committed and artifact.target == 1
    draft.drop()
    wait_for(lambda: node.next.read() is None, SECONDS, "next.json to take the draft back")
    assert trainer.write([bodies[2], bodies[1]]) == 1
    wait_for(lambda: rank.version == 1, SECONDS, "version 1")
    assert rank.digests["runs/run-1/v/1/0.fast"] == [names[2], names[1]]


def test_half_a_publish_of_a_trainer_that_died_does_not_block_the_next(
    hub: Any, trainer: Any, sink: HubSink, node: NodeDirectory, rank: Any, start_agent: Any,
    credentials: Credentials, byte_trainer: Any,
) -> None:  # fmt: skip
    rank.say(0, trainer.state)
    rank.start()
    start_agent(hub.url, node)
    sink.open(1, "0.fast").put(b"left behind")
    wait_for(lambda: (n := node.next.read()) is not None and len(n.segments) == 1, SECONDS, "the draft")
    sink.close()
    with_other_bytes = HubSink(hub.url, credentials)
    successor = byte_trainer(with_other_bytes, credentials.run_key, seed=9)
    assert successor.publish() == 1
    wait_for(lambda: rank.version == 1, SECONDS, "version 1")
    assert rank.digests["runs/run-1/v/1/0.fast"] == successor.published[1]
    with_other_bytes.close()


def test_an_agent_that_is_killed_goes_on_where_it_was(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Any
) -> None:
    rank.say(0, trainer.state)
    rank.activate = False
    rank.start()
    first = start_agent(hub.url, node)
    trainer.publish(segments=5)
    wait_for(lambda: (n := node.next.read()) is not None and n.committed, SECONDS, "version 1 to be staged")
    first.end(signal.SIGKILL)
    left = node.next.read()
    segment = next(iter(trainer.published[1]))
    (node.root / f"runs/run-1/v/1/0.fast/{segment}.seg").unlink()
    (node.root / f"runs/run-1/v/1/0.fast/.{segment}.seg").write_bytes(b"half")
    start_agent(hub.url, node)
    wait_for(node.key_path(f"runs/run-1/v/1/0.fast/{segment}.seg").exists, SECONDS, "the missing segment")
    wait_for(lambda: again(node.next.read()) == again(left), SECONDS, "the same artifact again")
    assert not list((node.root / "runs").rglob(".*"))
    wait_for(lambda: (s := node.agent.read()) is not None and s.fetch_ms > 0, SECONDS, "the agent's report")
    status = node.agent.read()
    assert status is not None and status.fetched_bytes < 6000, "one segment of five was missing"
    rank.activate = True
    wait_for(lambda: rank.version == 1, SECONDS, "version 1")


def test_it_leaves_when_its_input_ends_and_a_second_one_is_refused(
    hub: Any, trainer: Any, node: NodeDirectory, start_agent: Any
) -> None:
    first = start_agent(hub.url, node)
    second = start_agent(hub.url, node, wait=False)
    assert second.process.wait(SECONDS) == 2
    assert "ConfigError" in second.log.read_text() and "another agent" in second.log.read_text()
    first.process.stdin.close()
    assert first.process.wait(SECONDS) == 0
    third = start_agent(hub.url, node)
    assert third.end(signal.SIGTERM) == 0


def test_it_leaves_when_its_node_directory_goes(hub: Any, trainer: Any, node: NodeDirectory, start_agent: Any) -> None:
    agent = start_agent(hub.url, node)
    node.remove()
    assert agent.process.wait(SECONDS) == 0


async def test_statuses_go_up_and_requests_come_down(
    hub: Any, trainer: Any, node: NodeDirectory, rank: Any, start_agent: Callable[..., Any], credentials: Credentials
) -> None:
    rank.say(0, trainer.state)
    await asyncio.to_thread(start_agent, hub.url, node)
    async with HubClient(hub.url, credentials) as client:

        async def engines() -> Any:
            return await client.engines()

        async def until(condition: Callable[[Any], bool]) -> None:
            async with asyncio.timeout(SECONDS):
                while not condition(await engines()):
                    await asyncio.sleep(0.01)

        await until(lambda found: found.get("engine-1", {}).get("state") == trainer.state)
        number = await client.ask("engine-1", "audit")
        later = await client.ask("engine-1", "export")
        async with asyncio.timeout(SECONDS):
            while node.request.read() != Request(number, "audit"):
                await asyncio.sleep(0.01)
            node.engine.write(EngineStatus(0, trainer.state, answers=(Answer(number, "audit", True, "fine"),)))
            while node.request.read() != Request(later, "export"):
                await asyncio.sleep(0.01)
        await until(lambda found: len(found["engine-1"]["answers"]) == 1)
        feed = await client.feed(None, "engine-1", 0.0)
        assert feed.requests == (Request(later, "export"),)


def test_a_wrong_token_is_said_in_agent_json(
    hub: Any, trainer: Any, node: NodeDirectory, tmp_path: Path, start_process: Any
) -> None:
    Credentials.new("run-1").save(tmp_path / "wrong.json")
    start_process(
        "agent", "--hub", hub.url, "--token-file", str(tmp_path / "wrong.json"), "--node-dir", str(node.root),
        "--engine-id", "engine-1",
    )  # fmt: skip
    wait_for(lambda: "Unauthorized" in str((s := node.agent.read()) and s.error), 60, "the error in agent.json")
    status = node.agent.read()
    assert status is not None and not status.connected


async def test_an_announcement_for_which_there_is_no_room_comes_later(
    node: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_LONGEST_PAUSE", 0.01)
    tried: list[bytes] = []

    def full_once(path: Path, data: bytes) -> None:
        tried.append(data)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, data)

    monkeypatch.setattr("sparrowrl.transport.node.write_atomically", full_once)
    wanted = NextArtifact("runs/run-1/v/1/0.fast", "delta", 0, 1)
    agent_module.Announcer(node).show(lambda: wanted)
    async with asyncio.timeout(SECONDS):
        while node.next.read() != wanted:
            await asyncio.sleep(0.01)
    assert len(tried) == 2
