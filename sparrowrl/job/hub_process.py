"""The hub as a child process of the trainer's rank 0: started, started again when it dies, and told to leave."""

from __future__ import annotations

import logging
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from sparrowrl import errors
from sparrowrl.errors import DeadlineExceeded, SparrowError, TransportError

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_STEADY_S = 60.0  # one that lived as long as this is started again at once
_LOOK_S = 0.1
_LEAVE_S = 5.0
_LINES_KEPT = 20
_SAID = re.compile(r"sparrowrl: (\w+): (.*)")  # how the command reports a failure

logger = logging.getLogger(__name__)


class HubProcess:
    """Owner of one `sparrowrl hub`, on the same port each time, until `close` or the end of this process."""

    def __init__(
        self, journal: Path, credentials_file: Path, *, host: str, port: int, keep_versions: int, start_seconds: float
    ) -> None:
        """Returns when the hub listens; port 0 takes a free one, `keep_versions` 0 keeps all.

        Raises what the hub says (ConfigError if the address is refused or in use), DeadlineExceeded if it does not
        listen within `start_seconds`, TransportError if it dies.
        """
        self._command = [
            *(sys.executable, "-m", "sparrowrl.cli.main", "hub", "--until-stdin-ends", "--allow-remote"),
            *("--journal", str(journal), "--credentials", str(credentials_file), "--host", host),
            *(("--keep-versions", str(keep_versions)) if keep_versions else ()),
        ]
        self._start_seconds = start_seconds
        self._leaving = threading.Event()
        self._child = _Child([*self._command, "--port", str(port)])
        self.port = int(self._child.address(start_seconds, self._leaving).rsplit(":", 1)[1])
        self._watcher = threading.Thread(target=self._watch, name="sparrowrl-hub", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The process that serves now, or the last that did."""
        return self._child.process.pid

    def close(self) -> None:
        """Tell the hub to leave, and kill it if it does not within 5 s. Doing it twice is fine."""
        self._leaving.set()
        self._watcher.join(3 * _LEAVE_S)
        self._child.end()

    def _watch(self) -> None:
        """Start another when one has died, after a pause that grows with each death."""
        backoff, started = 0.0, time.monotonic()
        while not self._leaving.wait(_LOOK_S):
            if self._child.process.poll() is None:
                continue
            steady = time.monotonic() - started > _STEADY_S
            backoff = 0.0 if steady else min(max(2 * backoff, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
            logger.error("%s; the next starts in %.1f s", self._child.epitaph(), backoff)
            self._child.end()
            if self._leaving.wait(backoff):
                return
            started = time.monotonic()
            self._child = _Child([*self._command, "--port", str(self.port)])
            try:
                self._child.address(self._start_seconds, self._leaving)
            except SparrowError as error:
                if not self._leaving.is_set():
                    logger.error("the hub did not come back: %s", error)


class _Child:
    """One hub process. What it says on standard error is logged here, and its last lines are kept."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._said: deque[str] = deque(maxlen=_LINES_KEPT)
        self._listener = threading.Thread(target=self._listen, name="sparrowrl-hub-log", daemon=True)
        self._listener.start()

    def address(self, seconds: float, leaving: threading.Event) -> str:
        """The first line of its output. If there is none in time, or `leaving` is set, it is ended, and this raises."""
        deadline = time.monotonic() + seconds
        line = _first_line(_pipe(self.process.stdout), deadline, leaving)
        if line:
            return line
        alive = self.process.poll() is None and time.monotonic() > deadline
        self.end()
        if alive:
            raise DeadlineExceeded(f"waited {seconds:.0f} s for the hub to listen; {self.last_words()}")
        found = _SAID.fullmatch(self._said[-1]) if self._said else None
        if found is None:
            raise TransportError(f"expected a hub that listens, but {self.epitaph()}")
        kind = getattr(errors, found[1], TransportError)
        ours = kind if isinstance(kind, type) and issubclass(kind, SparrowError) else TransportError
        raise ours(f"hub: {found[2]}")

    def epitaph(self) -> str:
        """How it ended, and what it said last."""
        return f"the hub (pid {self.process.pid}) ended with code {self.process.returncode}: {self.last_words()}"

    def last_words(self) -> str:
        """The end of what it has said on standard error."""
        return f"it said {' | '.join(self._said)}" if self._said else "it said nothing"

    def end(self) -> None:
        """Tell it to leave, kill it if it does not, and close all pipes; nothing if it was ended before."""
        stdin, stdout = _pipe(self.process.stdin), _pipe(self.process.stdout)
        stdin.close()
        try:
            self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_LEAVE_S)
        stdout.close()
        self._listener.join(_LEAVE_S)

    def _listen(self) -> None:
        with _pipe(self.process.stderr) as stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._said.append(line)
                logger.log(logging.INFO if " INFO " in line else logging.WARNING, "hub: %s", line)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _first_line(pipe: IO[bytes], deadline: float, leaving: threading.Event) -> str:
    """The first line from a pipe; empty if it ends, the deadline comes or `leaving` is set before that."""
    got = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while b"\n" not in got:
            if leaving.is_set() or time.monotonic() > deadline:
                return ""
            if selector.select(_LOOK_S):
                piece = os.read(pipe.fileno(), 4096)
                if not piece:
                    return ""
                got += piece
    return got.split(b"\n", 1)[0].decode()
