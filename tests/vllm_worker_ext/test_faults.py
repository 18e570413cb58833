"""Ranks that fail, hang or die in the middle of an activation: the engine is at v or v-1 exactly, or serves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Fetched, Trainer, forked_workers
from faulty import STAGES
from zoo import make_model, save_checkpoint

from helpers import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
Start = Callable[..., Any]
RANKS = 2
TIMEOUT_S = 3  # of the ranks that wait for one that hangs
IN_ACTIVATION = ["write", "prove", "carry", "vote"]


class Engine:
    """An engine of two ranks with packed experts (so that everything an activation does is done), and its trainer."""

    def __init__(self, llm: Any, folder: Path, root: Path, trainer: Trainer) -> None:
        self.llm, self.folder, self.root, self.trainer = llm, folder, root, trainer
        self.fetched = Fetched(root / f"node-{time.monotonic_ns()}", trainer)
        self.calls = 0
        self.version = 0
        self.checkpoint = folder

    def call(self, method: str, *args: str) -> list[Any]:
        """What both ranks reply, which must be to this call."""
        self.calls += 1
        replies: list[Any] = self.llm.collective_rpc(f"sparrow_{method}", args=(self.calls, *args), timeout=120)
        assert [(r["rank"], r["call_id"]) for r in replies] == [(n, self.calls) for n in range(RANKS)]
        return replies

    def attach(self) -> None:
        self.llm.collective_rpc("fault_environment", args=({"SPARROWRL_RANK_TIMEOUT": str(TIMEOUT_S)},))
        replies = self.call("attach", str(self.fetched.node.root), str(self.trainer.root / "token.json"))
        assert all(r["ok"] for r in replies), replies

    def arm(self, rank: int, stage: str, kind: str, after: int = 0) -> None:
        self.llm.collective_rpc("fault_arm", args=(rank, stage, kind, after, 2.0 * TIMEOUT_S))

    def publish(self, fraction: float = 0.05) -> Path:
        weights = self.trainer.step(fraction)
        return save_checkpoint(self.folder, self.root / f"v{self.trainer.seed}", weights)

    def statuses(self) -> list[Any]:
        return [self.fetched.node.rank(rank).read() for rank in range(RANKS)]

    def stage(self, target: int, name: str) -> str:
        key = self.fetched.offer(target, name)
        wait_for(lambda: all(s.staged == key for s in self.statuses()), 60, f"{key} to be staged")
        return key

    def assert_holds(self, version: int, checkpoint: Path) -> None:
        """Both ranks say that they are at the version, can prove it, and hold what a fresh load would."""
        replies = self.call("audit")
        assert all(r["ok"] and r["version"] == version and r["condition"] == "exact" for r in replies), replies
        assert self.llm.collective_rpc("fresh_differences", args=(str(checkpoint),)) == [{}] * RANKS


@pytest.fixture
def two_ranks(engine: Start, tmp_path: Path) -> Iterator[Engine]:
    folder = tmp_path / "model"
    weights = make_model(folder, "qwen3-moe")
    with forked_workers():
        llm = engine(folder, tensor_parallel_size=RANKS, worker_extension_cls="faulty.FaultyExtension")
    one = Engine(llm, folder, tmp_path, Trainer.begin(tmp_path / "trainer", weights, anchor_every=1))
    one.attach()
    yield one
    one.fetched.node.remove()


def test_one_rank_that_fails_or_hangs_leaves_all_on_the_old_version(two_ranks: Engine) -> None:
    e = two_ranks
    for kind in ("raise", "hang"):
        for stage in IN_ACTIVATION:
            for rank in range(RANKS):
                new = e.publish()
                target = e.version + 1
                key = e.stage(target, f"{e.version}.fast")
                e.arm(rank, stage, kind, after=1 if stage == "write" else 0)
                replies = e.call("activate", key)
                assert not any(r["ok"] for r in replies), (kind, stage, rank, replies)
                named = [str(r["error"]) for r in replies]
                assert all(f"rank {rank}" in n or "injected" in n for n in named), (kind, stage, rank, named)
                e.assert_holds(e.version, e.checkpoint)
                key = e.stage(target, f"{e.version}.fast")
                assert all(r["ok"] for r in e.call("activate", key))
                e.version, e.checkpoint = target, new
                e.assert_holds(e.version, e.checkpoint)


@pytest.mark.parametrize("stage", ["write", "carry", "audit", "vote"])
def test_an_anchor_that_fails_in_one_rank_leaves_the_engine_unknown_until_the_next(
    two_ranks: Engine, stage: str
) -> None:
    assert stage in STAGES
    e = two_ranks
    new = e.publish()
    key = e.stage(1, "anchor.dense")
    e.arm(1, stage, "raise")
    replies = e.call("activate", key)
    assert not any(r["ok"] for r in replies) and all(r["condition"] == "unknown" for r in replies), replies
    assert all("UnknownState" in str(r["error"]) for r in e.call("audit"))
    key = e.stage(1, "anchor.dense")
    assert all(r["ok"] for r in e.call("activate", key))
    e.assert_holds(1, new)


@pytest.mark.parametrize("stage", ["take a segment", "finish staging"])
def test_staging_that_fails_in_one_rank_stages_in_none(two_ranks: Engine, stage: str) -> None:
    e = two_ranks
    new = e.publish()
    e.arm(0, stage, "raise")
    key = e.fetched.offer(1, "0.fast")
    wait_for(lambda: e.statuses()[0].error is not None, 60, "the failure to be reported")
    assert "injected" in e.statuses()[0].error.message and all(s.staged is None for s in e.statuses())
    assert not any(r["ok"] for r in e.call("activate", key))
    e.assert_holds(0, e.folder)
    assert all(r["ok"] for r in e.call("activate", e.stage(1, "0.fast")))
    e.assert_holds(1, new)


def test_an_audit_that_fails_in_one_rank_makes_all_unknown(two_ranks: Engine) -> None:
    e = two_ranks
    name = e.llm.collective_rpc("fresh_names")[0][0]
    e.llm.collective_rpc("fresh_flip", args=(name, 0))
    replies = e.call("audit")
    assert not any(r["ok"] for r in replies) and all(r["condition"] == "unknown" for r in replies), replies
    new = e.publish()
    e.fetched.offer(1, "0.fast")
    wait_for(lambda: all("UnknownState" in str(s.error) for s in e.statuses()), 60, "the delta to be refused")
    assert all(r["ok"] for r in e.call("activate", e.stage(1, "anchor.dense")))
    e.assert_holds(1, new)


@pytest.mark.parametrize("stage", ["finish staging", *IN_ACTIVATION])
def test_a_rank_that_is_killed_takes_the_engine_down_and_the_next_one_catches_up(
    two_ranks: Engine, engine: Start, stage: str
) -> None:
    e = two_ranks
    new = e.publish()
    if stage == "finish staging":
        e.arm(1, stage, "kill")
        e.fetched.offer(1, "0.fast")
    else:
        key = e.stage(1, "0.fast")
        e.arm(1, stage, "kill")
        with pytest.raises(Exception, match=r"(?i)died|dead|failed|executor|terminat|cancel"):
            e.call("activate", key)
    with pytest.raises(Exception, match=r"(?i)died|dead|failed|executor|terminat|shut|cancel|follower node|timed out"):
        wait_for(lambda: e.llm.collective_rpc("fresh_names", timeout=5) is None, 60, "the engine to be dead")
    with forked_workers():
        llm = engine(e.folder, tensor_parallel_size=RANKS, worker_extension_cls="faulty.FaultyExtension")
    again = Engine(llm, e.folder, e.root, e.trainer)
    again.attach()
    again.assert_holds(0, e.folder)
    assert all(r["ok"] for r in again.call("activate", again.stage(1, "0.fast")))
    again.assert_holds(1, new)
    again.fetched.node.remove()
