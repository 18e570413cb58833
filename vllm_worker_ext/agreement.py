"""How the ranks of one engine exchange data and come to one answer: through files in a folder of the node directory.

    <event>.<rank>.data    what a rank shares or offers
    <event>.<rank>.vote    an empty file: this rank can commit; removed as soon as it knows the decision
    <event>.decision       an empty file: commit; the problem: abort

The decision can be created only once, because both ways to create it are hard links of a complete file. A commit is a
link of rank 0's vote, so it needs in one step that there is no decision yet and that rank 0 has not left the event: a
rank that saw all votes and was then stopped for a long time cannot commit what the others gave up, even when the
abort has been removed meanwhile. Only rank 0 removes an abort, and its own vote first.

A decision to commit, and data that everyone has, stay until all ranks have come to a later event: then none can be in
an earlier one. A rank that hangs would keep everything else too, so of what failed only the newest is kept. Whoever
comes later to an event that was removed misses votes, and aborts at its deadline, which is what the others did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sparrowrl.errors import ConfigError, DeadlineExceeded, StateError, TransportError, UnknownState
from sparrowrl.transport.node import write_atomically

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.002
_ABORTS_KEPT = 64  # small; one that is gone costs a rank that is late its whole deadline
_FAILED_SHARES_KEPT = 2
_OFFERS_KEPT = 2  # while a rank makes a new one, others may still be looking at the one before
_NO_ROOM = b"\0"


class Agreement:
    """One rank's part, for one thread at a time; another may make offers and look for them.

    An event has a name that is the same on all ranks, safe as a file name and never used again; all ranks go through
    events in the same order, and may leave some out. With a world of 1 no file is touched.
    """

    def __init__(self, folder: Path, rank: int, world: int, deadline: float) -> None:
        """`folder` is made if only itself is missing; `deadline` is how many seconds each event may take.

        Raises ConfigError if the folder cannot be made.
        """
        self.rank, self.world = rank, world
        self._folder, self._deadline = folder, deadline
        self._offers: dict[str, bytes] = {}  # this rank's newest
        self._complete: list[str] = []  # paths left by the last event to which all ranks came, at most one
        self._failed: list[str] = []  # paths left by the events since then
        if world > 1:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"folder for the ranks' agreement {folder}: {error}") from error

    def offer(self, event: str, data: bytes) -> None:
        """Give the other ranks data and do not wait. Raises OSError if it cannot be written."""
        self._offers.pop(event, None)
        self._offers[event] = data
        *old, _ = self._offers
        for name in old[: 1 - _OFFERS_KEPT]:
            del self._offers[name]
            _remove([self._path(name, self.rank, "data")])
        if self.world > 1:
            write_atomically(Path(self._path(event, self.rank, "data")), data)

    def offered(self, event: str) -> list[bytes] | None:
        """What all ranks have offered, in rank order; None as long as one has not. Raises OSError without a folder."""
        got = {self.rank: self._offers[event]} if event in self._offers else {}
        if self.world > 1:
            self._collect(event, got)
        return [got[rank] for rank in range(self.world)] if len(got) == self.world else None

    def share(self, event: str, data: bytes, within: str) -> list[bytes]:
        """Every rank's data, in rank order; part of what is decided as the event `within`.

        Raises StateError as soon as that has been decided, for a rank has failed then; DeadlineExceeded that names the
        ranks which did not come in time; and TransportError if the folder is gone or the data cannot be written or
        read.
        """
        if self.world == 1:
            return [data]
        got = {self.rank: data}
        own = self._path(event, self.rank, "data")
        try:
            write_atomically(Path(own), data)
            for left in self._looks():
                self._collect(event, got)
                if len(got) == self.world or left <= 0:
                    break
                if (problem := self._read(within)) is not None:
                    raise StateError(f"sharing {event}: expected all ranks to succeed, but {problem}")
        except OSError as error:
            raise TransportError(
                f"sharing {event} ({len(data)} bytes) through {self._folder}: {error}; keep the node directory for as "
                "long as the engine lives, and room in it"
            ) from error
        finally:
            self._left(own, complete=len(got) == self.world)
        if len(got) < self.world:
            missing = self._missing(set(range(self.world)) - got.keys())
            raise DeadlineExceeded(f"sharing {event}: expected data of {self.world} ranks; {missing}")
        return [got[rank] for rank in range(self.world)]

    def decide(self, event: str, problem: str | None) -> str | None:
        """All or nothing: None if every rank came with None, else a problem ("rank 1: ...").

        Every rank gets the same answer, whatever dies, hangs or comes late. The words are the same too, except for a
        rank that has no room to write or comes when the decision has been removed. Raises UnknownState if this rank was
        ready to commit and cannot learn what was decided; a rank that can neither write its vote nor read answers with
        a problem, because without its vote nobody commits.
        """
        own = None if problem is None else f"rank {self.rank}: {problem}"
        if self.world == 1:
            return own
        if own is None:
            own = self._vote(event)
        if own is None:
            answer = self._await_decision(event)
        else:
            try:
                answer = self._settle(event, own)
            except OSError:
                answer = own
        with suppress(OSError):  # a vote that cannot be removed keeps its decision from being removed, too
            _remove([self._path(event, self.rank, "vote")])
            self._left(self._path(event, "decision"), complete=not answer)
        return answer or None

    def _vote(self, event: str) -> str | None:
        """Say that this rank can commit; the problem if it cannot say so."""
        try:
            os.close(os.open(self._path(event, self.rank, "vote"), os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as error:
            return f"rank {self.rank}: cannot vote in {self._folder}: {error}"
        return None

    def _await_decision(self, event: str) -> str:
        """The decision that another rank made, or that this one made when it saw all votes or the deadline came."""
        missing = set(range(self.world))
        for left in self._looks():
            try:
                names = set(os.listdir(self._folder))
                missing -= {rank for rank in missing if f"{event}.{rank}.vote" in names}
                if f"{event}.decision" in names or not missing or left <= 0:
                    return self._settle(event, self._missing(missing) if missing else "")
            except OSError as error:
                if left <= 0 or not os.path.isdir(self._folder):
                    with suppress(OSError):
                        _remove([self._path(event, self.rank, "vote")])
                    raise UnknownState(
                        f"{event}: expected a decision of all ranks in {self._folder}, got {error}; whether the "
                        "others committed is not known: restore an anchor on all ranks"
                    ) from error
        raise AssertionError("the last look is at the deadline")

    def _settle(self, event: str, problem: str) -> str:
        """The decision that there is; if there is none, abort for `problem`, or commit if that is empty."""
        decision = self._path(event, "decision")
        while (made := self._read(event)) is None:
            try:
                if problem:
                    self._link_text(event, problem, decision)
                else:
                    os.link(self._path(event, 0, "vote"), decision)
            except FileExistsError:
                continue
            except FileNotFoundError:
                if problem:  # not even a draft can be written: the folder is gone
                    raise
                problem = f"rank {self.rank}: came back after rank 0 had left the event"
        return made

    def _read(self, event: str) -> str | None:
        """The decision: None if there is none, "" if it is to commit."""
        with suppress(FileNotFoundError), open(self._path(event, "decision"), "rb") as file:
            text = file.read()
            return "a rank aborted and had no room to say why" if text == _NO_ROOM else text.decode()
        return None

    def _link_text(self, event: str, text: str, decision: str) -> None:
        draft = os.path.join(self._folder, f".{event}.{self.rank}")
        try:
            try:
                with open(draft, "wb") as file:
                    file.write(text.encode(errors="backslashreplace"))
            except OSError:
                with open(draft, "wb") as file:
                    file.truncate(len(_NO_ROOM))  # a hole needs no room, and is not the empty file of a commit
            os.link(draft, decision)
        finally:
            _remove([draft])

    def _collect(self, event: str, got: dict[int, bytes]) -> None:
        """Add to `got` what other ranks have shared."""
        names = set(os.listdir(self._folder))
        for rank in set(range(self.world)) - got.keys():
            if f"{event}.{rank}.data" in names:
                with suppress(FileNotFoundError), open(self._path(event, rank, "data"), "rb") as file:
                    got[rank] = file.read()

    def _left(self, path: str, complete: bool) -> None:
        """Remember what this event left behind, and remove what no rank can need any more."""
        if complete:  # every rank came to this event, so every rank has left the earlier ones
            old = self._complete + self._failed
            self._complete, self._failed = [path], []
        else:
            self._failed = [*filter(os.path.exists, self._failed), path]
            shared = [name for name in self._failed if name.endswith(".data")]
            decided = [name for name in self._failed if name.endswith(".decision") and self.rank == 0]
            old = shared[:-_FAILED_SHARES_KEPT] + decided[:-_ABORTS_KEPT]
        with suppress(OSError):
            _remove(old)

    def _looks(self) -> Iterator[float]:
        """The seconds left, before each look at the folder; the last look comes when none are left."""
        deadline = time.monotonic() + self._deadline
        pause = _FIRST_PAUSE_S
        left = self._deadline
        while left > 0:
            yield left
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            left = deadline - time.monotonic()
        yield left

    def _missing(self, ranks: Iterable[int]) -> str:
        names = ", ".join(map(str, sorted(ranks)))
        waited = f"did not come within {self._deadline:g} s"
        return f"rank {names} {waited}; look at its log, or raise SPARROWRL_RANK_TIMEOUT"

    def _path(self, event: str, *parts: object) -> str:
        return os.path.join(self._folder, ".".join(map(str, (event, *parts))))


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
