"""Child processes of the demo: each in a process group of its own, with a log, and none left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparrowrl.errors import ConfigError, TransportError

_GRACE_S = 20.0
_TAIL_LINES = 6
_CAUSES = 3
_EXCEPTION = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception|Unsupported|Exceeded|Mismatch|Unauthorized): .+")


class Child:
    """A process that runs until it is stopped; when it ends by itself, `check` says so."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start it. Raises ConfigError if the program is not there."""
        self.name = name
        self.log = log
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot start the {name}: {error}") from error

    def check(self) -> None:
        """Raise TransportError if the process is no more."""
        if self.ended:
            raise TransportError(f"the {self.name} ended with exit status {self._process.returncode}; see {self.log}")

    @property
    def ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def tail(self) -> list[str]:
        """The first exceptions that the log tells of, which tend to be the cause, and its last lines."""
        text = self.log.read_text(errors="replace")
        causes = list(dict.fromkeys(_EXCEPTION.findall(text)))[:_CAUSES]
        shown = [f"{self.log} says:", *causes] if causes else []
        shown += [f"{self.log} ends with:", *text.splitlines()[-_TAIL_LINES:]]
        return [line[:300] for line in shown]

    async def stop(self) -> None:
        """Ask the process to end (or what it left behind, if it is gone), then kill the rest of its group.

        Doing it twice is fine.
        """
        if not self.ended:
            self._process.terminate()
        elif self._group_lives():
            os.killpg(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and self._group_lives():
            await asyncio.sleep(0.05)
        if self._group_lives():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _group_lives(self) -> bool:
        self._process.poll()  # reaps the leader, which else counts as alive
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


class Children:
    """The children of one run."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """Start one more."""
        child = Child(name, command, log, environment)
        self._children.append(child)
        return child

    async def watch(self) -> None:
        """Run until one of them ends by itself; raises its TransportError."""
        while True:
            self.check()
            await asyncio.sleep(0.2)

    def check(self) -> None:
        """Raise TransportError if one of them has ended by itself."""
        for child in self._children:
            child.check()

    def last_words(self) -> list[str]:
        """The ends of the logs of those that ended by themselves; of all, if none did."""
        ended = [child for child in self._children if child.ended]
        return [line for child in ended or self._children for line in child.tail()]

    async def stop(self) -> None:
        """Stop all, the last one first."""
        while self._children:
            await self._children[-1].stop()
            self._children.pop()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port_free(port: int) -> None:
    """Raise ConfigError if somebody listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another or leave it out") from error
