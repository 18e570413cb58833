"""The trainer's hub as a child process, and the directory that it serves: real processes, killed in every way."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.errors import ConfigError, DeadlineExceeded, TransportError
from sparrowrl.job import hub_process
from sparrowrl.job.hub_process import HubProcess
from sparrowrl.job.run_directory import RunDirectory

SECONDS = 60.0

# Owns a temporary run directory with its hub, says where they are, and waits.
OWNER = """
import sys, time
from sparrowrl.job.hub_process import HubProcess
from sparrowrl.job.run_directory import RunDirectory
directory = RunDirectory(None, "a-run")
options = {"host": "127.0.0.1", "port": 0, "keep_versions": 0, "start_seconds": 60}
hub = HubProcess(directory.path, directory.credentials_file, **options)
print(directory.path, hub.pid, hub.port, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "close":
    hub.close(); hub.close()
    directory.close(); directory.close()
"""


def answers(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HubProcess]]:
    directory = RunDirectory(str(tmp_path / "journal"), "a-run")
    hubs: list[HubProcess] = []

    def start(**options: Any) -> HubProcess:
        defaults = {"host": "127.0.0.1", "port": 0, "keep_versions": 0, "start_seconds": SECONDS}
        hubs.append(HubProcess(directory.path, directory.credentials_file, **{**defaults, **options}))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


# The hub


def test_a_killed_hub_is_back_on_its_port_and_a_closed_one_is_not(
    start: Callable[..., HubProcess], caplog: pytest.LogCaptureFixture
) -> None:
    hub = start(keep_versions=3)
    assert answers(hub.port)
    for _ in range(2):
        pid = hub.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: hub.pid != pid and answers(hub.port), SECONDS, "the next hub")
    assert [record.message.split(";")[-1] for record in caplog.records if "ended with code -9" in record.message] == [
        " the next starts in 0.5 s",
        " the next starts in 1.0 s",
    ]
    pid = hub.pid
    hub.close()
    assert not is_alive(pid) and not answers(hub.port)


def test_a_hub_that_lived_long_is_started_again_at_once(
    start: Callable[..., HubProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_process, "_STEADY_S", 0.0)
    hub = start()
    os.kill(hub.pid, signal.SIGKILL)
    wait_for(lambda: "the next starts in 0.0 s" in caplog.text, SECONDS, "the next hub")
    hub.close()  # while it starts


def test_a_hub_whose_port_was_taken_meanwhile_tries_until_it_is_free(
    start: Callable[..., HubProcess], caplog: pytest.LogCaptureFixture
) -> None:
    hub = start()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(hub.pid, signal.SIGKILL)
        wait_for(lambda: not answers(hub.port), SECONDS, "the hub's end")
        thief.bind(("127.0.0.1", hub.port))
        thief.listen()
        wait_for(lambda: "did not come back: hub: cannot listen" in caplog.text, SECONDS, "a hub that cannot listen")
    wait_for(lambda: answers(hub.port), SECONDS, "the hub")


def test_what_the_hub_refuses_is_raised_as_it_says_it(start: Callable[..., HubProcess]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"hub: cannot listen on 127\.0\.0\.1 port"):
            start(port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match=r"hub: cannot listen on 192\.0\.2\.1"):
        start(host="192.0.2.1")


def test_a_hub_that_does_not_start_in_time_is_ended(start: Callable[..., HubProcess]) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="waited 0 s for the hub to listen; it said nothing"):
        start(start_seconds=0.0)
    assert time.monotonic() - began < 30


def test_a_hub_that_dies_without_a_word_of_ours_is_a_transport_error(
    start: Callable[..., HubProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TransportError, match="ended with code 1: it said nothing"):
        start()


# The directory


def test_a_run_directory_that_was_asked_for_stays_with_its_credentials(tmp_path: Path) -> None:
    first = RunDirectory(str(tmp_path / "a" / "b"), "run-1")
    assert first.credentials_file == tmp_path / "a" / "b" / "credentials.json"
    assert stat.S_IMODE(first.credentials_file.stat().st_mode) == 0o600
    first.close()
    second = RunDirectory(str(tmp_path / "a" / "b"), "run-1")
    assert second.credentials == first.credentials and second.credentials.writer


def test_credentials_of_another_run_or_of_an_engine_are_refused(tmp_path: Path) -> None:
    before = RunDirectory(str(tmp_path), "run-1").credentials_file.read_bytes()
    with pytest.raises(ConfigError, match="expected credentials of run run-2, got those of run run-1"):
        RunDirectory(str(tmp_path), "run-2")
    assert (tmp_path / "credentials.json").read_bytes() == before
    (tmp_path / "engine").mkdir()
    Credentials.new("run-1").for_engines().save(tmp_path / "engine" / "credentials.json")
    with pytest.raises(ConfigError, match="got a copy for engines"):
        RunDirectory(str(tmp_path / "engine"), "run-1")
    (tmp_path / "engine" / "credentials.json").write_text("")
    with pytest.raises(ConfigError, match="credentials file"):
        RunDirectory(str(tmp_path / "engine"), "run-1")


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"journal_dir .*file/x: cannot write there: Not a directory"):
        RunDirectory(str(tmp_path / "file" / "x"), "run-1")


def test_no_room_for_temporary_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="give a journal_dir"):
        RunDirectory(None, "run-1")


@pytest.mark.parametrize("how", ["close", "exit", "kill"])
def test_a_temporary_directory_and_its_hub_go_with_their_owner(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", OWNER, "wait" if how == "kill" else how]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert owner.stdout is not None
    with owner.stdout as output:
        path, hub_pid, port = output.readline().split()
    if how == "kill":
        assert Path(path).parent == tmp_path and (Path(path) / "credentials.json").exists()
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o700
        assert answers(int(port))
        owner.kill()
    owner.wait(SECONDS)
    wait_for(lambda: not is_alive(int(hub_pid)), SECONDS, "the hub to leave")
    wait_for(lambda: not Path(path).exists(), SECONDS, "the directory to go")
    assert list(tmp_path.iterdir()) == []
