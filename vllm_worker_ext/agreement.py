"""How the ranks of an engine do something together or not at all, whichever of them fails, hangs or dies.

They meet in a folder of their node directory. A vote is a file that appears whole; the decision is one file that can be
made only once, by whoever is first: "all have succeeded", by a rank that has seen every vote, or what went wrong, by a
rank that has seen a bad vote or has waited long enough. All follow the decision, also one that comes late.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from sparrowrl.errors import DeadlineExceeded, StateError, UnknownState
from sparrowrl.transport.node import write_atomically

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.002
_KEPT = 2  # of a rank's offers: while it makes a new one, others may still be reading the one before


class Agreement:
    """One rank's side. An `event` is named alike by all ranks, and no name is used twice for a decision."""

    def __init__(self, folder: Path, rank: int, world: int, deadline: float) -> None:
        """`folder` exists; `deadline` is in seconds, for each wait."""
        self.rank, self.world = rank, world
        self._folder, self._deadline = folder, deadline
        self._offers: deque[str] = deque()
        self._shares: deque[str] = deque()
        self._alone: dict[str, bytes] = {}  # what a world of one has offered
        self._decided: list[str] = []

    def offer(self, event: str, data: bytes) -> None:
        """Give the other ranks `data`. Raises OSError if there is no room, or no folder."""
        self._put(self._offers, event, data)

    def offered(self, event: str) -> list[bytes] | None:
        """What all ranks have offered, in rank order; None as long as one has not."""
        if self.world == 1:
            return [self._alone[event]] if event in self._alone else None
        found = [self._read(self._file(event, rank)) for rank in range(self.world)]
        return [data for data in found if data is not None] if None not in found else None

    def share(self, event: str, data: bytes, within: str) -> list[bytes]:
        """Offer `data` and wait for what the others offer, in the course of what is to be decided as `within`.

        Raises StateError as soon as it is known that `within` has failed, DeadlineExceeded that names the ranks that
        did not come.
        """
        self._put(self._shares, event, data)
        end, pause = time.monotonic() + self._deadline, _FIRST_PAUSE_S
        while (found := self.offered(event)) is None:
            problem = self._read(self._decision(within))
            if problem is not None:
                raise StateError(f"expected all ranks to succeed, but {problem.decode()}")
            if time.monotonic() > end:
                raise DeadlineExceeded(self._missing(event))
            pause = _sleep(pause)
        return found

    def decide(self, event: str, problem: str | None) -> str | None:
        """Say how it went here (`problem`, None if well) and wait for the others.

        Returns None on every rank if it went well on all; else, on every rank, the same words about one that failed or
        did not come. Raises UnknownState if that cannot be found out.
        """
        if self.world == 1:
            return problem
        vote = f"{event}-vote"
        end, pause = time.monotonic() + self._deadline, _FIRST_PAUSE_S
        try:
            self._write_vote(vote, problem)
            while (decision := self._read(self._decision(event))) is None:
                votes = self.offered(vote)
                if problem is not None:
                    self._propose(event, f"rank {self.rank}: {problem}")
                elif votes is not None:
                    self._propose(event, "")
                elif time.monotonic() > end:
                    self._propose(event, self._missing(vote))
                else:
                    pause = _sleep(pause)
        except OSError as error:
            raise UnknownState(
                f"rank {self.rank}: cannot know what the ranks have decided on {event}: {error}"
            ) from error
        self._decided.append(event)
        if not decision:
            self._forget()
        return decision.decode() or None

    def _put(self, kept: deque[str], event: str, data: bytes) -> None:
        if event not in kept:
            kept.append(event)
        if len(kept) > _KEPT:
            oldest = kept.popleft()
            self._alone.pop(oldest, None)
            self._file(oldest, self.rank).unlink(missing_ok=True)
        if self.world == 1:
            self._alone[event] = data
        else:
            write_atomically(self._file(event, self.rank), data)

    def _write_vote(self, vote: str, problem: str | None) -> None:
        if problem is None:  # whoever has a problem makes the decision itself
            write_atomically(self._file(vote, self.rank), b"")

    def _propose(self, event: str, decision: str) -> None:
        """Make the decision, unless it has been made."""
        proposal = self._file(f"{event}-proposal", self.rank)
        write_atomically(proposal, decision.encode())
        try:
            os.link(proposal, self._decision(event))
        except FileExistsError:
            pass
        finally:
            proposal.unlink(missing_ok=True)

    def _forget(self) -> None:
        """All ranks have come to the newest event, so nobody looks at those before it any more."""
        *old, newest = self._decided
        for event in old:
            self._file(f"{event}-vote", self.rank).unlink(missing_ok=True)
            if self.rank == 0:
                self._decision(event).unlink(missing_ok=True)
        self._decided = [newest]

    def _missing(self, event: str) -> str:
        absent = [str(rank) for rank in range(self.world) if not self._file(event, rank).exists()]
        return f"rank {', '.join(absent)} did not come within {self._deadline:g} s (SPARROWRL_RANK_TIMEOUT)"

    def _file(self, event: str, rank: int) -> Path:
        return self._folder / f"{event}.{rank}"

    def _decision(self, event: str) -> Path:
        return self._folder / f"{event}.decision"

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            self._folder.stat()  # raises if it is the folder that is not there
            return None


def _sleep(pause: float) -> float:
    time.sleep(pause)
    return min(2 * pause, _LONGEST_PAUSE_S)
