"""The writer lock of a run: one process at a time, freed by the kernel however that process ends."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparrowrl.delta import files
from sparrowrl.errors import JournalError, JournalLocked

# An flock belongs to every process that inherited the descriptor. A forked child (a data loader's worker, say) must not
# keep the lock of a trainer that was killed.
_held: set[int] = set()


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def writer_lock(path: Path) -> Iterator[str]:
    """Hold the lock file; yields the random token that it names as its owner.

    Raises JournalLocked, at once, if another process (or another holder in this one) has it; JournalError.
    """
    with files.as_journal_error(path, "taking the writer lock"):
        files.make_directories(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalLocked(f"{path}: {_owner(descriptor)} is writing; stop it first") from error
        token = secrets.token_hex(16)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "writer": token}
        with files.as_journal_error(path, "writing"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        yield token
    finally:
        if descriptor in _held:  # not so in a forked child, where the number may be another file's by now
            _held.discard(descriptor)
            os.close(descriptor)


def check_writer(path: Path, token: str) -> None:
    """Raise JournalError unless the lock file names the owner of `token`."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(path.read_bytes())["writer"] == token:
            return
    raise JournalError(
        f"{path}: not the journal that rank 0 writes; give all ranks the same directory, or use a hub (HubSink)"
    )


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Hold an flock on a folder if nobody else does; yields whether it is held. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(owner['pid'])} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
