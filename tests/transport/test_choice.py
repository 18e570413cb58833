"""The choice of an artifact as a function, and that following it always ends at the newest version."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.errors import VersionNotFound
from sparrowrl.transport.board import bases_of
from sparrowrl.transport.choice import Choice, EngineView, Feed, Span, choose
from sparrowrl.transport.node import RankStatus


def feed(newest: int | None, bases: tuple[Span, ...] = (), anchor: int | None = None, *drafts: str) -> Feed:
    return Feed(1, newest, "ab", bases, anchor, drafts, ())


def test_each_rule() -> None:
    at_3 = EngineView(3, "ab", True)
    assert choose(EngineView(0, "ab", True), feed(None)) is None
    with pytest.raises(VersionNotFound, match="was its journal lost"):
        choose(at_3, feed(None))
    assert choose(at_3, feed(3, (Span(0, 2),))) is None
    assert choose(at_3, feed(3, (), None, "4/3.fast")) == Choice(4, "delta", 3, draft=True)
    assert choose(at_3, feed(3, (), None, "4/anchor.dense", "4/2.fast", "5/3.fast")) is None
    assert choose(at_3, feed(4, (Span(0, 3),))) == Choice(4, "delta", 3)
    assert choose(at_3, feed(9, (Span(0, 8),), 5)) == Choice(9, "delta", 3)
    assert choose(at_3, feed(9, (Span(5, 8),), 5)) == Choice(5, "anchor", None)
    assert choose(at_3, feed(9, (Span(1, 1), Span(3, 3), Span(5, 8)), 5)) == Choice(9, "delta", 3)
    unknown = EngineView(3, None, False)
    assert choose(unknown, feed(9, (Span(0, 8),), 2)) == Choice(2, "anchor", None)
    for view, what in ((unknown, feed(9, (Span(0, 8),))), (at_3, feed(9, (Span(5, 8),), 3)), (at_3, feed(2))):
        with pytest.raises(VersionNotFound, match="no way"):
            choose(view, what)


def test_what_an_engine_holds_is_the_lowest_of_its_ranks() -> None:
    def view(*ranks: tuple[int | None, str]) -> EngineView | None:
        return EngineView.of(
            RankStatus(n, 1, version, f"s{version}", condition)  # type: ignore[arg-type]
            for n, (version, condition) in enumerate(ranks)
        )

    assert view() is None
    assert view((None, "exact")) is None
    assert view((3, "exact"), (None, "exact")) is None
    assert view((3, "exact"), (2, "exact")) == EngineView(2, "s2", True)
    assert view((3, "exact"), (2, "unknown")) == EngineView(2, "s2", False)
    assert view((None, "unknown")) == EngineView(0, None, False)


@given(st.data())
def test_following_the_choices_ends_at_the_newest_version(data: st.DataObject) -> None:
    """Over random journals: steps and anchors, old ones deleted, with an engine that starts anywhere."""
    newest = data.draw(st.integers(0, 12), label="newest")
    kinds = [data.draw(st.sampled_from(["delta", "anchor", "both"])) for _ in range(newest)]
    deltas, anchors = set(), set()
    for version, kind in enumerate(kinds, start=1):
        if kind != "anchor":
            deltas.add((version - 1, version))
        if kind != "delta":
            anchors.add(version)
    kept_from = data.draw(st.integers(0, max(anchors, default=0)), label="kept from")
    deltas = {step for step in deltas if step[1] > kept_from}
    anchors = {version for version in anchors if version >= kept_from}
    refs = [ArtifactRef(target, f"{base}.fast", "delta", base, "fast") for base, target in deltas]
    what = feed(newest, bases_of(refs, newest), max(anchors, default=None))
    view = EngineView(data.draw(st.integers(0, newest), label="engine"), "s", data.draw(st.booleans(), label="trusted"))
    possible = bool(anchors) or (view.trusted and kept_from <= view.version)
    for _ in range(4):
        if view == EngineView(newest, "s", True):
            return
        try:
            choice = choose(view, what)
        except VersionNotFound:
            assert not possible, "an anchor, or an unbroken chain of steps, was there"
            return
        assert choice is not None and not choice.draft
        if choice.kind == "delta":
            assert view.trusted and choice.base == view.version
            steps = {(n, n + 1) for n in range(choice.base, choice.target)}
            assert steps <= deltas
        else:
            assert choice.target in anchors
        view = EngineView(choice.target, "s", True)
    raise AssertionError(f"four artifacts were not enough: {view}")


@given(
    st.sets(st.tuples(st.integers(0, 15), st.integers(0, 15)).filter(lambda pair: pair[0] < pair[1])),
    st.integers(0, 15),
)
def test_bases_are_all_versions_that_lead_to_the_newest(pairs: set[tuple[int, int]], newest: int) -> None:
    refs = [ArtifactRef(target, f"{base}.fast", "delta", base, "fast") for base, target in pairs]

    def leads(version: int) -> bool:
        return version == newest or any(leads(target) for base, target in pairs if base == version)

    expected = {version for version in range(16) if version != newest and leads(version)}
    spans = bases_of(refs, newest)
    assert [version for span in spans for version in range(span.first, span.last + 1)] == sorted(expected)
    assert all(a.last + 1 < b.first for a, b in pairwise(spans)), "spans are as few as can be"
