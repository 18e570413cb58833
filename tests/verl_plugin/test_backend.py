"""The backend without verl's workers: one process, two Gloo ranks on one host or told that they are on two, and faults.

What the ranks publish is a dict of tensors, handed over by a stand-in for `named_shards` (tests/verl_plugin has others
for that); journal, hub and processes are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry

from helpers import assert_bits_equal, wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.errors import ConfigError, FrameworkUnsupported, JournalLocked
from sparrowrl.verl_plugin import backend
from sparrowrl.verl_plugin.backend import SparrowCheckpointEngine, TrainerWeights

SCRIPT = Path(__file__).with_name("backend_rank.py")
TESTS = Path(__file__).parents[1]
HERE = [socket.gethostname()]
METRICS = ["version", "density", "changed", "payload_bytes", "bits_per_changed", "publish_s", "diff_s", "encode_s"]
METRICS = [f"sparrow/{name}" for name in [*METRICS, "put_s", "commit_s", "anchor"]]


def start(folder: Path, world: int, scenarios: list[str]) -> list[int]:
    """Run the ranks through the scenarios, to their end; their exit statuses."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(SCRIPT), str(folder), *scenarios]
    logs = [(folder / f"{scenarios[0]}-{rank}.log").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=logs[rank], stdout=logs[rank])
        for rank in range(world)
    ]
    try:
        return [rank.wait(300) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()


def result_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def check_journal(folder: Path, journal_dir: Path | None = None) -> list[tuple[int, str]]:
    """Every version that was sent has the bits that the ranks had; the version and kind of all artifacts."""
    journal_dir = journal_dir or folder / "journal"
    credentials = Credentials.load(journal_dir / "credentials.json")
    journal = Journal(journal_dir, credentials.run, credentials.run_key)
    history = torch.load(folder / "history.pt")
    for version, expected in history.items():
        got = materialize(journal, version, history.get(0))
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_bits_equal(got[name], tensor)
    assert journal.drafts() == []
    return [(artifact.target, artifact.kind) for artifact in journal.artifacts()]


def versions_of(result: dict[str, Any]) -> list[int]:
    return [each if isinstance(each, int) else each["version"] for each in result["results"] if each != {}]


# Two ranks


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A folder on a file system of 256 KiB, if this process may mount one."""
    folder = tmp_path_factory.mktemp("two")
    disk = folder / "full_disk" / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, disk: Path | None) -> Path:
    folder = disk.parents[1] if disk is not None else tmp_path_factory.mktemp("two")
    scenarios = ["one_host", "two_hosts", "broken_engine", *(["full_disk"] if disk is not None else [])]
    status = start(folder, 2, scenarios)
    assert status == [0, 0], "".join((folder / f"one_host-{rank}.log").read_text() for rank in range(2))
    return folder


def test_two_ranks_of_one_host_write_the_journal(two: Path) -> None:
    first, second = (result_of(two / "one_host", rank) for rank in range(2))
    assert first["sink"] == second["sink"] == "JournalSink"
    assert first["errors"] == second["errors"] == []
    assert versions_of(first) == [0, 0, 1, 2, 3, 3]
    assert second["results"] == [None, 0, None, None, None, 3]  # what rank 0 says is enough; but not of an anchor
    artifacts = [(0, "anchor"), (0, "origin"), (1, "delta"), (2, "delta"), (3, "delta"), (3, "anchor")]
    assert check_journal(two / "one_host") == artifacts
    sent = [each for each in first["results"] if isinstance(each, dict)]
    assert [each["kind"] for each in sent] == ["origin", "delta", "delta", "delta"]
    assert [each["metrics"]["sparrow/anchor"] for each in sent] == [0.0, 0.0, 0.0, 1.0]
    elements = 6 * 64 * 33 + 33
    for each in sent[1:]:
        metrics = each["metrics"]
        assert list(metrics) == METRICS and all(type(value) is float for value in metrics.values())
        assert metrics["sparrow/version"] == each["version"]
        assert metrics["sparrow/density"] == metrics["sparrow/changed"] / elements
        assert 0.08 < metrics["sparrow/density"] < 0.12
        assert metrics["sparrow/bits_per_changed"] == 8 * metrics["sparrow/payload_bytes"] / metrics["sparrow/changed"]
        parts = sum(metrics[f"sparrow/{part}_s"] for part in ("diff", "encode", "put", "commit"))
        assert 0 < parts < metrics["sparrow/publish_s"]


def test_ranks_of_two_hosts_write_through_a_hub_that_is_killed_meanwhile(two: Path) -> None:
    first, second = (result_of(two / "two_hosts", rank) for rank in range(2))
    assert first["sink"] == second["sink"] == "HubSink"
    assert first["errors"] == second["errors"] == []
    assert versions_of(first) == [0, 1, 2, 3, 3]
    artifacts = [(0, "origin"), (1, "delta"), (2, "delta"), (3, "delta"), (3, "anchor")]
    assert check_journal(two / "two_hosts") == artifacts
    log = (two / "one_host-0.log").read_text()
    assert log.count("ended with code -9") == 2


def test_an_engine_that_one_rank_cannot_read_is_an_error_of_all_and_can_be_repaired(two: Path) -> None:
    first, second = (result_of(two / "broken_engine", rank) for rank in range(2))
    assert first["errors"] == ["SparrowError: rank 1: RuntimeError: out of memory"] * 2
    assert second["errors"] == ["RuntimeError: out of memory"] * 2
    assert versions_of(first) == [0, 1]
    assert check_journal(two / "broken_engine") == [(0, "origin"), (1, "delta")]


def test_a_full_disk_is_an_error_of_all_ranks_and_the_next_sync_repairs_it(two: Path, disk: Path | None) -> None:
    if disk is None:
        pytest.skip("mounting a small file system is not permitted here")
    first, second = (result_of(two / "full_disk", rank) for rank in range(2))
    assert second["filled"] == "No space left on device"
    assert len(first["errors"]) == len(second["errors"]) == 2
    for mine, others in zip(second["errors"], first["errors"], strict=True):
        assert mine.startswith("JournalError: ") and "No space left" in mine
        assert others == f"JournalError: rank 1: {mine.removeprefix('JournalError: ')}"
    assert versions_of(first) == [0, 1, 2, 3]
    assert check_journal(two / "full_disk", disk / "journal") == [
        (0, "origin"), (1, "delta"), (2, "delta"), (3, "delta"),
    ]  # fmt: skip


# A job that comes back


def test_a_job_that_was_killed_goes_on_in_its_journal(tmp_path: Path) -> None:
    assert start(tmp_path, 1, ["a_run@job"]) == [-9]
    assert versions_of(result_of(tmp_path / "job")) == [0, 1]
    history = torch.load(tmp_path / "job" / "history.pt")
    credentials = (tmp_path / "job" / "journal" / "credentials.json").read_bytes()
    assert start(tmp_path, 1, ["resumed@job"]) == [-9]
    goes_on, next_one = result_of(tmp_path / "job")["results"]
    assert (goes_on["version"], goes_on["kind"], goes_on["metrics"]["sparrow/changed"]) == (1, "delta", 0.0)
    assert (next_one["version"], next_one["kind"]) == (2, "delta")
    history |= torch.load(tmp_path / "job" / "history.pt")
    assert start(tmp_path, 1, ["resumed_from_older_weights@job"]) == [0]
    (back,) = result_of(tmp_path / "job")["results"]
    assert (back["version"], back["kind"], back["metrics"]["sparrow/anchor"]) == (3, "anchor", 1.0)
    history |= torch.load(tmp_path / "job" / "history.pt")
    torch.save(history, tmp_path / "job" / "history.pt")
    assert check_journal(tmp_path / "job") == [(0, "origin"), (1, "delta"), (2, "delta"), (3, "anchor")]
    assert (tmp_path / "job" / "journal" / "credentials.json").read_bytes() == credentials


# One process


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SparrowCheckpointEngine]]:
    """Makes backends of a trainer of one rank, whose training engine is a dict."""
    monkeypatch.setattr(backend, "named_shards", dict.items)
    made: list[SparrowCheckpointEngine] = []

    def make(**options: Any) -> SparrowCheckpointEngine:
        made.append(CheckpointEngineRegistry.new("sparrow", bucket_size=1, is_master=True, **options))
        return made[-1]

    yield make
    for each in made:
        each.finalize()


def send(engine: SparrowCheckpointEngine, weights: dict[str, torch.Tensor], dtype: str = "auto") -> dict[str, Any]:
    return asyncio.run(engine.send_weights(TrainerWeights(weights, dtype)))


def status_of(url: str, token: str, method: str = "GET") -> int:
    headers = {"Authorization": f"Bearer {token}", "X-Sparrow-Writer": "w" * 32}
    try:
        return int(urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method)).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_trainer_of_one_process_with_a_journal_that_goes_with_it(
    make: Callable[..., SparrowCheckpointEngine],
) -> None:
    engine = make(run="run-7", timeout=60)
    run = engine.open_run(HERE, False)
    engine.join_run(run, HERE)
    assert run.keys() == {"hub", "journal", "credentials", "writer"}
    assert run["credentials"].keys() == {"run", "run_key", "reader"} and run["credentials"]["run"] == "run-7"
    assert engine.open_run(HERE, False) == run
    weights = {"w": torch.zeros(1000)}
    base = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    for version in range(3):
        weights["w"][version] = version
        assert send(engine, weights)["version"] == version
    assert engine.write_anchor() == 2
    credentials = Credentials("run-7", bytes.fromhex(run["credentials"]["run_key"]), run["credentials"]["reader"])
    journal = Journal(run["journal"], "run-7", credentials.run_key)
    assert_bits_equal(materialize(journal, 2, base)["w"], weights["w"].bfloat16())
    head = f"{run['hub']}/runs/run-7/head"
    assert status_of(head, credentials.reader) == 200
    assert status_of(f"{run['hub']}/runs/run-7/writer", credentials.reader, "POST") == 401
    assert status_of(f"{run['hub']}/runs/run-7/writer", run["writer"], "POST") == 409  # the trainer holds the journal
    engine.finalize()
    engine.finalize()
    assert not Path(run["journal"]).exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{run['hub']}/health", timeout=5)
    engine.join_run(engine.open_run(HERE, False), HERE)  # and from the beginning
    assert send(engine, weights)["version"] == 0


def test_a_hub_that_is_killed_while_the_trainer_writes_the_journal_comes_back(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path
) -> None:
    engine = make(journal_dir=str(tmp_path))
    run = engine.open_run(HERE, False)
    engine.join_run(run, HERE)
    weights = {"w": torch.zeros(1000)}
    send(engine, weights)
    assert engine._rank._hub is not None
    pid = engine._rank._hub.pid
    os.kill(pid, 9)
    weights["w"][5] = 1
    assert send(engine, weights)["version"] == 1  # nothing waits for the hub

    def newest() -> int:
        request = urllib.request.Request(f"{run['hub']}/runs/verl/head")
        request.add_header("Authorization", f"Bearer {run['credentials']['reader']}")
        try:
            return int(json.load(urllib.request.urlopen(request, timeout=5))["version"])
        except OSError:
            return -1

    wait_for(lambda: newest() == 1, 60, "the hub to show version 1")
    assert engine._rank._hub.pid != pid


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("half", torch.float16), ("float16", torch.float16),
        ("float", torch.float32), ("float32", torch.float32),
    ],
)  # fmt: skip
def test_weights_travel_in_the_engines_dtype(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    engine = make(journal_dir=str(tmp_path))
    run = engine.open_run(HERE, False)
    engine.join_run(run, HERE)
    weights = {"w": torch.randn(50)}
    send(engine, weights, dtype)
    engine.write_anchor()
    journal = Journal(tmp_path, "verl", bytes.fromhex(run["credentials"]["run_key"]))
    assert_bits_equal(materialize(journal, 0)["w"], weights["w"].to(expected))


def test_a_dtype_that_engines_cannot_have_is_named(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path
) -> None:
    engine = make(journal_dir=str(tmp_path))
    engine.join_run(engine.open_run(HERE, False), HERE)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.dtype: expected auto, .*, got 'fp8'"):
        send(engine, {"w": torch.zeros(3)}, "fp8")
    assert send(engine, {"w": torch.zeros(3)})["version"] == 0


def test_who_cannot_reach_the_hub_is_refused_before_anything_is_started(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path
) -> None:
    for options in ({}, {"listen": "localhost"}, {"address": "node-0"}):
        engine = make(journal_dir=str(tmp_path / "journal"), **options)
        for hosts, elsewhere in ((HERE, True), (["node-0", "node-1"], False)):
            with pytest.raises(ConfigError, match=r"listen: expected .*give .*\.listen the address of "):
                engine.open_run(hosts, elsewhere)
    assert list(tmp_path.iterdir()) == []


def test_engines_elsewhere_are_told_this_machine_s_address(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path
) -> None:
    import ray

    run = make(journal_dir=str(tmp_path), listen="0.0.0.0").open_run(HERE, True)
    assert run["hub"].startswith(f"http://{ray.util.get_node_ip_address()}:")
    assert status_of(f"{run['hub']}/runs/verl/head", run["credentials"]["reader"]) == 200
    proxied = make(journal_dir=str(tmp_path / "other"), address="https://hub.example.org").open_run(HERE, True)
    assert proxied["hub"] == "https://hub.example.org"


def test_credentials_of_another_run_in_the_journal_s_directory_are_refused(
    make: Callable[..., SparrowCheckpointEngine], tmp_path: Path
) -> None:
    Credentials.new("another").save(tmp_path / "credentials.json")
    with pytest.raises(ConfigError, match="expected credentials of run verl, got those of run another"):
        make(journal_dir=str(tmp_path)).open_run(HERE, False)


def test_two_jobs_in_one_journal_are_refused(make: Callable[..., SparrowCheckpointEngine], tmp_path: Path) -> None:
    first, second = make(journal_dir=str(tmp_path)), make(journal_dir=str(tmp_path))
    for engine in (first, second):
        engine.join_run(engine.open_run(HERE, False), HERE)
    send(first, {"w": torch.zeros(3)})
    with pytest.raises(JournalLocked):
        send(second, {"w": torch.zeros(3)})
    first.finalize()
    assert send(second, {"w": torch.ones(3)})["version"] == 1


def test_what_is_called_too_early_says_so(make: Callable[..., SparrowCheckpointEngine]) -> None:
    engine = make()
    with pytest.raises(ConfigError, match="expected open_run and join_run"):
        send(engine, {})
    with pytest.raises(ConfigError, match="send weights first"):
        engine.write_anchor()
    with pytest.raises(FrameworkUnsupported, match="per trainer rank: 2, got 1"):
        engine.join_run({}, ["node-0", "node-1"])


def test_a_wrong_option_is_an_error_on_both_sides() -> None:
    for side in ({}, {"is_master": True}):
        with pytest.raises(ConfigError, match="there is no such option"):
            CheckpointEngineRegistry.new("sparrow", bucket_size=1, jurnal_dir="/x", **side)


def test_beside_an_engine_there_is_nothing_to_do() -> None:
    engine = CheckpointEngineRegistry.new("sparrow", bucket_size=1)
    assert engine.prepare() is None and engine.open_run(HERE, False) is None
    engine.finalize()
    with pytest.raises(FrameworkUnsupported, match="verl's own manager"):
        asyncio.run(engine.receive_weights())
    with pytest.raises(FrameworkUnsupported, match="verl's own manager"):
        engine.init_process_group(rank=0)
    with pytest.raises(FrameworkUnsupported, match="verl's own manager"):
        SparrowCheckpointEngine.build_topology(1, 1, [None, None])
