"""What a hub keeps besides the journal: who may write, what engines were asked, and what they last said."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparrowrl.delta import files
from sparrowrl.delta.journal import Journal
from sparrowrl.errors import JournalLocked, LimitExceeded, VersionNotFound
from sparrowrl.transport.http import LEASE_SECONDS
from sparrowrl.transport.node import EngineStatus, Request
from sparrowrl.transport.records import from_json, parse_json, to_json

_REQUESTS_PER_ENGINE = 64
_FORGET_ENGINE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in an engine's queue."""

    engine: str
    id: int
    kind: Literal["audit", "export"]


@dataclass(frozen=True, slots=True)
class Notes:
    """What survives the hub's death, in `runs/<run>/hub.json`."""

    writer: str | None = None
    last_request: int = 0
    asked: tuple[Asked, ...] = ()


class Desk:
    """The writer's lease, the queues of requests and the statuses of engines. Lives in the hub's event loop."""

    def __init__(self, journal: Journal) -> None:
        """Reads the notes of the hub that served this journal before. Raises CorruptData if they are damaged."""
        self._journal = journal
        self._path = journal.root / "runs" / journal.run / "hub.json"
        self.notes = Notes()
        if self._path.exists():
            self.notes = from_json(Notes, parse_json(self._path.read_bytes(), str(self._path)), "hub.json")
        self._lock = ExitStack()
        self._holder: str | None = None
        self._heard = 0.0
        self._turn = asyncio.Lock()
        self._statuses: dict[str, tuple[float, EngineStatus]] = {}

    async def require(self, writer: str) -> None:
        """Take or renew the lease. Raises JournalLocked while another writer has it, here or on the journal itself."""
        async with self._turn:
            if self._holder != writer:
                silent = time.monotonic() - self._heard
                if self._holder is not None and silent < LEASE_SECONDS:
                    raise JournalLocked(
                        f"another trainer writes to run {self._journal.run} and was heard {silent:.1f} s ago; stop it, "
                        f"or wait until it has been silent for {LEASE_SECONDS:.0f} s"
                    )
                await asyncio.to_thread(self._take, writer)
            self._heard = time.monotonic()

    def _take(self, writer: str) -> None:
        self._lock.close()
        self._holder = None
        # The trainer of before this hub's restart goes on with what it has put; a new one begins anew.
        self._lock.enter_context(self._journal.write_lock(keep_drafts=writer == self.notes.writer))
        self._holder = writer
        self._write(replace(self.notes, writer=writer))

    async def release(self, writer: str) -> None:
        """The writer says that it is done. Raises JournalLocked if another one has the lease."""
        async with self._turn:
            if self._holder not in (writer, None):
                raise JournalLocked(f"another trainer writes to run {self._journal.run}; its lease is not yours to end")
            await asyncio.to_thread(self._end_lease)

    async def expire(self) -> bool:
        """End the lease of a writer that has been silent for too long; whether there was one."""
        async with self._turn:
            if self._holder is None or time.monotonic() - self._heard < LEASE_SECONDS:
                return False
            await asyncio.to_thread(self._end_lease)
            return True

    def _end_lease(self) -> None:
        if self._holder is not None:
            for draft in self._journal.drafts():
                self._journal.remove(draft)
        self._holder = None
        self._lock.close()

    def close(self) -> None:
        """Give the journal's lock back; drafts stay, their writer may come back to the next hub."""
        self._holder = None
        self._lock.close()

    def heard(self, engine: str, status: EngineStatus) -> bool:
        """Keep an engine's status and take what it answered off its queue; whether that changed the queue."""
        now = time.monotonic()
        self._statuses = {
            name: entry for name, entry in self._statuses.items() if now - entry[0] < _FORGET_ENGINE_SECONDS
        }
        self._statuses[engine] = (now, status)
        answered = {answer.id for answer in status.answers}
        left = tuple(a for a in self.notes.asked if a.engine != engine or a.id not in answered)
        if left == self.notes.asked:
            return False
        self._write(replace(self.notes, asked=left))
        return True

    def engines(self) -> dict[str, Any]:
        """The last status of each engine as JSON, with its age."""
        now = time.monotonic()
        return {
            engine: {**dataclasses.asdict(status), "age_s": round(now - at, 3)}
            for engine, (at, status) in sorted(self._statuses.items())
        }

    def ask(self, engine: str, kind: Literal["audit", "export"]) -> int:
        """Queue a request; its id. Raises VersionNotFound if the engine was never heard, LimitExceeded."""
        if engine not in self._statuses:
            known = ", ".join(sorted(self._statuses)) or "none"
            raise VersionNotFound(f"engine {engine} has not been heard by this hub; known engines: {known}")
        if len(self.requests(engine)) >= _REQUESTS_PER_ENGINE:
            raise LimitExceeded(f"engine {engine}: {_REQUESTS_PER_ENGINE} requests wait already; is it alive?")
        # A hub that lost its disk counts from 0, and an engine's old answer must not pass for one to a new request.
        answered = (answer.id for answer in self._statuses[engine][1].answers)
        number = max(self.notes.last_request, *answered, 0) + 1
        asked = (*self.notes.asked, Asked(engine, number, kind))
        self._write(replace(self.notes, last_request=number, asked=asked))
        return number

    def requests(self, engine: str) -> list[Request]:
        """What an engine has still to answer, oldest first."""
        return [Request(asked.id, asked.kind) for asked in self.notes.asked if asked.engine == engine]

    def _write(self, notes: Notes) -> None:
        with files.as_journal_error(self._path, "writing"):
            files.make_directories(self._path.parent)
            files.write_file(self._path, to_json(notes))
            files.sync_directory(self._path.parent)
        self.notes = notes
