"""verl's real manager, Ray worker groups and FSDP2 trainer ranks; the engines are stand-ins (verl_ranks.py)."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

import ray
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl_job import Job, model_config, start_ray
from verl_ranks import StandInReplica

from helpers import assert_bits_equal
from sparrowrl.errors import DeadlineExceeded, EngineDied, SparrowError
from sparrowrl.examples.gsm8k_grpo import tiny_model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # Ray's sockets need a short name
        start_ray(Path(folder))
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def job(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A trainer for all tests but those that kill it: each makes a manager of its own, and goes on from its version."""
    job = Job(model, tmp_path_factory.mktemp("run") / "journal", timeout=15)
    yield job
    job.end()


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bits_equal(got[name], tensor)


def test_versions_are_the_trainers_weights_and_replicas_are_told(job: Job) -> None:
    first, second = StandInReplica(), StandInReplica()
    manager = job.manager(first)
    versions = []
    for step in range(4):
        if step:
            job.trainer.perturb(0.02, step)
        if step == 2:
            manager.add_replicas([second])
        metrics = manager.update_weights(10 + step)
        versions.append(int(metrics["sparrow/version"]))
        assert metrics["sparrow/replicas"] == (1 if step < 2 else 2)
        assert_same(job.published(versions[-1]), job.full())
    assert versions == [versions[0] + step for step in range(4)]
    assert 0.01 < metrics["sparrow/density"] < 0.03
    for replica in (first, second):
        settings, global_steps = ray.get(replica.servers[0].told.remote())
        assert global_steps == 13
        assert "writer" not in settings["credentials"]
        assert settings["in_flight"] == "keep"
    before, after = job.published(versions[0]), job.published(versions[3])
    assert not any(before[name].equal(tensor) for name, tensor in after.items() if "proj" in name)


def test_inside_a_running_loop_it_is_awaited(job: Job) -> None:
    """As fully_async's trainer calls it, which drops what it returns."""
    manager, heard = job.manager(StandInReplica()), list[dict[str, float]]()
    manager.report = heard.append

    async def sync() -> None:
        await manager.update_weights(global_steps=0)
        await manager.update_weights(global_steps=1)

    asyncio.run(sync())
    versions = [metrics["sparrow/version"] for metrics in heard]
    assert versions == [versions[0], versions[0] + 1]


def test_an_engine_with_other_weights_gets_an_anchor_once(job: Job) -> None:
    manager = job.manager(StandInReplica(condition="unknown"), StandInReplica())
    with_anchor = int(manager.update_weights(0)["sparrow/version"])
    job.trainer.perturb(0.02, 1)
    manager.add_replicas([StandInReplica(condition="unknown")])  # finds the anchor there
    manager.update_weights(1)
    anchors = [artifact.target for artifact in job.stored().artifacts() if artifact.kind == "anchor"]
    assert anchors == [with_anchor]
    assert_same(job.published_from_anchor(with_anchor + 1), job.full())


def test_a_replica_that_does_not_get_there_is_an_error_within_the_deadline_and_the_next_sync_goes_on(job: Job) -> None:
    version = int(job.manager(StandInReplica()).update_weights(0)["sparrow/version"])
    manager = job.manager(StandInReplica(stuck_at=version + 2))
    manager.update_weights(1)
    job.trainer.perturb(0.02, 1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"version {version + 2}"):
        manager.update_weights(2)
    assert time.monotonic() - began < 60
    job.trainer.perturb(0.02, 2)
    assert manager.update_weights(3)["sparrow/version"] == version + 3


def test_a_replica_that_died_is_an_error_of_that_name(job: Job) -> None:
    replica = StandInReplica()
    manager = job.manager(replica, StandInReplica())
    version = manager.update_weights(0)["sparrow/version"]
    ray.kill(replica.servers[0])
    with pytest.raises(EngineDied):
        manager.update_weights(1)
    manager.remove_replicas([replica])
    assert manager.update_weights(2)["sparrow/version"] == version + 2


@pytest.mark.slow
def test_a_trainer_rank_that_dies_is_an_error_and_not_a_wait(cluster: None, model: Path, tmp_path: Path) -> None:
    job = Job(model, tmp_path / "journal", timeout=15)
    manager = job.manager(StandInReplica())
    manager.update_weights(0)
    os.kill(ray.get(job.trainer.workers[1].__ray_call__.remote(lambda worker: os.getpid())), 9)
    with pytest.raises(SparrowError):
        manager.update_weights(1)
    job.end()


def test_the_engine_side_worker_of_verl_needs_nothing(cluster: None, model: Path) -> None:
    """verl starts a CheckpointEngineWorker beside every engine rank; with this backend it has nothing to do."""
    config = RolloutConfig(name="vllm", checkpoint_engine=CheckpointEngineConfig(backend="sparrow"))
    pool = RayResourcePool(process_on_nodes=[1], max_colocate_count=3)
    made = RayClassWithInitArgs(
        cls=ray.remote(CheckpointEngineWorker), rollout_config=config, model_config=model_config(model), replica_rank=0
    )
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
    assert ray.get(group.execute_checkpoint_engine(["prepare"])) == [None]
    for worker in group.workers:
        ray.kill(worker)
