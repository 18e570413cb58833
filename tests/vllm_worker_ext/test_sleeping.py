"""Engines that sleep and follow: the memory pool is a stand-in (tests/sleeping.py), for CUDA's does not run here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sleeping
from driven import Bench
from engines import PROMPTS, core_of, generate
from followed import Site

from helpers import wait_for
from sparrowrl.vllm_worker_ext.sleeping import _watched
from sparrowrl.vllm_worker_ext.staging import Staged

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    """For all engines of this file; the worker class is as it was after it."""
    from vllm.platforms.interface import Platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    own = (CPUWorker.sleep, CPUWorker.wake_up, Platform.is_sleep_mode_available)
    sleeping.allow(Platform)
    sleeping.install(CPUWorker)
    _watched.clear()  # another test may have had a worker already
    yield
    CPUWorker.sleep, CPUWorker.wake_up, Platform.is_sleep_mode_available = own


def asleep(s: Site) -> bool:
    """What the engine's status says, to which the trainer looks."""
    status = s.follower._node.engine.read()
    return status is not None and status.asleep


def newest(s: Site) -> int | None:
    agent = s.follower._node.agent.read()
    return None if agent is None else agent.newest


def test_versions_that_come_while_it_sleeps_are_active_before_its_cache_is_back(site: Callable[..., Site]) -> None:
    """As OpenRLHF's colocated training does it: generate, sleep, train, wake the weights, sync, wake the cache."""
    s = site()
    llm = s.engine(enable_sleep_mode=True)
    before = generate(llm, PROMPTS)
    llm.sleep(level=1)
    wait_for(lambda: asleep(s), 20, "the status to say so")
    for _ in range(2):
        weights = s.trainer.step()
    wait_for(lambda: newest(s) == 2, 60, "the agent to know of version 2")
    core_of(llm).step_fn()
    assert s.follower.status.version == 0
    llm.wake_up(tags=["weights"])
    assert s.follower.status.audited == 0 and s.follower.status.audit_ok
    s.reach(2)
    assert core_of(llm).model_executor.sleeping_tags == {"kv_cache"}
    wait_for(lambda: not asleep(s), 20, "the status to say so")
    llm.wake_up(tags=["kv_cache"])
    after = generate(llm, PROMPTS)
    assert after == generate(s.fresh(weights), PROMPTS) and after != before
    assert s.ask("audit").ok


def test_weights_are_taken_away_in_the_middle_of_staging(bench: Callable[..., Bench], monkeypatch: Any) -> None:
    """vLLM waits until the stager has done what it is at; afterwards staging goes on."""
    b = bench()
    assert b.attach()["condition"] == "exact"
    weights = b.trainer.step()
    at_work, go_on = threading.Event(), threading.Event()
    take = Staged.take

    def slow(self: Staged, *arguments: Any) -> None:
        at_work.set()
        assert go_on.wait(60)
        take(self, *arguments)

    monkeypatch.setattr(Staged, "take", slow)
    key = b.fetched.offer(1, "0.fast")
    assert at_work.wait(60)
    sleeper = threading.Thread(target=b.llm.sleep)
    sleeper.start()
    sleeper.join(0.2)
    assert sleeper.is_alive()
    go_on.set()
    sleeper.join(60)
    assert not sleeper.is_alive()
    for method in ("audit", "activate"):
        reply = b.call(method, *([key] if method == "activate" else []))
        assert not reply["ok"] and reply["condition"] == "exact"
        assert "weights sleep; wake them up first" in reply["error"]["message"]
    b.llm.wake_up()
    wait_for(lambda: b.status().staged == key, 60, "version 1 to be staged")
    assert b.call("activate", key)["ok"]
    b.assert_holds(weights, 1)


def test_a_sleep_of_level_2_leaves_an_engine_that_serves_nothing_until_an_anchor(site: Callable[..., Site]) -> None:
    s = site(anchor_every=3)
    llm = s.engine(enable_sleep_mode=True)
    s.trainer.step()
    s.reach(1)
    llm.sleep(level=2)
    llm.wake_up()
    assert s.follower.status.condition == "unknown"
    assert s.follower.status.audit_ok is True  # of what it had: this is no failure
    s.trainer.step()
    assert not s.follower._may_step()
    weights = s.trainer.step()  # the third has an anchor
    s.reach(3)
    assert s.follower.status.condition == "exact" and s.follower._may_step()
    assert s.follower.status.activations[-1].kind == "anchor"
    assert generate(llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)
    assert s.ask("audit").ok


def test_weights_that_come_back_as_others_are_noticed(site: Callable[..., Site], monkeypatch: Any) -> None:
    s = site()
    llm = s.engine(enable_sleep_mode=True)
    llm.sleep(level=1)
    worker: Any = core_of(llm).model_executor.driver_worker.worker
    some = next(iter(worker.stand_in_kept.values()))
    some[0] ^= 1
    llm.wake_up()
    status = s.follower.status
    assert (status.condition, status.audit_ok) == ("unknown", False)
    assert status.error is not None and status.error.error == "FingerprintMismatch"
