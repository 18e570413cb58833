"""Ranks of an agreement that can be held up, stopped or killed before any step they take."""

from __future__ import annotations

import builtins
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparrowrl.errors import SparrowError, UnknownState
from sparrowrl.transport import node
from sparrowrl.vllm_worker_ext import agreement
from sparrowrl.vllm_worker_ext.agreement import Agreement

STEPS = ("open", "listdir", "link", "unlink", "replace")
UNKNOWN = "unknown state"


class _Gated:
    """The module `os`, with a call of `gate(name)` before each step."""

    def __init__(self, gate: Callable[[str], None]) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return gated(real, self._gate, f"os.{name}") if name in STEPS else real


def gated(real: Callable[..., Any], gate: Callable[[str], None], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        gate(name)
        return real(*args, **kwargs)

    return call


def gate_steps(patch: pytest.MonkeyPatch, gate: Callable[[str], None]) -> None:
    """Have `gate` called before each step on files that an Agreement takes."""
    patch.setattr(agreement, "os", _Gated(gate))
    patch.setattr(node, "os", _Gated(gate))
    patch.setattr(agreement, "open", gated(builtins.open, gate, "open"), raising=False)


class Killed(BaseException):
    """What ends a rank that was killed; no handler runs another step after it."""


@dataclass
class _Rank:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wakes: float = 0.0
    steps: int = 0
    ended: bool = False
    killed: bool = False


class Schedule:
    """Runs ranks as threads of which one goes at a time, one step on files per turn, on a clock of its own.

    The clock stands still except when a rank that sleeps gets its turn: it then jumps to the end of that sleep. So
    whoever gets no turn for a while hangs, and its deadline passes. Two aborts are kept, so that some are soon removed.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.kills: dict[int, int] = {}  # rank -> the step before which it dies
        self.failures: dict[int, set[int]] = {}  # rank -> the steps that fail for want of room
        self.ranks: dict[int, _Rank] = {}
        self._here = threading.local()
        self._back = threading.Semaphore(0)
        gate_steps(patch, self._gate)
        patch.setattr(agreement, "_ABORTS_KEPT", 2)
        patch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def start(self, bodies: dict[int, Callable[[], None]]) -> None:
        self.ranks = {number: _Rank() for number in bodies}
        for number, body in bodies.items():
            threading.Thread(target=self._run, args=(self.ranks[number], number, body), daemon=True).start()

    def turn(self, number: int) -> bool:
        """Let one rank take one step; whether there was one to take."""
        rank = self.ranks[number]
        if rank.ended:
            return False
        self.now = max(self.now, rank.wakes)
        rank.go.release()
        assert self._back.acquire(timeout=60), "a rank neither took its step nor ended"
        return True

    def finish(self) -> None:
        """Turns for all, always for the one that wakes first, until all have ended."""
        while waiting := [number for number, rank in self.ranks.items() if not rank.ended]:
            self.turn(min(waiting, key=lambda number: (max(self.now, self.ranks[number].wakes), number)))

    def _run(self, rank: _Rank, number: int, body: Callable[[], None]) -> None:
        self._here.rank, self._here.number = rank, number
        rank.go.acquire()
        try:
            body()
        except Killed:
            pass
        finally:
            rank.ended = True
            self._back.release()

    def _gate(self, name: str) -> None:
        rank, number = getattr(self._here, "rank", None), getattr(self._here, "number", None)
        if rank is None or number is None:
            return
        self._yield(rank)
        if rank.killed or self.kills.get(number) == rank.steps:
            rank.killed = True
            raise Killed
        rank.steps += 1
        if name != "os.unlink" and rank.steps in self.failures.get(number, ()):
            raise OSError(28, "No space left on device")

    def _sleep(self, seconds: float) -> None:
        rank = self._here.rank
        rank.wakes = self.now + seconds
        self._yield(rank)

    def _yield(self, rank: _Rank) -> None:
        self._back.release()
        rank.go.acquire()


def decide(ranks: Agreement, event: str, problem: str | None) -> str | None:
    """The answer, or UNKNOWN."""
    try:
        return ranks.decide(event, problem)
    except UnknownState:
        return UNKNOWN


@dataclass(frozen=True)
class Fault:
    """`signal` comes before the `nth` (from 1) step of that name, in a process."""

    signal: int
    step: str
    nth: int


def rank_process(
    pipe: Connection,
    folder: Path,
    rank: int,
    world: int,
    deadline: float,
    events: list[tuple[str, str | None]],
    fault: Fault | None = None,
    file_size: int | None = None,
) -> None:
    """A rank in a process of its own; two aborts are kept.

    Sends its answer to each event, then the seconds that the longest took.
    """
    seen = 0

    def gate(name: str) -> None:
        nonlocal seen
        if fault is not None and name == fault.step:
            seen += 1
            if seen == fault.nth:
                os.kill(os.getpid(), fault.signal)

    own = Agreement(folder, rank, world, deadline)
    with pytest.MonkeyPatch.context() as patch:
        gate_steps(patch, gate)
        patch.setattr(agreement, "_ABORTS_KEPT", 2)
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        longest = 0.0
        for event, problem in events:
            began = time.monotonic()
            pipe.send(decide(own, event, problem))
            longest = max(longest, time.monotonic() - began)
    pipe.send(longest)


def share(ranks: Agreement, event: str, data: bytes) -> list[bytes] | SparrowError:
    """The data, or the error."""
    try:
        return ranks.share(event, data, f"{event}-whole")
    except SparrowError as error:
        return error
