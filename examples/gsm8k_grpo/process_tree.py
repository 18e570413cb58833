"""A process and all that it starts, however deep: ended together, on Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparrowrl.errors import ConfigError, DeadlineExceeded

_PR_SET_CHILD_SUBREAPER = 36
_ASKED_S = 15.0
_KILLED_S = 30.0
_POLL_S = 0.05


class ProcessTree:
    """Started by `command`. Only one at a time in a process, which must have no other children.

    Processes whose parent has ended become children of this process instead of init's, so that none gets away.
    """

    def __init__(self, command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Start it in `folder`, in a session of its own. Raises ConfigError if the program is not there."""
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise ConfigError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
        try:
            with log.open("wb") as output:
                self._leader = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error}") from error

    @property
    def status(self) -> int | None:
        """The first process's exit status; None while it runs."""
        return self._leader.poll()

    def end(self) -> None:
        """Ask the first process to end, then kill all that is left. Doing it twice is fine. Raises DeadlineExceeded."""
        if self.status is None:
            self._leader.terminate()
            try:
                self._leader.wait(_ASKED_S)
            except subprocess.TimeoutExpired:
                self._leader.kill()
        self._leader.wait()
        deadline = time.monotonic() + _KILLED_S
        while processes := descendants(os.getpid()):
            for process in processes:
                _kill(process)
            _reap()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"processes that do not end within {_KILLED_S:.0f} s of SIGKILL: {processes}")
            time.sleep(_POLL_S)


def descendants(ancestor: int) -> list[int]:
    """Ids of all processes below `ancestor`, dead ones that wait to be reaped included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, []))
    for process in found:
        found += children.get(process, [])
    return found


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
