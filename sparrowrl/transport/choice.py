"""Which artifact an engine needs next: the rule of docs/protocol.md section 3 as one function of two records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparrowrl.errors import VersionNotFound
from sparrowrl.transport.node import Kind, RankStatus, Request


@dataclass(frozen=True, slots=True)
class Span:
    """Versions `first` to `last`, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Feed:
    """The hub's answer to `feed`: what there is. Deltas lead from each version in `bases` to `newest`."""

    cursor: int
    newest: int | None
    state: str | None
    bases: tuple[Span, ...]
    anchor: int | None
    drafts: tuple[str, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class EngineView:
    """What an engine holds: the lowest version over its ranks, and whether that can be built upon."""

    version: int
    state: str | None
    trusted: bool

    @classmethod
    def of(cls, ranks: Iterable[RankStatus]) -> EngineView | None:
        """None while no rank has a version yet and none is unknown: the engine is still loading."""
        ranks = list(ranks)
        trusted = all(rank.condition == "exact" for rank in ranks)
        with_version = [rank for rank in ranks if rank.version is not None]
        if not ranks or (trusted and len(with_version) < len(ranks)):
            return None
        lowest = min(with_version, key=lambda rank: rank.version or 0, default=None)
        if lowest is None or lowest.version is None:
            return cls(0, None, False)
        return cls(lowest.version, lowest.state, trusted)


@dataclass(frozen=True, slots=True)
class Choice:
    """An artifact to have; `draft` while the trainer is still writing it."""

    target: int
    kind: Kind
    base: int | None
    draft: bool = False


def choose(engine: EngineView, feed: Feed) -> Choice | None:
    """The next artifact for this engine, or None if there is nothing to do.

    Raises VersionNotFound if nothing the hub has leads from the engine's state to the newest version.
    """
    newest = feed.newest
    if newest is None and engine.version > 0:
        raise VersionNotFound(
            f"the engine holds version {engine.version}, but the hub has no version of this run: was its journal lost?"
        )
    if newest is None:
        return None
    if engine.trusted and engine.version == newest:
        drafted = f"{newest + 1}/{newest}.fast" in feed.drafts
        return Choice(newest + 1, "delta", newest, draft=True) if drafted else None
    if engine.trusted and any(span.first <= engine.version <= span.last for span in feed.bases):
        return Choice(newest, "delta", engine.version)
    if feed.anchor is not None and (not engine.trusted or engine.version < feed.anchor):
        return Choice(feed.anchor, "anchor", None)
    holds = f"version {engine.version}" if engine.trusted else "an unknown state"
    raise VersionNotFound(
        f"the engine holds {holds}; the hub's newest is {newest}, its newest anchor {feed.anchor}, and no deltas fit: "
        "no way to the newest; have the trainer publish an anchor"
    )
