from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sparrowrl.delta import files
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.layout import Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    FormatError,
    JournalError,
    JournalLocked,
    LimitExceeded,
    VersionConflict,
    VersionNotFound,
)

LAYOUT = Layout([TensorSpec("w", "BF16", (4,))])
KEY = bytes(range(32))


def state(fingerprint: int) -> bytes:
    return state_id(LAYOUT, [fingerprint])


def origin(fingerprint: int = 0) -> Manifest:
    return Manifest(
        run="run", kind="origin", codec=None, base=None, target=0, base_state=None, target_state=state(fingerprint),
        layout=LAYOUT.id, created_ms=1, changed=0, tensors=(TensorChange(0, 0, fingerprint),), segments=(),
    )  # fmt: skip


def delta(base: int, target: int, segments: list[SegmentRef], old: int | None = None) -> Manifest:
    """From fingerprint `base` (or `old`) to fingerprint `target`."""
    return Manifest(
        run="run", kind="delta", codec="fast", base=base, target=target, base_state=state(base if old is None else old),
        target_state=state(target), layout=LAYOUT.id, created_ms=1, changed=1, tensors=(TensorChange(0, 1, target),),
        segments=tuple(segments),
    )  # fmt: skip


def anchor(target: int, segments: list[SegmentRef], fingerprint: int) -> Manifest:
    return Manifest(
        run="run", kind="anchor", codec="dense", base=None, target=target, base_state=None,
        target_state=state(fingerprint), layout=LAYOUT.id, created_ms=1, changed=4,
        tensors=(TensorChange(0, 4, fingerprint),), segments=tuple(segments),
    )  # fmt: skip


def add(journal: Journal, manifest: Manifest) -> None:
    draft = journal.draft(manifest.target, manifest.name)
    draft.commit(manifest)


def put_and_commit(journal: Journal, base: int, target: int) -> SegmentRef:
    draft = journal.draft(target, f"{base}.fast")
    ref = draft.put(b"segment %d-%d" % (base, target))
    draft.commit(delta(base, target, [ref]))
    return ref


@pytest.fixture
def journal(tmp_path):
    """An open journal at version 0."""
    made = Journal(tmp_path / "journal", "run", KEY)
    with made.write_lock():
        made.put_layout(LAYOUT.to_bytes())
        add(made, origin())
        yield made


def test_an_empty_journal(tmp_path):
    journal = Journal(tmp_path / "not there", "run")
    assert (journal.newest(), journal.versions(), journal.artifacts(), journal.drafts()) == (None, [], [], [])
    with pytest.raises(VersionNotFound):
        journal.layout()
    with pytest.raises(VersionNotFound):
        journal.fingerprints(0)
    with pytest.raises(VersionNotFound):
        journal.manifest(0, "origin")
    assert not (tmp_path / "not there").exists()


def test_what_is_committed_is_read_by_another_journal(journal):
    refs = [put_and_commit(journal, base, base + 1) for base in range(3)]
    other = Journal(journal.root, "run", KEY)
    assert other.versions() == [0, 1, 2, 3] and other.newest() == 3
    assert other.manifest(2, "1.fast") == delta(1, 2, [refs[1]])
    assert other.segment(2, "1.fast", refs[1]) == b"segment 1-2"
    assert other.layout() == LAYOUT
    assert [other.fingerprints(version) for version in (3, 0, 2)] == [(3,), (0,), (2,)]
    names = {str(path.relative_to(journal.root)) for path in journal.root.rglob("*") if path.is_file()}
    assert {n for n in names if "/v/1/" in n} == {
        "runs/run/v/1/0.fast/manifest",
        f"runs/run/v/1/0.fast/{refs[0].digest.hex()}.seg",
    }
    assert f"runs/run/layout/{LAYOUT.id.hex()}" in names


def test_a_draft_is_no_version(journal):
    draft = journal.draft(1, "0.fast")
    refs = [draft.put(bytes([k])) for k in range(5)]
    assert draft.put(bytes([2])) == refs[2] and draft.segments == refs
    assert journal.newest() == 0 and journal.versions() == [0]
    assert [(d.target, d.name) for d in journal.drafts()] == [(1, "0.fast")]
    assert set(journal.draft_segments(1, "0.fast")) == set(refs)
    (journal.root / "runs/run/v/1/0.fast/ab.seg.tmp").symlink_to("gone")  # as a file renamed while it is listed
    assert set(journal.draft_segments(1, "0.fast")) == set(refs)
    draft.drop()
    assert journal.drafts() == [] and draft.segments == []
    with pytest.raises(VersionNotFound):
        journal.draft_segments(1, "0.fast")
    assert not (journal.root / "runs/run/v/1").exists()


