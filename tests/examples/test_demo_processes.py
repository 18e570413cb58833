"""Children of the demo: how they end, and what is said of it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from helpers import wait_for
from sparrowrl.errors import ConfigError, TransportError
from sparrowrl.examples.gsm8k_grpo import processes
from sparrowrl.examples.gsm8k_grpo.processes import Children, check_port_free, free_port

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def start(children: Children, tmp_path: Path, code: str) -> processes.Child:
    return children.start("helper", [sys.executable, "-c", code], tmp_path / "helper.log", os.environ)


async def test_a_child_that_ends_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    children = Children()
    start(children, tmp_path, "raise RuntimeError('no such luck')")
    with pytest.raises(TransportError, match=r"the helper ended with exit status 1; see .*helper\.log"):
        await children.watch()
    words = children.last_words()
    assert words[:2] == [f"{tmp_path / 'helper.log'} says:", "RuntimeError: no such luck"]
    assert "Traceback (most recent call last):" in words
    await children.stop()


async def test_stop_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    children = Children()
    child = start(children, tmp_path, STUBBORN)
    wait_for(lambda: child.log.read_text().strip() != "", 60, "the grandchild")
    grandchild = int(child.log.read_text())
    assert alive(grandchild)
    await children.stop()
    wait_for(lambda: not alive(grandchild), 10, "the grandchild's end")
    assert child.ended
    await children.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_missing_program_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot start the helper"):
        Children().start("helper", ["/no/such/program"], tmp_path / "helper.log", os.environ)


def test_a_used_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            check_port_free(taken.getsockname()[1])
    check_port_free(free_port())
