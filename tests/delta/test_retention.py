from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrowrl.delta.chain import ArtifactRef, find_path, roots
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.retention import Retention, superfluous
from sparrowrl.errors import ConfigError, JournalError, VersionNotFound

ORIGIN = ArtifactRef(0, "origin", "origin", None, None)


def delta(base: int, target: int) -> ArtifactRef:
    return ArtifactRef(target, f"{base}.fast", "delta", base, "fast")


def anchor(target: int) -> ArtifactRef:
    return ArtifactRef(target, "anchor.dense", "anchor", None, "dense")


def test_without_an_anchor_the_way_from_version_0_is_kept():
    chain = [ORIGIN, *(delta(k, k + 1) for k in range(9))]
    assert superfluous(chain, Retention(2)) == []
    with_merged = [*chain, delta(0, 7)]
    assert superfluous(with_merged, Retention(2)) == [delta(k, k + 1) for k in range(7)]


def test_versions_behind_the_newest_anchor_go():
    chain = [ORIGIN, *(delta(k, k + 1) for k in range(9)), anchor(3), anchor(6), delta(0, 9)]
    gone = superfluous(chain, Retention(2))
    assert anchor(3) in gone and anchor(6) not in gone and ORIGIN not in gone
    assert {a.target for a in chain if a not in gone and a.kind == "delta"} == {7, 8, 9}
    assert superfluous(chain, Retention(2, anchors=2)) == [delta(k, k + 1) for k in range(6)]
    assert superfluous([], Retention(1)) == []


@settings(deadline=None)
@given(st.data())
def test_the_newest_version_stays_within_reach(data):
    newest = data.draw(st.integers(1, 12))
    fresh = data.draw(st.sets(st.integers(1, newest)))  # versions that are anchors because a trainer began anew
    anchors = {anchor(v) for v in fresh | data.draw(st.sets(st.integers(1, newest)))}
    singles = {delta(v - 1, v) for v in range(1, newest + 1) if v not in fresh}
    pairs = st.tuples(st.integers(0, newest), st.integers(0, newest))
    merged = {delta(a, b) for a, b in data.draw(st.sets(pairs)) if a < b and not fresh & set(range(a + 1, b + 1))}
    kept = [ORIGIN, *anchors, *singles, *merged]
    retention = Retention(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)))
    left = [a for a in kept if a not in superfluous(kept, retention)]
    assert ORIGIN in left
    assert find_path(left, newest, roots(left)) is not None
    own = {a.target for a in left if a.kind == "anchor"}
    if anchors:
        assert own == set(sorted(a.target for a in anchors)[-retention.anchors :])
        assert find_path(left, newest, {max(own)}) is not None
    for version in range(max(1, newest - retention.versions + 1), newest + 1):
        assert (delta(version - 1, version) in left) == (delta(version - 1, version) in kept)
    assert superfluous(left, retention) == []


@pytest.mark.parametrize(("versions", "anchors"), [(0, 1), (1, 0), (-1, 1)])
def test_it_keeps_at_least_one_of_each(versions, anchors):
    with pytest.raises(ConfigError):
        Retention(versions, anchors)


def test_a_journal_keeps_what_it_is_told(make_trainer, monkeypatch):
    trainer = make_trainer(anchor_every=4)
    monkeypatch.setattr(trainer.journal, "_retention", Retention(2))
    trainer.run(11)
    journal = trainer.journal
    assert [(a.target, a.kind) for a in journal.artifacts()] == [
        (0, "origin"), (8, "anchor"), (9, "delta"), (10, "delta"), (11, "delta"),
    ]  # fmt: skip
    assert sorted(p.name for p in (journal.root / "runs/run/v").iterdir()) == ["0", "10", "11", "8", "9"]
    got = materialize(journal, 11, trainer.history[0])
    assert all(bool((got[n].view(-1) == w.view(-1)).all()) for n, w in trainer.history[11].items() if n != "fp8")
    for gone in (3, 7):
        with pytest.raises(VersionNotFound, match="take an anchor"):
            materialize(journal, gone, trainer.history[0])


def test_a_reader_in_the_middle_gets_version_not_found(trainer):
    trainer.run(1)
    journal = trainer.journal
    manifest = journal.manifest(1, "0.fast")
    with open(journal.folder(journal.draft(1, "0.fast").artifact) / "manifest", "rb") as half_read:
        journal.remove(journal.artifacts()[1])
        assert half_read.read()
    with pytest.raises(VersionNotFound):
        journal.segment(1, "0.fast", manifest.segments[0])
    with pytest.raises(VersionNotFound):
        journal.manifest(1, "0.fast")
    assert journal.drafts() == [] and journal.versions() == [0]
    journal.remove(ArtifactRef(1, "0.fast", "delta", 0, "fast"))


def test_a_commit_stands_though_old_versions_cannot_be_deleted(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(anchor_every=1)
    monkeypatch.setattr(trainer.journal, "_retention", Retention(1))

    def refuse(artifact):
        raise JournalError("busy")

    monkeypatch.setattr(trainer.journal, "remove", refuse)
    with caplog.at_level(logging.WARNING):
        trainer.run(3)
    assert trainer.journal.newest() == 3
    assert "could not delete old versions: busy" in caplog.text
