"""verl's real manager, trainer ranks and vLLM servers, without a training loop: requests across syncs, and faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import psutil
import ray
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl_job import Job, model_config, start_ray

from helpers import wait_for
from sparrowrl.errors import DeadlineExceeded, EngineDied, JournalError
from sparrowrl.examples.gsm8k_grpo import tiny_model

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # Ray's sockets need a short name
        start_ray(Path(folder))
        yield
        ray.shutdown()


def start_replica(job: Job, number: int, load_format: str = "auto", tensor_parallel: int = 1) -> Any:
    """A standalone vLLM server, started by verl."""
    rollout = RolloutConfig(
        name="vllm",
        mode="async",
        load_format=load_format,
        tensor_model_parallel_size=tensor_parallel,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        prompt_length=64,
        response_length=400,
        checkpoint_engine=job.checkpoint_engine(),
    )
    replica = vLLMReplica(number, rollout, model_config(job.model), gpus_per_node=tensor_parallel)
    asyncio.run(replica.init_standalone())
    return replica


def stop_replica(replica: Any) -> None:
    for process in engine_processes(replica):
        process.kill()
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    for group in replica.resource_pool.pgs or []:
        ray.util.remove_placement_group(group)


def engine_processes(replica: Any, name: str = "") -> list[psutil.Process]:
    """The processes below a replica's server whose command line or title has `name` in it."""
    server = psutil.Process(ray.get(replica.servers[0].__ray_call__.remote(lambda server: os.getpid())))
    return [each for each in server.children(recursive=True) if name in " ".join([each.name(), *each.cmdline()])]


def unfinished(replica: Any) -> int:
    """How many requests the server has that are not answered yet."""
    count = lambda server: len(server.engine.output_processor.request_states)  # noqa: E731 - pickled by value
    return int(ray.get(replica.servers[0].__ray_call__.remote(count)))


def generate(replica: Any, tokens: int = 8, prompt: list[int] | None = None) -> Any:
    """A request; what it comes to has token_ids, log_probs, stop_reason and extra_fields."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "logprobs": True, "ignore_eos": True}
    return replica.servers[0].generate.remote(prompt or list(range(5, 40)), sampling, uuid.uuid4().hex)


@pytest.fixture(scope="module")
def served(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Any, Any]]:
    """A trainer, an engine and their manager, at version 0."""
    job = Job(model, tmp_path_factory.mktemp("run") / "journal", audit_every=1)
    replica = start_replica(job, 0)
    manager = job.manager(replica)
    manager.update_weights(0)
    yield job, replica, manager
    stop_replica(replica)
    job.end()


def assert_synced(metrics: dict[str, float]) -> None:
    """Every replica's live weights are proved to be the version; the audit of it may be under way still."""
    assert metrics["sparrow/fingerprints_ok"] == metrics["sparrow/audits_ok"] == 1
    assert metrics["sparrow/oldest_version"] == metrics["sparrow/version"]
    assert metrics["sparrow/oldest_audit"] >= metrics["sparrow/version"] - 1


def test_requests_go_on_across_syncs_and_say_which_step_they_ended_in(served: tuple[Job, Any, Any]) -> None:
    job, replica, manager = served
    step = int(manager.update_weights(1)["sparrow/version"])
    running = [generate(replica, 400) for _ in range(3)]
    wait_for(lambda: unfinished(replica) == 3, 60, "requests to run")
    job.trainer.perturb(0.02, step)
    metrics = manager.update_weights(step + 1)
    assert_synced(metrics)
    assert metrics["sparrow/requests_in_flight"] == 3
    assert metrics["sparrow/requests_aborted"] == 0
    assert metrics["sparrow/pause_ms"] > 0
    for ended in ray.get(running, timeout=120):
        assert ended.stop_reason == "completed"
        assert len(ended.token_ids) == 400
        assert ended.extra_fields["global_steps"] == step + 1


def test_a_new_request_never_reads_blocks_of_older_weights(served: tuple[Job, Any, Any]) -> None:
    job, replica, manager = served
    prompt = [*range(7, 107)] * 3  # longer than a block of the CPU's cache
    first, again = (ray.get(generate(replica, 4, prompt), timeout=60) for _ in range(2))
    assert first.extra_fields["num_cached_tokens"] == 0 < again.extra_fields["num_cached_tokens"]
    running = generate(replica, 400, prompt)  # verl's own reset of the cache fails while this runs
    job.trainer.perturb(0.02, 77)
    manager.update_weights(77)
    after = ray.get(generate(replica, 4, prompt), timeout=60)
    assert after.extra_fields["num_cached_tokens"] == 0
    assert after.log_probs != first.log_probs
    ray.get(running, timeout=120)


def test_an_agent_and_a_hub_that_are_killed_come_back(served: tuple[Job, Any, Any]) -> None:
    job, replica, manager = served
    for name, step in (("agent", 101), ("hub", 102)):
        job.trainer.perturb(0.02, step)
        killed = engine_processes(replica, "cli.main agent") if name == "agent" else hubs(job)
        assert killed, name
        for process in killed:
            process.kill()
        assert_synced(manager.update_weights(step))


def hubs(job: Job) -> list[psutil.Process]:
    rank = psutil.Process(ray.get(job.trainer.workers[0].__ray_call__.remote(lambda worker: os.getpid())))
    return [each for each in rank.children(recursive=True) if "cli.main hub" in " ".join(each.cmdline())]


