from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.transport.node import EngineStatus, ErrorInfo


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    credentials = Credentials.new("run")
    credentials.save(tmp_path / "key.json")
    credentials.for_engines().save(tmp_path / "engine.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--journal", str(tmp_path / "journal")]
    command += ["--credentials", str(tmp_path / "key.json"), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
        except OSError:
            return False

    try:
        wait_for(healthy, 30, "the hub")
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _report(hub: str, key: Path, engine: str, status: EngineStatus) -> None:
    headers = {"Authorization": f"Bearer {Credentials.load(key).reader}", "Content-Type": "application/json"}
    body = json.dumps(asdict(status)).encode()
    urllib.request.urlopen(urllib.request.Request(f"{hub}/runs/run/engines/{engine}", body, headers), timeout=20)


def test_a_line_for_each_engine(hub: str, tmp_path: Path, sparrowrl: Callable[..., Any]) -> None:
    key = tmp_path / "engine.json"
    assert sparrowrl("engines", "--hub", hub, "--credentials", key).out == "no engine has reported yet\n"
    good = EngineStatus(version=7, state="00", condition="exact", fingerprint_ok=True, audited=0, audit_ok=True)
    lost = ErrorInfo("UnknownState", "publish an anchor")
    _report(hub, key, "a", good)
    _report(hub, key, "b", EngineStatus(version=6, condition="unknown", fingerprint_ok=False, error=lost))
    done = sparrowrl("engines", "--hub", hub, "--credentials", key)
    _, first, second = done.out.splitlines()
    assert done.status == 0
    assert first.split()[:5] == ["a", "7", "exact", "ok", "0"]
    assert second.split()[:5] == ["b", "6", "unknown", "WRONG", "-"]
    assert second.endswith("UnknownState: publish an anchor")
    everything = json.loads(sparrowrl("engines", "--hub", hub, "--credentials", key, "--json").out)
    assert everything["a"]["version"] == 7 and everything["b"]["error"]["error"] == "UnknownState"


def test_no_hub_is_one_line(tmp_path: Path, sparrowrl: Callable[..., Any]) -> None:
    Credentials.new("run").save(tmp_path / "key.json")
    done = sparrowrl("engines", "--hub", "http://127.0.0.1:9", "--credentials", tmp_path / "key.json")
    assert done.status == 4 and len(done.err.splitlines()) == 1
