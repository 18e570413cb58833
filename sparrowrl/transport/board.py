"""What a hub tells its engines: the journal's facts, looked up when the directory changes, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.keys import artifact_key
from sparrowrl.delta.manifest import SegmentRef
from sparrowrl.errors import SparrowError, VersionNotFound
from sparrowrl.transport.choice import Span

log = logging.getLogger(__name__)

# How soon another process's writes are seen. Directory times advance with the kernel's tick, so a folder that was
# changed just now may change again without a trace: it counts as changed until it has been quiet for a while.
LOOK_SECONDS = 0.02
_FAR_SECONDS = 5
_RACY_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of the feed that all engines share."""

    newest: int | None = None
    state: str | None = None
    bases: tuple[Span, ...] = ()
    anchor: int | None = None
    drafts: tuple[str, ...] = ()


@dataclass(slots=True)
class DraftView:
    """Segments of one draft in the order they were seen; a new `id` when some vanished: the draft was begun anew."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    order: list[SegmentRef] = field(default_factory=list)
    seen: set[SegmentRef] = field(default_factory=set)
    stamp: object = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What the folder of one version held when its stamp was taken."""

    stamp: object
    committed: list[ArtifactRef]
    drafts: list[ArtifactRef]


def folder_stamp(path: Path | str) -> object:
    """Compares equal as long as the folder surely kept its entries; None if it is not there."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    now = time.time_ns()
    return (facts.st_ino, facts.st_mtime_ns) if now - facts.st_mtime_ns > _RACY_NS else object()


def bases_of(artifacts: Iterable[ArtifactRef], newest: int) -> tuple[Span, ...]:
    """The versions from which deltas lead to `newest`, ascending, as few spans as possible."""
    into: dict[int, list[int]] = {}
    for artifact in artifacts:
        if artifact.base is not None:
            into.setdefault(artifact.target, []).append(artifact.base)
    reached, front = {newest}, [newest]
    while front:
        front = [base for target in front for base in into.get(target, ()) if base not in reached]
        reached.update(front)
    spans: list[Span] = []
    for version in sorted(reached - {newest}):
        if spans and spans[-1].last == version - 1:
            spans[-1] = Span(spans[-1].first, version)
        else:
            spans.append(Span(version, version))
    return tuple(spans)


class Board:
    """The journal as the hub last saw it. All methods run in the hub's event loop; the disk is read in threads."""

    def __init__(self, journal: Journal) -> None:
        self.facts = Facts()
        self._journal = journal
        self._versions = journal.root / "runs" / journal.run / "v"
        self._stamp: object = None
        self._pokes = 0
        self._looking = asyncio.Lock()
        self._listings: dict[int, Listing] = {}
        self._drafts: dict[tuple[int, str], DraftView] = {}
        self._wake = asyncio.Event()
        self._closing = False

    async def look_now(self) -> None:
        """Something was written by this hub."""
        self._pokes += 1
        await self.look()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._wake.set()
        self._wake = asyncio.Event()

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closing = True
        self.wake()

    async def until(self, condition: Callable[[], bool], seconds: float, every: float = math.inf) -> None:
        """Wait at most `seconds` until `condition` holds; ask it after each change and `every` so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._closing and not condition():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, every)):
                    await self._wake.wait()

    async def watch(self) -> None:
        """Keep `facts` fresh, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Read the journal if it changed, and wake those who wait if the facts did."""
        async with self._looking:
            stamp = self._current_stamp()
            if stamp == self._stamp:
                return
            try:
                facts = await asyncio.to_thread(self._read)
            except VersionNotFound:  # a version was deleted while we read: the next look sees a consistent journal
                return
            except SparrowError as error:
                log.error("run %s: cannot read the journal: %s", self._journal.run, error)
                return
            self._stamp = stamp
            if facts != self.facts:
                self.facts = facts
                self._drafts = {key: view for key, view in self._drafts.items() if f"{key[0]}/{key[1]}" in facts.drafts}
                self.wake()

    def _current_stamp(self) -> object:
        """Of all that may change the facts; what is not near the newest version is looked at now and then."""
        near = [] if self.facts.newest is None else [self.facts.newest, self.facts.newest + 1]
        drafts = [self._versions / draft / "manifest" for draft in self.facts.drafts]
        folders = [self._versions, *(self._versions / str(target) for target in near)]
        now_and_then = time.monotonic() // _FAR_SECONDS
        return (
            self._pokes,
            now_and_then,
            *(folder_stamp(folder) for folder in folders),
            *(path.exists() for path in drafts),
        )

    def _read(self) -> Facts:
        self._list()
        artifacts = [artifact for listing in self._listings.values() for artifact in listing.committed]
        drafts = tuple(f"{d.target}/{d.name}" for listing in self._listings.values() for d in listing.drafts)
        if not artifacts:
            return Facts(drafts=drafts)
        newest = max(artifact.target for artifact in artifacts)
        state = self._journal.manifest_of(newest).target_state.hex()
        anchor = max((artifact.target for artifact in artifacts if artifact.kind == "anchor"), default=None)
        return Facts(newest, state, bases_of(artifacts, newest), anchor, drafts)

    def _list(self) -> None:
        """List anew the versions whose folder changed, and those with drafts, which are committed one folder deeper."""
        listings: dict[int, Listing] = {}
        for target in self._journal.targets():
            before = self._listings.get(target)
            stamp = folder_stamp(f"{self._versions}/{target}")
            if before is None or before.drafts or stamp != before.stamp:
                before = Listing(stamp, *self._journal.at(target))
            listings[target] = before
        self._listings = listings

    def draft(self, target: int, name: str) -> DraftView:
        """The segments that a draft (or the artifact it became) has now. Raises VersionNotFound if there is none."""
        key = (target, name)
        folder = self._journal.root / artifact_key(self._journal.run, target, name)
        view = self._drafts.get(key) or DraftView()
        stamp = folder_stamp(folder)
        if stamp is None or stamp != view.stamp:
            try:
                present = self._journal.draft_segments(target, name)
            except VersionNotFound:
                self._drafts.pop(key, None)
                raise
            if not view.seen.issubset(present):
                view = DraftView()
            new = [segment for segment in present if segment not in view.seen]
            view.order += new
            view.seen.update(new)
            view.stamp = stamp
        self._drafts[key] = view
        return view

    def committed(self, target: int, name: str) -> bool:
        """Whether the artifact exists."""
        return os.path.exists(self._journal.root / artifact_key(self._journal.run, target, name) / "manifest")
