"""An agent inside the test's process, where its disk can be made full and its files be spoilt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sparrowrl.config import Credentials
from sparrowrl.transport import fetch
from sparrowrl.transport.agent import Agent
from sparrowrl.transport.node import NodeDirectory

SECONDS = 20.0


@pytest.fixture
async def agent(hub: Any, credentials: Credentials, node: NodeDirectory) -> AsyncIterator[Agent]:
    made = Agent(node, hub.url, credentials.for_engines(), "engine-1", connections=2)
    yield made
    made.stop()


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {SECONDS} s for {what}") from None


async def test_too_little_room_is_said_before_anything_is_fetched(
    agent: Agent, trainer: Any, node: NodeDirectory, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    rank.say(0, trainer.state)
    rank.start()
    await asyncio.to_thread(trainer.publish, 2, 5000)
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "disk_usage", lambda path: Usage)
        task = asyncio.create_task(agent.run())
        await until(lambda: "--shm-size" in str((s := node.agent.read()) and s.error), "the error in agent.json")
        assert not list(node.root.rglob("*.seg"))
    await until(lambda: rank.version == 1, "version 1, once there is room")
    agent.stop()
    await asyncio.wait_for(task, SECONDS)


async def test_a_cut_off_file_that_was_left_behind_is_fetched_again(
    agent: Agent, trainer: Any, node: NodeDirectory, rank: Any
) -> None:
    rank.say(0, trainer.state)
    await asyncio.to_thread(trainer.publish, 2, 5000)
    folder = node.key_path("runs/run-1/v/1/0.fast")
    folder.mkdir(parents=True)
    (folder / f"{trainer.published[1][0]}.seg").write_bytes(b"a part")
    (folder / f"{'a' * 64}.seg").write_bytes(b"of a draft that was given up")
    (folder / "manifest").write_bytes(b"damaged")
    task = asyncio.create_task(agent.run())
    await until(lambda: (n := node.next.read()) is not None and n.committed, "version 1")
    rank.start()
    await until(lambda: rank.version == 1, "the rank to have checked it")
    assert rank.digests["runs/run-1/v/1/0.fast"] == trainer.published[1]
    agent.stop()
    await asyncio.wait_for(task, SECONDS)


async def test_a_node_directory_that_cannot_be_written_is_an_error_and_not_the_end(
    agent: Agent, trainer: Any, node: NodeDirectory, rank: Any
) -> None:
    rank.say(0, trainer.state)
    rank.start()
    blocker = node.root / "runs" / "run-1"
    blocker.write_text("a file where a folder should be")
    await asyncio.to_thread(trainer.publish, 2, 5000)
    task = asyncio.create_task(agent.run())
    await until(lambda: "node directory" in str((s := node.agent.read()) and s.error), "the error in agent.json")
    assert not task.done()
    blocker.unlink()
    await until(lambda: rank.version == 1, "version 1")
    agent.stop()
    await asyncio.wait_for(task, SECONDS)
