"""Hub and agent are killed at random moments while a trainer publishes: every version still arrives, bit for bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Publisher
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.node import NodeDirectory

SECONDS = 120.0


class Killer(threading.Thread):
    """Kills the hub or the agent `kills` times, each a random while after the last was back, and starts it again."""

    def __init__(self, hub: Any, node: NodeDirectory, start_agent: Any, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.hub, self.node, self.start_agent = hub, node, start_agent
        self.kills = kills
        self.random = random.Random(seed)
        self.agent = start_agent(hub.url, node)
        self.killed: list[str] = []
        self.failure: BaseException | None = None
        self.pause = threading.Event()

    def run(self) -> None:
        try:
            for number in range(self.kills):
                self.pause.wait(self.random.uniform(0.0, 0.5))
                if number % 2:
                    self.hub.kill()
                    self.hub.start()
                    self.killed.append("hub")
                else:
                    self.agent.end()
                    self.agent = self.start_agent(self.hub.url, self.node, wait=False)
                    self.killed.append("agent")
        except BaseException as error:  # noqa: BLE001  (the test's own thread has to hear of it)
            self.failure = error

    def finish(self) -> None:
        self.join(SECONDS)
        assert self.failure is None, self.failure
        assert len(self.killed) == self.kills


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_every_version_arrives_although_hub_and_agent_are_killed(
    hub_process: Any, node: NodeDirectory, rank: Any, start_agent: Any, credentials: Credentials, byte_trainer: Any,
    kills: int,
) -> None:  # fmt: skip
    sink = HubSink(hub_process.url, credentials, patience=SECONDS)
    trainer = byte_trainer(sink, credentials.run_key)
    rank.say(0, trainer.state)
    rank.start()
    killer = Killer(hub_process, node, start_agent, kills, seed=kills)
    killer.start()
    while killer.is_alive() or trainer.version < 10:
        version = trainer.publish(segments=killer.random.randrange(0, 6), size=100_000)
        wait_for(lambda version=version: rank.version == version, SECONDS, f"version {version}")
    killer.finish()
    assert [artifact.target for artifact in rank.staged] == list(range(1, trainer.version + 1))
    for version, names in trainer.published.items():
        assert rank.digests[f"runs/run-1/v/{version}/{version - 1}.fast"] == names
    sink.close()


def test_an_engine_catches_up_by_merged_deltas_although_hub_and_agent_are_killed(
    hub_process: Any, node: NodeDirectory, rank: Any, start_agent: Any, credentials: Credentials, journal_root: Path
) -> None:
    """The trainer does not wait for the engine, so what arrives are single steps and merged ones without a gap."""
    sink = HubSink(hub_process.url, credentials, patience=SECONDS)
    weights = {"w": torch.zeros(200_000, dtype=torch.bfloat16)}
    publisher = Publisher(sink, weights.items())
    head = sink.newest()
    assert head is not None
    rank.say(0, head.state.hex())
    rank.start()
    killer = Killer(hub_process, node, start_agent, kills=4, seed=3)
    killer.start()
    while killer.is_alive() or publisher.version < 10:
        weights["w"][publisher.version :: 17] += 1
        publisher.publish(weights.items())
    killer.finish()
    wait_for(lambda: rank.version == publisher.version, SECONDS, f"version {publisher.version}")
    journal = Journal(journal_root, "run-1", credentials.run_key)
    at = 0
    for artifact in rank.staged:
        assert artifact.base == at
        manifest = journal.manifest(artifact.target, f"{at}.fast")
        assert rank.digests[artifact.key] == [segment.digest.hex() for segment in manifest.segments]
        at = artifact.target
    assert at == publisher.version
    sink.close()