def test_a_hub_that_does_not_answer_for_a_while_delays_a_sync(served: tuple[Job, Any, Any]) -> None:
    """A network that is gone for some seconds."""
    job, _, manager = served
    job.trainer.perturb(0.02, 103)
    [hub] = hubs(job)
    hub.send_signal(signal.SIGSTOP)
    resumes = subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {hub.pid}"])
    try:
        began = time.monotonic()
        assert_synced(manager.update_weights(103))
        assert time.monotonic() - began > 7
    finally:
        resumes.wait(20)


@pytest.mark.slow
def test_a_hub_that_never_answers_is_an_error_within_the_deadline(cluster: None, model: Path, tmp_path: Path) -> None:
    job = Job(model, tmp_path / "journal", timeout=10)
    replica = start_replica(job, 5)
    manager = job.manager(replica)
    manager.update_weights(0)
    job.trainer.perturb(0.02, 1)
    [hub] = hubs(job)
    hub.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"replica-5: expected version 1 within 10 s, got 0"):
        manager.update_weights(1)
    assert time.monotonic() - began < 30
    hub.send_signal(signal.SIGCONT)
    job.trainer.perturb(0.02, 2)
    assert manager.update_weights(2)["sparrow/oldest_version"] == 2
    stop_replica(replica)
    job.end()


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_next_sync_repairs_it(cluster: None, model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        job = Job(model, disk / "journal", audit_every=1)
        replica = start_replica(job, 6)
        manager = job.manager(replica)
        manager.update_weights(0)
        with (disk / "filler").open("wb") as filler, pytest.raises(OSError, match="space"):
            while True:
                filler.write(bytes(1 << 16))
                filler.flush()
        job.trainer.perturb(0.2, 1)
        with pytest.raises(JournalError):
            manager.update_weights(1)
        assert ray.get(generate(replica), timeout=60).stop_reason == "completed"  # it serves on
        (disk / "filler").unlink()
        job.trainer.perturb(0.02, 2)
        assert_synced(manager.update_weights(2))
        stop_replica(replica)
        job.end()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_an_engine_that_dies_is_an_error_and_another_takes_its_place(
    cluster: None, model: Path, tmp_path: Path
) -> None:
    job = Job(model, tmp_path / "journal", audit_every=1)
    first = start_replica(job, 7)
    manager = job.manager(first)
    manager.update_weights(0)
    for step in (1, 2):
        job.trainer.perturb(0.02, step)
        manager.update_weights(step)
    [core] = engine_processes(first, "EngineCore")
    core.send_signal(signal.SIGSTOP)  # so that the sync is under way when it dies
    kills = subprocess.Popen(["sh", "-c", f"sleep 3; kill -KILL {core.pid}"])
    job.trainer.perturb(0.02, 3)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="replica-7"):
        manager.update_weights(3)
    assert time.monotonic() - began < 30
    kills.wait(20)
    manager.remove_replicas([first])
    stop_replica(first)
    second = start_replica(job, 8)  # it loads version 0, and gets one merged delta
    manager.add_replicas([second])
    assert ray.get(generate(second), timeout=60).extra_fields["global_steps"] == 3
    job.trainer.perturb(0.02, 4)
    assert_synced(manager.update_weights(4))
    stop_replica(second)
    job.end()


@pytest.mark.slow
@pytest.mark.parametrize(("load_format", "ranks"), [("dummy", 1), ("dummy", 2), ("auto", 2)])
def test_engines_with_random_weights_get_an_anchor_and_others_do_not(
    cluster: None, model: Path, tmp_path: Path, load_format: str, ranks: int
) -> None:
    """load_format=dummy is verl's default."""
    job = Job(model, tmp_path / "journal", audit_every=1)
    replica = start_replica(job, 9, load_format, ranks)
    manager = job.manager(replica)
    for step in range(3):
        if step:
            job.trainer.perturb(0.02, step)
        assert_synced(manager.update_weights(step))
    anchors = [artifact.target for artifact in job.stored().artifacts() if artifact.kind == "anchor"]
    assert anchors == ([0] if load_format == "dummy" else [])
    stop_replica(replica)
    job.end()


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on_in_its_journal(cluster: None, model: Path, tmp_path: Path) -> None:
    """Its trainer comes back with other weights than it had last, and its engine with version 0."""
    first = Job(model, tmp_path / "journal", audit_every=1)
    replica = start_replica(first, 10)
    manager = first.manager(replica)
    for step in range(3):
        first.trainer.perturb(0.02, step)
        manager.update_weights(step)
    stop_replica(replica)
    first.end()
    second = Job(model, tmp_path / "journal", audit_every=1)
    second.trainer.perturb(0.02, 99)
    replica = start_replica(second, 11)
    manager = second.manager(replica)
    metrics = manager.update_weights(50)
    assert metrics["sparrow/version"] == 3
    assert_synced(metrics)
    second.trainer.perturb(0.02, 100)
    assert_synced(manager.update_weights(51))
    assert second.published_from_anchor(4).keys() == second.full().keys()
    assert ray.get(generate(replica), timeout=60).extra_fields["global_steps"] == 51
    stop_replica(replica)
    second.end()
