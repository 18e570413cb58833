from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from helpers import wait_for
from sparrowrl.errors import ConfigError, CorruptData
from sparrowrl.transport.node import (
    Activation,
    AgentStatus,
    Answer,
    EngineStatus,
    ErrorInfo,
    NextArtifact,
    NodeDirectory,
    RankStatus,
    Request,
    remove_stale,
)

_OWN_A_DIRECTORY = """
import sys
import threading
from contextlib import suppress
from pathlib import Path
from sparrowrl.transport.node import NodeDirectory
print(NodeDirectory.create("engine", Path(sys.argv[1])).root, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return NodeDirectory.create("engine-1", tmp_path)


def test_create_makes_a_private_directory_that_others_open(tmp_path: Path, node: NodeDirectory) -> None:
    assert node.root == tmp_path / f"sparrowrl-engine-1-{os.getpid()}"
    assert node.root.stat().st_mode & 0o777 == 0o700
    assert NodeDirectory.open(node.root).root == node.root
    node.remove()
    assert not node.root.exists()
    node.remove()


def test_a_name_in_use_is_refused(tmp_path: Path, node: NodeDirectory) -> None:
    with pytest.raises(ConfigError, match="engine-1"):
        NodeDirectory.create("engine-1", tmp_path)
    assert node.root.exists()


@pytest.mark.parametrize("engine_id", ["", "../x", "a/b", "-a", "a" * 65])
def test_a_bad_engine_id_is_refused(tmp_path: Path, engine_id: str) -> None:
    with pytest.raises(ConfigError, match="engine id"):
        NodeDirectory.create(engine_id, tmp_path)


def test_open_refuses_what_is_missing_or_open_to_others(tmp_path: Path, node: NodeDirectory) -> None:
    with pytest.raises(ConfigError, match="nothing-here"):
        NodeDirectory.open(tmp_path / "nothing-here")
    node.root.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        NodeDirectory.open(node.root)


def test_a_killed_owner_s_directory_goes_and_a_living_one_s_stays(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWN_A_DIRECTORY, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    root = Path(owner.stdout.readline().strip())
    assert root.is_dir()
    assert remove_stale(tmp_path) == []
    assert root.is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    wait_for(lambda: remove_stale(tmp_path) == [root], 5, "the lock of the killed owner to go")
    assert not root.exists()


def test_stale_removal_leaves_other_names_alone(tmp_path: Path) -> None:
    for name in ("sparrowrl-x", "other-engine-1", "sparrowrl-a-1"):  # the last has no lock: its owner is just making it
        (tmp_path / name).mkdir()
    assert remove_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_records_come_back_as_written(node: NodeDirectory) -> None:
    activation = Activation(3, 2, "delta", 10, 100, 1.5, 2.0, 0.25, 4, 0, 17, True)
    error = ErrorInfo.of(CorruptData("bad"))
    engine = EngineStatus(3, "ab", "exact", True, 3, True, (activation,), (Answer(1, "audit", True, "ok"),), error)
    node.engine.write(engine)
    assert node.engine.read() == engine
    node.next.write(NextArtifact("runs/r/v/1/0.fast", "delta", 0, 1, ("aa", "bb"), True))
    assert node.next.read() == NextArtifact("runs/r/v/1/0.fast", "delta", 0, 1, ("aa", "bb"), True)
    node.request.write(Request(7, "export"))
    assert node.request.read() == Request(7, "export")
    agent = AgentStatus(os.getpid(), "http://127.0.0.1:1", True, 5, 1.0, 3, error)
    node.agent.write(agent)
    assert node.agent.read() == agent
    for rank in (1, 0):
        node.rank(rank).write(RankStatus(rank, 9, 1, "cd", "unknown", None, 0, 0.5, None))
    assert list(node.ranks()) == [0, 1]
    assert node.ranks()[1] == RankStatus(1, 9, 1, "cd", "unknown", None, 0, 0.5, None)


def test_nothing_is_written_as_an_empty_object(node: NodeDirectory) -> None:
    assert node.next.read() is None
    node.next.write(None)
    assert node.next.path.read_text() == "{}"
    assert node.next.read() is None


def test_a_change_is_seen_even_within_one_tick_of_the_clock(node: NodeDirectory) -> None:
    for number in range(300):
        node.request.write(Request(100 + number, "audit"))
        assert node.request.read() == Request(100 + number, "audit")


def test_an_old_unchanged_file_is_not_parsed_again(node: NodeDirectory) -> None:
    node.request.write(Request(1, "audit"))
    os.utime(node.request.path, (1, 1))
    assert node.request.read() is node.request.read()


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "3", '{"rank": 0}', '{"rank": "0", "pid": 1}', '{"rank": true, "pid": 1}',
        '{"rank": 0, "pid": 1, "condition": "fine"}', '{"rank": 0, "pid": 1, "error": {"error": 3, "message": ""}}',
        '{"rank": 0, "pid": 1, "version": 1.5}',
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_corrupt(node: NodeDirectory, text: str) -> None:
    node.rank(0).path.write_text(text)
    with pytest.raises(CorruptData):
        node.ranks()


def test_keys_that_a_newer_writer_adds_are_left_out(node: NodeDirectory) -> None:
    node.rank(0).path.write_text('{"rank": 0, "pid": 1, "novelty": 3}')
    assert dataclasses.asdict(node.ranks()[0])["rank"] == 0


@pytest.mark.parametrize("key", ["", "/etc/passwd", "runs/../x", "runs//x", "runs/.", "next.json"])
def test_a_key_cannot_leave_the_directory(node: NodeDirectory, key: str) -> None:
    with pytest.raises(CorruptData, match="key"):
        node.key_path(key)


def test_a_directory_that_others_still_write_into_is_gone_when_it_is_removed(tmp_path: Path) -> None:
    node = NodeDirectory.create("written", tmp_path)
    writes, stop = 0, threading.Event()

    def write() -> None:
        nonlocal writes
        while not stop.is_set():
            with suppress(OSError):
                node.next.write(None)
                writes += 1

    writer = threading.Thread(target=write)
    writer.start()
    wait_for(lambda: writes > 10, 10, "some writes")
    node.remove()
    assert list(tmp_path.iterdir()) == []
    stop.set()
    writer.join(10)
    (tmp_path / f".{node.root.name}").mkdir()  # as if the remover had been killed half-way
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []
