"""Several real processes publish together, over Gloo and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.sink import JournalSink
from sparrowrl.delta.verify import verify_artifact

SCRIPT = Path(__file__).with_name("publish_rank.py")
CREDENTIALS = Credentials("run", bytes(range(32)), "reader", "writer")


def start(folder: Path, world: int, scenarios: list[str]) -> Path:
    """Run the ranks through the scenarios, to their end."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, str(SCRIPT), str(folder), *scenarios]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        logs = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (folder / scenarios[-1] / "rank-0.json").exists(), logs[0]
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenarios = [
        "plain",
        "replicated",
        "ranges",
        "put",
        "commit",
        "shape",
        "unequal",
        "names",
        "folders",
        "anchor",
        "gathering",
        "death",
    ]
    return start(tmp_path_factory.mktemp("two"), 2, scenarios)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("three"), 3, ["plain", "ranges"])


def result_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def check_bits(folder: Path) -> Journal:
    """Every version has the bits that the ranks had."""
    history = torch.load(folder / "history.pt")
    journal = Journal(folder / "journal", "run", CREDENTIALS.run_key)
    for version, expected in enumerate(history):
        got = materialize(journal, version, history[0])
        for name in expected:
            assert_bits_equal(got[name], expected[name])
    return journal


def check_against_one_process(folder: Path, world: int) -> None:
    """Every version has the bits, the states and the counts that one process would have published."""
    journal = check_bits(folder)
    history = torch.load(folder / "history.pt")
    alone = JournalSink(folder / "alone", CREDENTIALS)
    publisher = Publisher(alone, history[0].items(), anchor_every=2)
    for weights in history[1:]:
        publisher.publish(weights.items())
    assert journal.versions() == [0, 1, 2, 3]
    assert journal.artifacts() == alone.journal.artifacts()
    for version in range(len(history)):
        assert journal.fingerprints(version) == alone.journal.fingerprints(version)
    for artifact in journal.artifacts():
        mine, theirs = (each.manifest(artifact.target, artifact.name) for each in (journal, alone.journal))
        assert (mine.tensors, mine.changed) == (theirs.tensors, theirs.changed)
        assert len(mine.segments) == (0 if artifact.kind == "origin" else world)
        assert verify_artifact(journal, artifact)


def test_two_ranks_publish_what_one_would(two):
    assert [result_of(two / "plain", rank) for rank in range(2)] == [{"versions": [1, 2, 3], "errors": []}] * 2
    check_against_one_process(two / "plain", 2)


def test_three_ranks_publish_what_one_would(three):
    assert [result_of(three / "plain", rank) for rank in range(3)] == [{"versions": [1, 2, 3], "errors": []}] * 3
    check_against_one_process(three / "plain", 3)


def test_replicas_publish_once(two):
    assert [result_of(two / "replicated", rank) for rank in range(2)] == [{"versions": [1, 2, 3], "errors": []}] * 2
    check_against_one_process(two / "replicated", 2)


def test_flat_ranges_are_published_as_the_whole_would_be(two, three):
    for folder, world in ((two, 2), (three, 3)):
        for rank in range(world):
            assert result_of(folder / "ranges", rank) == {"versions": [1, 2, 3], "errors": []}
        check_against_one_process(folder / "ranges", world)


@pytest.mark.parametrize(
    ("scenario", "messages"),
    [
        ("put", ["JournalError: rank 1: injected", "JournalError: injected"]),
        ("commit", ["JournalError: injected", "JournalError: rank 0: injected"]),
        ("shape", ["LayoutError: rank 1: plain: expected", "LayoutError: plain: expected"]),
    ],
)
def test_a_failure_of_one_rank_is_one_of_all_and_can_be_retried(two, scenario, messages):
    for rank, message in enumerate(messages):
        result = result_of(two / scenario, rank)
        assert result["versions"] == [1, 2, 3]
        assert len(result["errors"]) == 1 and result["errors"][0].startswith(message)
    check_against_one_process(two / scenario, 2)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("unequal", "plain: rank 1 holds other bits"),
        ("names", "rank 1 differs"),
        ("folders", "give all ranks the same directory"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(two, scenario, message):
    for rank in range(2):
        result = result_of(two / scenario, rank)
        assert result["versions"] == [] and len(result["errors"]) == 1 and message in result["errors"][0]


def test_all_ranks_write_an_anchor_or_all_raise(two):
    for rank, message in enumerate(["JournalError: rank 1: injected", "JournalError: injected"]):
        assert result_of(two / "anchor", rank) == {"versions": [1, 2, 3, 3, 3], "errors": [message]}
    journal = check_bits(two / "anchor")
    assert [artifact.target for artifact in journal.artifacts() if artifact.kind == "anchor"] == [2, 3]
    for name, expected in torch.load(two / "anchor" / "history.pt")[3].items():
        assert_bits_equal(materialize(journal, 3)[name], expected)


def test_a_rank_that_fails_half_way_goes_on_gathering_with_the_others(two):
    for rank, message in enumerate(["JournalError: rank 1: injected", "JournalError: injected"]):
        assert result_of(two / "gathering", rank) == {"versions": [1, 2, 3], "errors": [message]}
    check_bits(two / "gathering")


def test_a_rank_that_dies_is_an_error_of_the_others(two):
    result = result_of(two / "death", 0)
    assert result["versions"] == [1, -1]
    assert result["errors"][0].startswith("TransportError: ranks: ")
    journal = Journal(two / "death" / "journal", "run", CREDENTIALS.run_key)
    assert journal.newest() == 1
    with journal.write_lock():
        assert journal.drafts() == []
