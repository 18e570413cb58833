"""Where a publisher's artifacts go: a journal on this machine, or (transport/client.py) a hub.

All ranks of a trainer write into one sink: rank 0 `lead`s and hands the token that it got to the others, which `join`.
Every rank opens the same draft and puts its own segments; rank 0 alone commits or drops it.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.manifest import Manifest, SegmentRef
from sparrowrl.delta.retention import Retention


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version of a run: its state id, its layout id and the fingerprint (u64) of every tensor."""

    version: int
    state: bytes
    layout: bytes
    fingerprints: tuple[int, ...]


class SinkDraft(Protocol):
    """An artifact that is being written."""

    def put(self, data: bytes) -> SegmentRef:
        """Hand over a segment, which is durable after `flush`; putting the same bytes again does nothing.

        Raises JournalError or TransportError, maybe those of an earlier segment.
        """
        ...

    def flush(self) -> None:
        """Wait until all that this rank has put is durable. Raises what a `put` failed with."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the artifact exist, or do nothing. Raises VersionConflict, JournalError or TransportError."""
        ...

    def drop(self) -> None:
        """Forget the draft with all its segments, of all ranks."""
        ...


class Sink(Protocol):
    """What a publisher writes to."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    def lead(self) -> str:
        """Become the run's only writer; the token lets other ranks join. Raises JournalLocked. May be called again."""
        ...

    def join(self, token: str) -> None:
        """Write beside the process that leads with this token. Raises JournalError if it leads another journal."""
        ...

    def newest(self) -> Head | None:
        """The newest version, read anew each time; None for an empty run."""
        ...

    def has(self, target: int, name: str) -> bool:
        """Whether artifact `name` of version `target` is committed."""
        ...

    def put_layout(self, data: bytes) -> None:
        """Store the bytes of a layout."""
        ...

    def open(self, target: int, name: str) -> SinkDraft:
        """The draft of artifact `name` (docs/format.md section 2) of version `target`."""
        ...

    def close(self) -> None:
        """Stop being a writer."""
        ...


class JournalSink:
    """A sink that writes a journal directory on this machine; a hub may serve that directory."""

    def __init__(
        self, root: str | os.PathLike[str], credentials: Credentials, *, retention: Retention | None = None
    ) -> None:
        """`retention` says what to keep after each commit; None keeps everything."""
        self.journal = Journal(root, credentials.run, credentials.run_key, retention=retention)
        self._lock = ExitStack()
        weakref.finalize(self, self._lock.close)
        self._token: str | None = None

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.journal.run

    def lead(self) -> str:
        """Take the journal's writer lock. Raises JournalLocked that names the process which has it."""
        if self._token is None:
            self._token = self._lock.enter_context(self.journal.write_lock())
        return self._token

    def join(self, token: str) -> None:
        """Check that the leading rank holds the lock of this same directory. Raises JournalError if it does not."""
        self.journal.check_writer(token)

    def newest(self) -> Head | None:
        """The newest version; None for an empty run."""
        version = self.journal.newest()
        if version is None:
            return None
        manifest = self.journal.manifest_of(version)
        return Head(version, manifest.target_state, manifest.layout, self.journal.fingerprints(version))

    def has(self, target: int, name: str) -> bool:
        """Whether artifact `name` of version `target` is committed."""
        return any(artifact.name == name for artifact in self.journal.at(target)[0])

    def put_layout(self, data: bytes) -> None:
        """Store the bytes of a layout."""
        self.journal.put_layout(data)

    def open(self, target: int, name: str) -> SinkDraft:
        """The draft of artifact `name` of version `target`."""
        return self.journal.draft(target, name)

    def close(self) -> None:
        """Release the writer lock."""
        self._token = None
        self._lock.close()

    def __enter__(self) -> JournalSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
