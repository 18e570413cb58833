"""Real hubs and agents as processes, and a fake engine rank and a trainer of arbitrary bytes for what they move."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.keys import artifact_name
from sparrowrl.delta.layout import Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.sink import JournalSink, Sink
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.hub import listening
from sparrowrl.transport.node import EngineStatus, NextArtifact, NodeDirectory, RankStatus

COMMAND = [sys.executable, "-m", "sparrowrl.cli.main"]
START_SECONDS = 60.0  # importing torch on a busy machine


class Process:
    """A `sparrowrl` command that runs until it is stopped."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self._output = log.open("ab")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def first_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        assert line, f"the process ended before it was ready:\n{self.log.read_text()}"
        return line

    def end(self, how: int = signal.SIGKILL) -> int:
        """Send a signal (if it still runs) and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        status = self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout, self._output):
            if pipe is not None:
                pipe.close()
        return status


class HubProcess:
    """`sparrowrl hub`, on the same port each time it is started."""

    def __init__(self, folder: Path, journal: Path, credentials: Path) -> None:
        self._folder, self._journal, self._credentials = folder, journal, credentials
        self._port = 0
        self.url = ""
        self.start()

    def start(self) -> None:
        self.running = Process(
            self._folder / "hub.log", "hub", "--journal", str(self._journal), "--credentials", str(self._credentials),
            "--port", str(self._port),
        )  # fmt: skip
        self.url = self.running.first_line()
        self._port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        self.running.end(signal.SIGKILL)


class HubThread:
    """The same hub inside this process, which starts at once."""

    def __init__(self, journal: Path, credentials: Credentials, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        addresses: queue.Queue[str] = queue.Queue()

        async def serve() -> None:
            async with listening(journal, credentials, port=0, **options) as url:
                addresses.put(url)
                await self._stop.wait()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve()), daemon=True)
        self._thread.start()
        self.url = addresses.get(timeout=20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()


class FakeRank(threading.Thread):
    """Stands for the workers of an engine: checks every listed segment, and calls a committed artifact active."""

    def __init__(self, node: NodeDirectory, version: int | None = 0, state: str | None = None) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.staged: list[NextArtifact] = []  # every artifact that was committed, in order
        self.seen: list[NextArtifact | None] = []  # every content of next.json
        self.digests: dict[str, list[str]] = {}  # key -> hashes of the segments' bytes
        self.failures: list[str] = []
        self.activate = True
        self._halt = threading.Event()
        self.say(version, state)

    def say(self, version: int | None, state: str | None = None, condition: Any = "exact") -> None:
        self.version, self.state, self.active = version, state, ""
        self.node.rank(0).write(RankStatus(0, os.getpid(), version, state, condition))
        self.node.engine.write(EngineStatus(version, state, condition))

    def run(self) -> None:
        last: NextArtifact | None = None
        while not self._halt.is_set():
            artifact = self.node.next.read()
            if artifact != last:
                self.seen.append(artifact)
                last = artifact
            if artifact is not None:
                try:
                    self._check(artifact)
                except FileNotFoundError:  # the rule: read next.json again
                    artifact = None
                if artifact is not None and artifact.committed and self.activate and artifact.key != self.active:
                    self._activate(artifact)
            time.sleep(0.002)

    def _check(self, artifact: NextArtifact) -> None:
        for name in artifact.segments:
            data = self.node.key_path(f"{artifact.key}/{name}.seg").read_bytes()
            if blake3(data).hexdigest() != name:
                self.failures.append(f"{artifact.key}/{name}: other bytes")

    def _activate(self, artifact: NextArtifact) -> None:
        manifest = Manifest.decode(self.node.key_path(f"{artifact.key}/manifest").read_bytes(), None)
        if artifact.base is not None and artifact.base != self.version:
            self.failures.append(f"{artifact.key}: at version {self.version}")
        if [segment.digest.hex() for segment in manifest.segments] != list(artifact.segments):
            self.failures.append(f"{artifact.key}: committed without all segments")
        self.digests[artifact.key] = list(artifact.segments)
        self.staged.append(artifact)
        self.say(artifact.target, manifest.target_state.hex())
        self.active = artifact.key

    def stop(self) -> None:
        self._halt.set()
        if self.ident is not None:
            self.join(10)
        assert not self.failures, self.failures


class ByteTrainer:
    """Publishes artifacts of arbitrary bytes with arbitrary fingerprints, which is all that transport sees of them."""

    def __init__(self, sink: Sink, run_key: bytes, seed: int = 0) -> None:
        self.sink, self.run_key = sink, run_key
        self.random = random.Random(seed)
        self.layout = Layout([TensorSpec("a", "BF16", (1 << 20,)), TensorSpec("b", "BF16", (1 << 20,))])
        self.published: dict[int, list[str]] = {}
        sink.lead()
        head = sink.newest()
        if head is None:
            sink.put_layout(self.layout.to_bytes())
            self.version, self.table = 0, [1, 2]
            sink.open(0, "origin").commit(self.manifest("origin", 0, self.table, []))
        else:
            self.version, self.table = head.version, list(head.fingerprints)

    @property
    def state(self) -> str:
        return state_id(self.layout, self.table).hex()

    def manifest(self, kind: str, target: int, table: list[int], segments: list[SegmentRef], **other: Any) -> Manifest:
        delta = kind == "delta"
        changed = {"origin": 0, "delta": 5, "anchor": 1 << 20}[kind] if segments or not delta else 0
        numbers = [0] if delta and segments else [] if delta else [0, 1]
        fields: dict[str, Any] = {
            "run": self.sink.run,
            "kind": kind,
            "codec": {"origin": None, "delta": "fast", "anchor": "dense"}[kind],
            "base": self.version if delta else None,
            "target": target,
            "base_state": state_id(self.layout, self.table) if delta else None,
            "target_state": state_id(self.layout, table),
            "layout": self.layout.id,
            "created_ms": 1,
            "changed": changed * len(numbers),
            "tensors": tuple(TensorChange(number, changed, table[number]) for number in numbers),
            "segments": tuple(segments),
        }
        return Manifest(**{**fields, **other})

    def bodies(self, segments: int, size: int) -> list[bytes]:
        return [self.random.randbytes(max(1, size + self.random.randrange(-7, 8))) for _ in range(segments)]

    def publish(self, segments: int = 3, size: int = 5000, kind: str = "delta") -> int:
        """One more version; its number."""
        return self.write(self.bodies(segments, size), kind)

    def write(self, bodies: list[bytes], kind: str = "delta") -> int:
        target = self.version + 1
        table = [self.random.getrandbits(64) if bodies else self.table[0], self.table[1]]
        draft = self.sink.open(target, self.name(kind))
        refs = [draft.put(body) for body in bodies]
        draft.commit(self.manifest(kind, target, table, refs))
        self.version, self.table = target, table
        self.published[target] = [ref.digest.hex() for ref in refs]
        return target

    def name(self, kind: str = "delta") -> str:
        return artifact_name(kind, self.version if kind == "delta" else None, "fast" if kind == "delta" else "dense")


@pytest.fixture
def credentials() -> Credentials:
    return Credentials.new("run-1")


@pytest.fixture
def credentials_file(tmp_path: Path, credentials: Credentials) -> Path:
    credentials.save(tmp_path / "credentials.json")
    return tmp_path / "credentials.json"


@pytest.fixture
def journal_root(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def hub(journal_root: Path, credentials: Credentials) -> Iterator[HubThread]:
    thread = HubThread(journal_root, credentials)
    yield thread
    thread.stop()


@pytest.fixture
def hub_process(tmp_path: Path, journal_root: Path, credentials_file: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path, journal_root, credentials_file)
    yield process
    process.kill()


@pytest.fixture
def sink(hub: HubThread, credentials: Credentials) -> Iterator[HubSink]:
    made = HubSink(hub.url, credentials)
    yield made
    made.close()


@pytest.fixture
def trainer(sink: HubSink, credentials: Credentials) -> ByteTrainer:
    return ByteTrainer(sink, credentials.run_key)


@pytest.fixture
def byte_trainer() -> type[ByteTrainer]:
    return ByteTrainer


@pytest.fixture
def local_trainer(journal_root: Path, credentials: Credentials) -> Iterator[ByteTrainer]:
    made = JournalSink(journal_root, credentials)
    yield ByteTrainer(made, credentials.run_key)
    made.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeDirectory]:
    made = NodeDirectory.create("engine-1", tmp_path)
    yield made
    made.remove()


@pytest.fixture
def rank(node: NodeDirectory) -> Iterator[FakeRank]:
    """A fake rank that has loaded version 0; start() it to have it stage and activate."""
    made = FakeRank(node)
    yield made
    made.stop()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*arguments: str) -> Process:
        processes.append(Process(tmp_path / "processes.log", *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


@pytest.fixture
def start_agent(
    tmp_path: Path, credentials: Credentials, start_process: Callable[..., Process]
) -> Callable[[str, NodeDirectory], Process]:
    """Start `sparrowrl agent` with an engine's copy of the credentials; returns when it has heard from the hub."""
    copy = tmp_path / "engine-credentials.json"
    credentials.for_engines().save(copy)

    def start(url: str, node: NodeDirectory, wait: bool = True) -> Process:
        process = start_process(
            "agent", "--hub", url, "--token-file", str(copy), "--node-dir", str(node.root), "--engine-id", "engine-1"
        )

        def connected() -> bool:
            assert process.process.poll() is None, process.log.read_text()
            status = node.agent.read()
            return status is not None and status.pid == process.process.pid and status.connected

        if wait:
            wait_for(connected, START_SECONDS, "the agent to hear from the hub")
        return process

    return start
