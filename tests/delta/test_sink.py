from __future__ import annotations

import gc

import pytest

import sparrowrl
from sparrowrl.delta.retention import Retention
from sparrowrl.delta.sink import Head, JournalSink
from sparrowrl.errors import JournalError, JournalLocked


def test_public_names():
    assert sparrowrl.JournalSink is JournalSink
    assert all(getattr(sparrowrl, name).__name__ == name for name in sparrowrl.__all__)


def test_an_empty_run_has_no_head(tmp_path, credentials):
    sink = JournalSink(tmp_path, credentials)
    assert sink.newest() is None and sink.run == credentials.run
    assert list(tmp_path.iterdir()) == []


def test_the_head_is_the_newest_version(trainer):
    trainer.run(2)
    journal = trainer.journal
    manifest = journal.manifest(2, "1.fast")
    expected = Head(2, manifest.target_state, journal.layout().id, journal.fingerprints(2))
    assert trainer.sink.newest() == expected
    assert JournalSink(journal.root, sparrowrl.Credentials("run", journal._run_key, "r", "w")).newest() == expected


def test_it_knows_what_is_committed(make_trainer):
    trainer = make_trainer(anchor_every=2)
    trainer.run(2)
    trainer.sink.open(3, "2.fast").put(b"a draft")
    known = {(2, "1.fast"): True, (2, "anchor.dense"): True, (1, "anchor.dense"): False, (3, "2.fast"): False}
    assert {artifact: trainer.sink.has(*artifact) for artifact in known} == known


def test_leading_twice_is_leading_once(tmp_path, credentials):
    first, second = (JournalSink(tmp_path, credentials) for _ in range(2))
    token = first.lead()
    assert first.lead() == token
    with pytest.raises(JournalLocked):
        second.lead()
    second.join(token)
    with pytest.raises(JournalError):
        second.join("another token")
    first.close()
    assert second.lead() != token
    second.close()
    second.close()


def test_a_sink_that_is_forgotten_frees_the_lock(tmp_path, credentials):
    sink = JournalSink(tmp_path, credentials)
    sink.lead()
    del sink
    gc.collect()
    other = JournalSink(tmp_path, credentials)
    other.lead()
    other.close()


def test_a_sink_closes_at_the_end_of_its_block(tmp_path, credentials):
    for _ in range(2):
        with JournalSink(tmp_path, credentials) as sink:
            sink.lead()


def test_retention_is_applied_at_each_commit(tmp_path, credentials, trainer):
    trainer.run(1)
    sink = JournalSink(tmp_path / "kept", credentials, retention=Retention(1))
    publisher = sparrowrl.Publisher(sink, trainer.weights.items(), anchor_every=1)
    for _ in range(4):
        trainer.step()
        publisher.publish(trainer.weights.items())
    assert [(a.target, a.kind) for a in sink.journal.artifacts()] == [(0, "origin"), (4, "delta"), (4, "anchor")]
