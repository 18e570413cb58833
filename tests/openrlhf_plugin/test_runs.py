"""Whole training jobs: OpenRLHF's own trainers and DeepSpeed's, vLLM engines, six synced steps and more each."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("openrlhf")

from openrlhf_runs import Run, run, start

from helpers import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

Background = Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]]
CHECKPOINTS = "--ckpt.save_steps=2"
RESUME = "--ckpt.load_enable"


def test_it_trains_as_with_openrlhfs_own_full_tensors(tmp_path: Path) -> None:
    """From the same seeds, each request with one of its own: the same weights at every step, bit for bit."""
    ours = run(tmp_path / "ours")
    ours.assert_exact()
    stock = run(tmp_path / "stock", backend="full_tensors")
    assert len(ours.states) == 7  # version 0, of which OpenRLHF sends nothing, and six steps
    for step, (our_state, stock_state) in enumerate(zip(ours.states[1:], stock.states, strict=True), 1):
        assert our_state["tensors"] == stock_state["tensors"], f"step {step}"
    assert ours.samples == stock.samples
    assert ours.states[-1]["tensors"] != ours.states[0]["tensors"]


def test_async_with_partial_rollout_syncs_requests_in_flight(tmp_path: Path) -> None:
    """ZeRO-3 on two ranks, two engines: nothing is paused or aborted, and every version is exact in both."""
    long = ("--rollout.max_new_tokens=300", "--data.max_len=364", "--rollout.vllm_generate_batch_size=8")
    done = run(
        tmp_path, *long, "--train.async_queue_size=2", mode="async", zero_stage=3, trainer_ranks=2, engines=2, steps=8
    )
    done.assert_exact(engines=2)
    in_flight = [each for engine in (0, 1) for each in done.activations(engine) if each["requests_in_flight"]]
    assert in_flight
    assert any(each["tokens_during_transfer"] for each in in_flight)


def test_engines_that_share_the_trainers_devices_and_sleep_while_it_trains(tmp_path: Path) -> None:
    """Their memory pool is a stand-in (sleeping.py). They sync with their weights awake, and their caches asleep."""
    shared = ("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep")
    run(tmp_path, *shared, engines=2, trainer_ranks=2).assert_exact(engines=2)
    log = (tmp_path / "job" / "openrlhf.log").read_text()
    assert log.count("seconds to wake up tags ['weights']") >= 12


def test_an_engine_that_does_not_apply_a_version_ends_the_job_at_that_step(tmp_path: Path) -> None:
    """The control: with OpenRLHF's own sync such a job trains on with stale samples, and nobody notices."""
    failed = run(tmp_path, engines=2, fails=True, environment={"SPARROWRL_TEST_SKIP": "engine-1:3"})
    assert [state["version"] for state in failed.states] == [0, 1, 2, 3]
    assert [report["version"] for report in failed.reports(0)][:3] == [0, 1, 2]
    log = (tmp_path / "job" / "openrlhf.log").read_text()
    said = [line for line in log.splitlines() if line.startswith("FingerprintMismatch: ")]
    assert len(said) == 1
    for part in ("engine-1: ", "/v/3/2.fast: ", "expected the changed weights to sum to 0x", "read back 0x"):
        assert part in said[0]


@pytest.fixture
def background() -> Iterator[Background]:
    """Jobs that are given to it are ended with all that they have started."""
    started: list[subprocess.Popen[bytes]] = []

    def keep(job: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        started.append(job)
        return job

    yield keep
    for job in started:
        job.terminate()
        job.wait(60)


def reached(folder: Path, version: int) -> Callable[[], bool]:
    """Whether the trainer of a job has published a version."""
    file = folder / "records" / "trainer.jsonl"
    return lambda: file.exists() and file.read_text().count("\n") > version


def children(job: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    """The processes of a job whose command line or title has `name` in it."""
    found = psutil.Process(job.pid).children(recursive=True)
    return [each for each in found if name in " ".join([each.name(), *each.cmdline()])]


def test_a_killed_trainer_resumes_in_a_new_journal_with_engines_of_two_ranks(
    tmp_path: Path, background: Background
) -> None:
    """Engines begin with the base model, and the run with the checkpoint: an anchor brings them to it. OpenRLHF starts
    engines of several ranks by vLLM's Ray executor.
    """
    folder = tmp_path / "run"
    job = background(start(folder, CHECKPOINTS, steps=40))
    wait_for(reached(folder, 5), 300, "version 5")
    for process in children(job, "SparrowPolicyActor"):
        process.kill()
    assert job.wait(120) == 1
    assert "EngineDied: a process of the job" in (folder / "job" / "openrlhf.log").read_text()
    before = Run(folder, folder / "records", "").states
    two_ranks = ("--vllm.enable_prefix_caching", CHECKPOINTS, RESUME)
    another = tmp_path / "another"
    resumed = run(folder, *two_ranks, journal=another, records="resumed", steps=12, tensor_parallel_size=2)
    resumed.assert_exact(journal=another)
    assert resumed.states[0]["version"] == 0
    assert resumed.states[0]["tensors"] in [state["tensors"] for state in before[2::2]], "the weights of no checkpoint"


def test_an_engine_killed_in_the_middle_of_a_sync_ends_the_job_which_resumes_in_its_journal(
    tmp_path: Path, background: Background
) -> None:
    folder, journal = tmp_path / "run", tmp_path / "journal"
    environment = {"SPARROWRL_TEST_HANG": "engine-1:5"}
    job = background(start(folder, CHECKPOINTS, journal=journal, environment=environment, steps=40, engines=2))
    wait_for((folder / "records" / "hanging").exists, 300, "engine-1 to hang")
    os.kill(int((folder / "records" / "hanging").read_text()), signal.SIGKILL)
    assert job.wait(120) == 1
    assert "EngineDied: engine-1: its engine died while version 5 was on its way" in (folder / "said").read_text()
    newest = Run(folder, folder / "records", "").states[-1]
    resumed = run(folder, CHECKPOINTS, RESUME, journal=journal, records="resumed", steps=9, engines=2)
    resumed.assert_exact(engines=2, journal=journal)
    begun = resumed.states[0]
    assert begun["version"] == newest["version"] + (begun["tensors"] != newest["tensors"])
