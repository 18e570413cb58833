"""kill -9 of trainer, hub, agent and engine worker at random moments, with everything real: processes, HTTP, vLLM."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import assert_bits_equal, wait_for
from sparrowrl.config import Credentials
from sparrowrl.transport.node import remove_stale

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ENGINE = "chaos"
VICTIMS = ("trainer", "agent", "hub", "worker")
ROUNDS = 2
SOON, START, LEASE = 60.0, 240.0, 90.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """A test run that is itself killed leaves no cluster behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Cluster:
    """One trainer, one hub, one engine, each a process that can be killed and started again."""

    def __init__(self, root: Path, checkpoint: Path) -> None:
        self.root, self.checkpoint = root, checkpoint
        self.credentials = Credentials.new("chaos")
        self.credentials.save(root / "credentials.json")
        self.credentials.for_engines().save(root / "engine.json")
        (weights,) = checkpoint.glob("*.safetensors")
        self.saved = root / "trainer.safetensors"
        shutil.copy(weights, self.saved)
        self.hub_port, self.engine_port = _free_port(), _free_port()
        self.hub_url = f"http://127.0.0.1:{self.hub_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (root / "export").mkdir()

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        with open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            )

    def start_hub(self) -> None:
        command = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--journal", str(self.root / "journal")]
        command += ["--credentials", str(self.root / "credentials.json"), "--port", str(self.hub_port)]
        self.start("hub", command)
        wait_for(lambda: self._get("/health") is not None, SOON, "the hub")

    def start_trainer(self) -> None:
        script = str(Path(__file__).with_name("trainer_process.py"))
        arguments = [self.hub_url, str(self.root / "credentials.json"), str(self.saved), "0.3"]
        self.start("trainer", [sys.executable, script, *arguments])

    def start_engine(self) -> None:
        self.engine_port = _free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(self.engine_port), "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "m"]
        command += ["--weight-transfer-config", '{"backend": "sparrow"}']
        environment = {
            "SPARROWRL_HUB": self.hub_url,
            "SPARROWRL_TOKEN_FILE": str(self.root / "engine.json"),
            "SPARROWRL_ENGINE_ID": ENGINE,
            "SPARROWRL_EXPORT_DIR": str(self.root / "export"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.start("engine", command, environment)

    def wait_engine(self) -> None:
        def healthy() -> bool:
            assert self.processes["engine"].poll() is None, self.tail("engine")
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self.engine_port}/health"
                return bool(urllib.request.urlopen(url, timeout=5).status == 200)
            return False

        wait_for(healthy, START, f"the engine: {self.tail('engine')}")

    def tail(self, name: str) -> str:
        return "\n".join((self.root / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def _get(self, path: str, token: str | None = None, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {token or self.credentials.reader}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.hub_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=40) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError):
            return None

    def newest(self) -> int:
        feed = self._get(f"/runs/{self.credentials.run}/feed?engine=test&wait=0")
        return -1 if feed is None or feed["newest"] is None else int(feed["newest"])

    def engine(self) -> dict[str, Any]:
        answer = self._get(f"/runs/{self.credentials.run}/engines")
        return dict(((answer or {}).get("engines") or {}).get(ENGINE) or {})

    def engine_is_exact_at(self, version: int) -> bool:
        status = self.engine()
        return (
            status.get("condition") == "exact"
            and (status.get("version") or 0) >= version
            and bool(status.get("fingerprint_ok"))
        )

    def ask(self, kind: str) -> dict[str, Any]:
        path = f"/runs/{self.credentials.run}/engines/{ENGINE}/requests"
        number = self._get(path, self.credentials.writer, {"kind": kind})["id"]

        def answers() -> list[dict[str, Any]]:
            return [answer for answer in self.engine().get("answers", []) if answer["id"] == number]

        wait_for(lambda: bool(answers()), SOON, f"the answer to {kind}")
        return answers()[0]

    def node(self) -> Path:
        """The node directory of the engine that runs now."""
        pids = _descendants(self.processes["engine"].pid)
        every = Path("/dev/shm").glob(f"sparrowrl-{ENGINE}-*")
        found = [path for path in every if int(path.name.split("-")[-1]) in pids]
        assert len(found) == 1, found
        return found[0]

    def pid_of(self, victim: str) -> int:
        if victim == "agent":
            return int(json.loads((self.node() / "agent.json").read_text())["pid"])
        if victim == "worker":
            return int(json.loads((self.node() / "ranks" / "0.json").read_text())["pid"])
        return self.processes[victim].pid

    def kill(self, victim: str) -> None:
        os.kill(self.pid_of(victim), signal.SIGKILL)
        if victim in self.processes:
            self.processes[victim].wait(SOON)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        remove_stale()


def _descendants(pid: int) -> set[int]:
    pids = {pid}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            pids |= _descendants(int(child))
    return pids


class Load:
    """Clients that keep two requests going; an engine that is down is part of the game."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.stop, self.done = cluster, threading.Event(), 0
        self.threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(2)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        body = {"model": "m", "prompt": f"client {number} asks", "max_tokens": 100, "ignore_eos": True}
        while not self.stop.is_set():
            url = f"http://127.0.0.1:{self.cluster.engine_port}/v1/completions"
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.done += bool(json.load(answer)["choices"])
            except (OSError, urllib.error.URLError):
                self.stop.wait(0.3)

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(90)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    from sparrowrl.examples.gsm8k_grpo.model import TINY, prepare

    made = Cluster(tmp_path, prepare(TINY, tmp_path / "cache", lambda line: None))
    try:
        made.start_hub()
        made.start_trainer()
        wait_for(lambda: made.newest() >= 0, SOON, "version 0")
        made.start_engine()
        made.wait_engine()
        yield made
    finally:
        made.stop()


def _verify_journal(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "sparrowrl.cli.main", "verify", str(cluster.root / "journal")]
    done = subprocess.run(
        [*command, "--key", str(cluster.root / "credentials.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_at_random_moments(cluster: Cluster) -> None:
    moments = random.Random(7)
    load = Load(cluster)
    for _ in range(ROUNDS):
        for victim in VICTIMS:
            before = cluster.newest()
            wait_for(lambda: cluster.newest() >= before + 2, LEASE, "two more versions")  # noqa: B023
            time.sleep(moments.uniform(0.0, 0.6))  # the random moment, not a wait for anything
            cluster.kill(victim)
            if victim == "hub":
                cluster.start_hub()
            elif victim == "trainer":
                cluster.start_trainer()
            elif victim == "worker":
                cluster.processes["engine"].wait(SOON)  # vLLM ends a server whose worker is gone
                cluster.start_engine()
                cluster.wait_engine()
            newest = cluster.newest()
            assert newest >= before
            wait_for(
                lambda: cluster.newest() >= newest + 2 and cluster.engine_is_exact_at(newest + 2),  # noqa: B023
                LEASE,
                f"an exact engine at version {newest + 2} after the {victim} was killed: {cluster.engine()}",
            )
    # Without the trainer: the engine alone comes back, to the newest version.
    cluster.kill("trainer")
    newest = cluster.newest()
    cluster.kill("worker")
    cluster.processes["engine"].wait(SOON)
    cluster.start_engine()
    cluster.wait_engine()
    wait_for(lambda: cluster.engine_is_exact_at(newest), SOON, f"version {newest} again: {cluster.engine()}")
    load.end()
    assert load.done > 0
    assert cluster.ask("audit")["ok"]
    exported = cluster.ask("export")
    assert exported["ok"], exported
    _verify_journal(cluster)
    _compare_with_materialized(cluster, newest)


def _compare_with_materialized(cluster: Cluster, version: int) -> None:
    from safetensors.torch import load_file

    out = cluster.root / "materialized.safetensors"
    command = [sys.executable, "-m", "sparrowrl.cli.main", "materialize", "--journal", str(cluster.root / "journal")]
    command += ["--run", cluster.credentials.run, "--version", str(version), "--base", str(cluster.checkpoint)]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = load_file(out)
    got = load_file(cluster.root / "export" / f"{ENGINE}-v{version}.safetensors")
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bits_equal(got[name], tensor)