# What may be committed


@pytest.mark.parametrize(
    "manifest",
    [
        delta(0, 2, [SegmentRef(bytes(32), 1)]),  # leaves out a version
        delta(1, 2, [SegmentRef(bytes(32), 1)]),  # from a version that is not there
        delta(0, 1, [SegmentRef(bytes(32), 1)], old=7),  # from another state
        anchor(0, [SegmentRef(bytes(32), 1)], 7),  # another state of version 0
        anchor(2, [SegmentRef(bytes(32), 1)], 7),
        origin(5),  # another content of an artifact that is there
    ],
)
def test_a_commit_that_does_not_follow_is_refused(journal, manifest):
    before = sorted(journal.root.rglob("*"))
    with pytest.raises(VersionConflict):
        add(journal, manifest)
    assert sorted(journal.root.rglob("*")) == before


def test_a_run_begins_with_an_origin(tmp_path):
    journal = Journal(tmp_path, "run")
    with journal.write_lock():
        journal.put_layout(LAYOUT.to_bytes())
        for manifest in (delta(0, 1, [SegmentRef(bytes(32), 1)]), anchor(0, [SegmentRef(bytes(32), 1)], 0)):
            with pytest.raises(VersionConflict, match="expected the origin"):
                add(journal, manifest)


def test_the_second_of_two_rivals_is_refused(journal):
    rivals = [journal.draft(1, "0.fast"), journal.draft(1, "anchor.dense")]
    manifests = [delta(0, 1, [rivals[0].put(b"a")]), anchor(1, [rivals[1].put(b"b")], 99)]
    outcomes: list[object] = []
    gate = threading.Barrier(2)

    def commit(draft, manifest):
        gate.wait()
        try:
            draft.commit(manifest)
            outcomes.append("ok")
        except VersionConflict:
            outcomes.append("refused")

    threads = [threading.Thread(target=commit, args=pair) for pair in zip(rivals, manifests, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["ok", "refused"]
    assert len(journal.artifacts()) == 2


def test_committing_again_changes_nothing(journal):
    ref = put_and_commit(journal, 0, 1)
    draft = journal.draft(1, "0.fast")
    draft.commit(delta(0, 1, [ref]))
    with pytest.raises(VersionConflict, match="artifacts never change"):
        draft.commit(replace(delta(0, 1, [ref]), created_ms=2))
    with pytest.raises(VersionConflict):
        draft.put(b"more")
    with pytest.raises(VersionConflict):
        draft.drop()
    assert journal.segment(1, "0.fast", ref) == b"segment 0-1"


def test_an_anchor_may_join_a_version_of_the_same_state(journal):
    put_and_commit(journal, 0, 1)
    draft = journal.draft(1, "anchor.dense")
    draft.commit(anchor(1, [draft.put(b"whole")], 1))
    put_and_commit(journal, 1, 2)
    merged = journal.draft(2, "0.fast")
    merged.commit(delta(0, 2, [merged.put(b"merged")]))
    assert [(a.target, a.name) for a in journal.artifacts()] == [
        (0, "origin"), (1, "0.fast"), (1, "anchor.dense"), (2, "0.fast"), (2, "1.fast"),
    ]  # fmt: skip
    assert Journal(journal.root, "run", KEY).fingerprints(2) == (2,)


def test_missing_and_short_segments_are_refused(journal):
    draft = journal.draft(1, "0.fast")
    ref = draft.put(b"abc")
    missing = SegmentRef(bytes(32), 3)
    for refs in ([ref, missing], [SegmentRef(ref.digest, 4)]):
        with pytest.raises(JournalError, match="put it first"):
            draft.commit(delta(0, 1, refs))
    assert journal.newest() == 0
    draft.commit(delta(0, 1, [ref]))


def test_a_delta_whose_fingerprints_do_not_give_its_state_is_refused(journal):
    draft = journal.draft(1, "0.fast")
    with pytest.raises(CorruptData, match="target state"):
        draft.commit(replace(delta(0, 1, [draft.put(b"x")]), target_state=state(5)))


def test_segments_of_an_earlier_attempt_are_deleted_at_commit(journal):
    draft = journal.draft(1, "0.fast")
    draft.put(b"stale")
    ref = draft.put(b"good")
    draft.commit(delta(0, 1, [ref]))
    assert sorted(os.listdir(journal.root / "runs/run/v/1/0.fast")) == sorted([f"{ref.digest.hex()}.seg", "manifest"])


def test_segments_have_a_limit(journal):
    draft = journal.draft(1, "0.fast")
    for data in (b"", bytes((16 << 20) + 1)):
        with pytest.raises(LimitExceeded):
            draft.put(data)


def test_no_commit_without_the_lock(tmp_path):
    journal = Journal(tmp_path, "run")
    journal.put_layout(LAYOUT.to_bytes())
    with pytest.raises(JournalError, match="writer lock"):
        add(journal, origin())


# One writer


def test_a_second_writer_is_refused_and_told_who_writes(journal):
    other = Journal(journal.root, "run", KEY)
    with pytest.raises(JournalLocked, match=f"process {os.getpid()} on "), other.write_lock():
        pass
    with Journal(journal.root, "other").write_lock():
        pass


LOCKER = """
import os, sys
from sparrowrl.delta.journal import Journal
with Journal(sys.argv[1], "run").write_lock():
    if os.fork() == 0:
        sys.stdin.read()  # a child that outlives the writer, until the test ends
        os._exit(0)
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_the_lock_is_free_when_its_process_is_killed_though_a_forked_child_lives(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    journal = Journal(tmp_path, "run")
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(JournalLocked, match=f"process {process.pid} "), journal.write_lock():
            pass
        process.kill()
        process.wait(timeout=30)
        with journal.write_lock():
            pass
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=30)


def test_ranks_join_the_journal_that_is_led(tmp_path, journal):
    with Journal(journal.root, "second").write_lock() as token:
        Journal(journal.root, "second").check_writer(token)
        for other in (Journal(tmp_path / "elsewhere", "second"), Journal(journal.root, "run")):
            with pytest.raises(JournalError, match="same directory"):
                other.check_writer(token)


def test_the_next_writer_drops_what_was_left(tmp_path):
    journal = Journal(tmp_path, "run")
    with journal.write_lock():
        journal.put_layout(LAYOUT.to_bytes())
        add(journal, origin())
        journal.draft(1, "0.fast").put(b"half")
        run = tmp_path / "runs/run"
        (run / "v/1/0.fast/manifest.abcd.tmp").write_bytes(b"half a manifest")
        (run / "layout/aa.tmp").write_bytes(b"half a layout")
        (run / "trash/1234").mkdir(parents=True)
        (run / "merge-1234").mkdir()
        (run / "merge-1234/x.seg").write_bytes(b"x")
    with journal.write_lock():
        assert journal.drafts() == [] and journal.versions() == [0]
    assert sorted(path.name for path in run.iterdir()) == ["layout", "v", "writer.lock"]
    assert os.listdir(run / "v") == ["0"] and os.listdir(run / "layout") == [LAYOUT.id.hex()]


def test_a_merge_at_work_is_not_taken_for_a_leftover(journal):
    with journal._workshop() as workshop:
        journal._drop_leftovers(keep_drafts=False)
        assert workshop.is_dir()
    assert not workshop.exists()


# Bad input and damage


@pytest.mark.parametrize("run", ["", "..", "a/b", ".hidden", "x" * 65, "a\n", "-x"])
def test_bad_run_names_are_refused(tmp_path, run):
    with pytest.raises(ConfigError):
        Journal(tmp_path, run)


@pytest.mark.parametrize(
    "key",
    [
        "runs/run/v/0/origin/../../../writer.lock",
        "runs/run/v/0/origin",
        "runs/run/writer.lock",
        "/etc/passwd",
        "../x",
        "runs/other/v/0/origin/manifest",
        "runs/run/v/00/origin/manifest",
        "runs/run/v/0/origin/manifest\n",
        "runs/run/v/0/origin/manifest\0",
    ],
)
def test_keys_from_outside_never_leave_the_run(journal, key):
    with pytest.raises(FormatError):
        journal.file(key)
    with pytest.raises(FormatError):
        journal.manifest(0, "../origin")


def test_keys_lead_to_files(journal):
    ref = put_and_commit(journal, 0, 1)
    key = f"runs/run/v/1/0.fast/{ref.digest.hex()}.seg"
    assert journal.file(key).read_bytes() == b"segment 0-1"
    with pytest.raises(VersionNotFound):
        journal.file("runs/run/v/2/1.fast/manifest")


def test_links_below_the_root_are_not_followed(tmp_path, journal):
    ref = put_and_commit(journal, 0, 1)
    outside = tmp_path / "outside"
    folder = journal.root / "runs/run/v/1/0.fast"
    folder.rename(outside)
    folder.symlink_to(outside)
    key = f"runs/run/v/1/0.fast/{ref.digest.hex()}.seg"
    for read in (lambda: journal.file(key), lambda: journal.segment(1, "0.fast", ref)):
        with pytest.raises(JournalError, match="symbolic link"):
            read()
    assert journal.newest() == 0
    folder.unlink()
    outside.rename(folder)
    (folder / key.rsplit("/", 1)[1]).rename(outside)
    (folder / key.rsplit("/", 1)[1]).symlink_to(outside)
    for read in (lambda: journal.file(key), lambda: journal.segment(1, "0.fast", ref)):
        with pytest.raises(JournalError, match="symbolic link"):
            read()


def test_a_root_behind_a_link_is_fine(tmp_path, journal):
    (tmp_path / "link").symlink_to(journal.root)
    assert Journal(tmp_path / "link", "run", KEY).layout() == LAYOUT


def test_strange_names_are_ignored(journal):
    versions = journal.root / "runs/run/v"
    for name in ("01", "x", "9" * 20, ".tmp"):
        (versions / name / "0.fast").mkdir(parents=True)
    (versions / "0" / "0.slow").mkdir()
    (versions / "7").write_text("a file")
    assert journal.versions() == [0] and journal.drafts() == []


def test_flipped_bits_are_found(journal):
    ref = put_and_commit(journal, 0, 1)
    folder = journal.root / "runs/run/v/1/0.fast"
    fresh = Journal(journal.root, "run", KEY)
    for name, read in (
        ("manifest", lambda: fresh.manifest(1, "0.fast")),
        (f"{ref.digest.hex()}.seg", lambda: fresh.segment(1, "0.fast", ref)),
        (f"../../../layout/{LAYOUT.id.hex()}", lambda: Journal(journal.root, "run").layout()),
    ):
        path = folder / name
        good = path.read_bytes()
        for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], b"", good + b"x"):
            path.write_bytes(bad)
            with pytest.raises(FormatError):
                read()
        path.write_bytes(good)
        read()


def test_a_manifest_in_another_place_is_refused(journal):
    put_and_commit(journal, 0, 1)
    put_and_commit(journal, 1, 2)
    versions = journal.root / "runs/run/v"
    (versions / "1/0.fast/manifest").write_bytes((versions / "2/1.fast/manifest").read_bytes())
    with pytest.raises(CorruptData, match="it was moved"):
        journal.manifest(1, "0.fast")


def test_a_manifest_of_another_key_is_refused(journal):
    with pytest.raises(CorruptData, match="MAC"):
        Journal(journal.root, "run", bytes(32)).manifest(0, "origin")
    assert Journal(journal.root, "run").manifest(0, "origin") == origin()


def test_a_dropped_segment_is_not_found(journal):
    ref = put_and_commit(journal, 0, 1)
    journal.file(f"runs/run/v/1/0.fast/{ref.digest.hex()}.seg").unlink()
    with pytest.raises(VersionNotFound):
        journal.segment(1, "0.fast", ref)


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free space"), (errno.EROFS, "writable"), (errno.EIO, "")]
)
def test_a_disk_that_refuses_is_an_error_with_advice(journal, monkeypatch, number, advice):
    draft = journal.draft(1, "0.fast")
    ref = draft.put(b"first")

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    for write in (lambda: draft.put(b"second"), lambda: draft.commit(delta(0, 1, [ref]))):
        with pytest.raises(JournalError, match=f"{os.strerror(number)}; .*{advice}"):
            write()
    monkeypatch.undo()
    assert journal.newest() == 0
    assert [path.name for path in (journal.root / "runs/run/v/1/0.fast").iterdir()] == [f"{ref.digest.hex()}.seg"]
    draft.commit(delta(0, 1, [ref]))
    assert journal.newest() == 1


def test_a_folder_without_permission_is_an_error_with_advice(tmp_path):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(JournalError), Journal(tmp_path, "run").write_lock():
        pass
