"""Durable file operations: what a name shows is whole and stays after a crash."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparrowrl.errors import JournalError, LimitExceeded

TEMPORARY = ".tmp"

_WHAT_TO_DO = {
    errno.ENOSPC: "free space on that disk or keep fewer versions",
    errno.EDQUOT: "free space within the quota or keep fewer versions",
    errno.EACCES: "give this user read and write access to it",
    errno.EPERM: "give this user read and write access to it",
    errno.EROFS: "choose a directory on a writable disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ELOOP: "replace the symbolic link by the file itself; links inside a journal are not followed",
}


@contextmanager
def as_journal_error(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a JournalError that says what was being done to `path` and what to do."""
    try:
        yield
    except OSError as error:
        advice = _WHAT_TO_DO.get(error.errno or 0, "look at the disk and its mount")
        raise JournalError(f"{doing} {path}: {error.strerror or error}; {advice}") from error


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """`mkdir -p`, durably."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
        sync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, make it durable, and rename it to `path`.

    The new name itself is durable after `sync_directory(path.parent)`. Raises OSError, leaving nothing behind.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_file(path: Path, limit: int) -> bytes:
    """All of a file, which must not be a symbolic link. Raises OSError, and LimitExceeded beyond `limit` bytes."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise LimitExceeded(f"{path}: expected at most {limit} bytes, got more; this is not a file of this format")
    return data


def remove_tree(path: Path, trash: Path) -> None:
    """Make directory `path` vanish in one step (by a rename into `trash`), then delete it. No error if it is gone."""
    make_directories(trash)
    doomed = trash / secrets.token_hex(8)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    sync_directory(path.parent)
    shutil.rmtree(doomed)
