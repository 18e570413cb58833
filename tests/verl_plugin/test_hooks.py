"""What importing verl is enough for, and what happens with a verl that is not the one that was tested."""

from __future__ import annotations

import importlib.metadata
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from sparrowrl.errors import ConfigError, FrameworkUnsupported
from sparrowrl.verl_plugin import hooks
from sparrowrl.verl_plugin.backend import SparrowCheckpointEngine, TrainerWeights
from sparrowrl.verl_plugin.manager import SparrowManager


def test_importing_verl_offers_the_backend() -> None:
    assert CheckpointEngineRegistry.get("sparrow") is SparrowCheckpointEngine


def test_the_manager_that_verl_names_outright_is_ours_for_this_backend_alone() -> None:
    ours = CheckpointEngineManager(config=CheckpointEngineConfig(backend="sparrow"), actor_wg=None, replicas=[])
    stock = CheckpointEngineManager(config=CheckpointEngineConfig(backend="naive"), actor_wg=None, replicas=[])
    assert type(ours) is SparrowManager
    assert type(stock) is CheckpointEngineManager


def test_a_wrong_option_is_an_error_at_once() -> None:
    config = CheckpointEngineConfig(backend="sparrow", engine_kwargs={"sparrow": {"jornal_dir": "/tmp/x"}})
    with pytest.raises(ConfigError, match="journal_dir"):
        CheckpointEngineManager(config=config, actor_wg=None, replicas=[])


class Sender:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
        self.sent.append((weights, global_steps))
        return {"version": 7}


def worker(backend: str) -> Any:
    """A stand-in for a trainer rank: what verl's method reads of it."""
    rollout = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend=backend), dtype="bfloat16")
    engine = SimpleNamespace(get_per_tensor_param=lambda: ("stream", None))
    return SimpleNamespace(
        config=SimpleNamespace(rollout=rollout), actor=SimpleNamespace(engine=engine), checkpoint_engine=Sender()
    )


@pytest.mark.parametrize(("backend", "mode"), [("sparrow", "auto"), ("sparrow", "sparrow"), ("nccl", "sparrow")])
async def test_a_trainer_rank_hands_its_engine_over(backend: str, mode: str) -> None:
    rank = worker(backend)
    assert await ActorRolloutRefWorker.update_weights(rank, global_steps=3, mode=mode) == {"version": 7}
    [(weights, step)] = rank.checkpoint_engine.sent
    assert weights == TrainerWeights(rank.actor.engine, "bfloat16")
    assert step == 3


@pytest.mark.parametrize("mode", ["auto", "nccl"])
async def test_other_backends_get_what_verl_gives_them(mode: str) -> None:
    rank = worker("nccl")
    assert await ActorRolloutRefWorker.update_weights(rank, global_steps=3, mode=mode) == {"version": 7}
    assert rank.checkpoint_engine.sent == [("stream", 3)]


def test_verl_still_finds_how_to_dispatch_the_wrapped_method() -> None:
    method = ActorRolloutRefWorker.update_weights
    assert inspect.iscoroutinefunction(method)
    assert vars(method) == vars(inspect.unwrap(method, stop=lambda f: f is not method)) | {
        "__wrapped__": method.__wrapped__
    }


def test_a_method_with_other_parameters_is_left_alone_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_problems", [])

    class Changed:
        def update_weights(self, steps: int) -> int:
            return steps

    hooks._wrap(Changed, "update_weights", "self global_steps mode", lambda *_: -1)
    assert Changed().update_weights(2) == 2
    with pytest.raises(FrameworkUnsupported, match=r"Changed\.update_weights.*global_steps mode.*self steps"):
        hooks.check_usable()


def test_another_verl_is_refused_where_the_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.0")
    with pytest.raises(FrameworkUnsupported, match=r"verl 0\.12\.0.*0\.9\.1"):
        CheckpointEngineManager(config=CheckpointEngineConfig(backend="sparrow"), actor_wg=None, replicas=[])
    CheckpointEngineManager(config=CheckpointEngineConfig(backend="naive"), actor_wg=None, replicas=[])
