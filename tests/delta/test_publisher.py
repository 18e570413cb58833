from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Draft, Journal
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.publisher import Publisher, _sum_of_parts
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import ConfigError, JournalError, JournalLocked, LayoutError, SparrowError, StateError


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert_bits_equal(got[name], expected[name])


def snapshot_bits(publisher):
    return [None if part.bits is None else part.bits.clone() for part in publisher._snapshot.parts]


def test_every_version_comes_out_bit_for_bit(trainer):
    trainer.run(5)
    assert trainer.journal.versions() == [0, 1, 2, 3, 4, 5]
    for version, expected in trainer.history.items():
        assert_same(materialize(trainer.journal, version, trainer.history[0]), expected)


def test_counts_and_sizes(trainer):
    trainer.step()
    before = trainer.history[0]
    done = trainer.publish()
    now = trainer.history[1]
    changed = sum(int((now[n].view(torch.int16) != before[n].view(torch.int16)).sum()) for n in list(now)[:2])
    assert (done.version, done.kind, done.changed) == (1, "delta", changed)
    assert done.elements == sum(t.numel() for t in now.values())
    folder = trainer.journal.root / "runs/run/v/1/0.fast"
    assert done.payload_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert done.bits_per_changed == 8 * done.payload_bytes / changed


def test_special_values_survive(make_trainer):
    trainer = make_trainer()
    up = trainer.weights["layers.0.up.weight"]
    up.view(torch.int16)[0, :6] = torch.tensor([0x7FC1, -1, 0x7F80, -0x80, 1, -0x8000], dtype=torch.int16)
    trainer.weights["embed.weight"][0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    trainer.weights["positions"][3] = torch.iinfo(torch.int64).min
    trainer.weights["mask"][1] = True
    trainer.publish()
    up.view(torch.int16)[0, :6] += 1
    trainer.weights["positions"][3] = torch.iinfo(torch.int64).max
    trainer.publish()
    for version in (1, 2):
        assert_same(materialize(trainer.journal, version, trainer.history[0]), trainer.history[version])


def test_layouts_in_memory_do_not_matter(make_trainer):
    trainer = make_trainer()
    trainer.weights["embed.weight"] = trainer.weights["embed.weight"].t().contiguous().t()
    trainer.run(2)
    assert_same(materialize(trainer.journal, 2, trainer.history[0]), trainer.history[2])


def test_wire_dtype_none_keeps_each_dtype(tmp_path, credentials):
    weights = {"a": torch.randn(100), "b": torch.randn(7).half()}
    base = {name: t.clone() for name, t in weights.items()}
    sink = JournalSink(tmp_path, credentials)
    publisher = Publisher(sink, weights.items(), wire_dtype=None)
    weights["a"][3] += 1e-6
    assert publisher.publish(weights.items()).changed == 1
    assert_same(materialize(sink.journal, 1, base), weights)


def test_one_byte_floats_keep_their_dtype(trainer):
    layout = trainer.journal.layout()
    assert layout.tensors[layout.number("fp8")].dtype == "F8_E4M3"


def test_everything_changed_goes_dense(trainer):
    trainer.weights["embed.weight"].normal_()
    done = trainer.publish()
    trainer.run(1)
    assert done.payload_bytes < 3 * trainer.weights["embed.weight"].numel()
    for version in (1, 2):
        assert_same(materialize(trainer.journal, version, trainer.history[0]), trainer.history[version])


def test_nothing_changed_is_a_version_and_a_warning(trainer, caplog):
    with caplog.at_level(logging.INFO):
        done = trainer.publish()
    assert (done.version, done.changed, done.bits_per_changed) == (1, 0, 0.0)
    assert any(record.levelno == logging.WARNING and "no changed weight" in record.message for record in caplog.records)
    assert trainer.journal.manifest(1, "0.fast").segments == ()


def test_anchors_every_n(make_trainer):
    trainer = make_trainer(anchor_every=2)
    trainer.run(5)
    anchors = [a.target for a in trainer.journal.artifacts() if a.kind == "anchor"]
    assert anchors == [2, 4]
    for version in (2, 3, 4, 5):
        assert_same(materialize(trainer.journal, version), trainer.history[version])


def test_a_failed_anchor_is_written_next_time(make_trainer, monkeypatch):
    trainer = make_trainer(anchor_every=1)
    commit = Draft.commit

    def refuse_anchor(draft: Draft, manifest: Manifest) -> None:
        if manifest.kind == "anchor":
            raise JournalError("no space")
        commit(draft, manifest)

    monkeypatch.setattr(Draft, "commit", refuse_anchor)
    trainer.run(1)
    assert [a.kind for a in trainer.journal.artifacts()] == ["origin", "delta"]
    assert trainer.journal.drafts() == []
    monkeypatch.undo()
    trainer.run(1)
    assert [(a.target, a.kind) for a in trainer.journal.artifacts()][-2:] == [(2, "delta"), (2, "anchor")]


def anchors_of(trainer):
    return [artifact.target for artifact in trainer.journal.artifacts() if artifact.kind == "anchor"]


def test_an_anchor_on_demand_is_the_newest_version_whole(trainer):
    first = trainer.publisher.write_anchor()
    trainer.run(2)
    trainer.step()  # not published: not in the anchor
    done = trainer.publisher.write_anchor()
    elements = sum(t.numel() for t in trainer.history[2].values())
    assert (first.version, first.kind, first.changed) == (0, "anchor", elements)
    assert (done.version, done.kind, done.changed) == (2, "anchor", elements)
    assert done.payload_bytes > elements
    assert anchors_of(trainer) == [0, 2] and trainer.publisher.anchored == 2
    assert trainer.publisher.version == 2 and trainer.publisher.last.kind == "delta"
    trainer.publish()
    for version in (0, 1, 2, 3):
        assert_same(materialize(trainer.journal, version), trainer.history[version])


def test_an_anchor_that_is_there_is_not_written_again(make_trainer):
    trainer = make_trainer(anchor_every=2)
    trainer.run(2)
    written = (trainer.journal.root / "runs/run/v/2/anchor.dense/manifest").stat().st_mtime_ns
    again = trainer.publisher.write_anchor()
    assert (again.version, again.kind, again.changed, again.payload_bytes) == (2, "anchor", 0, 0)
    trainer.sink.close()
    resumed = make_trainer()  # whose first version is an anchor of another process
    resumed.sink.close()
    third = make_trainer()
    assert third.publisher.anchored is None
    assert third.publisher.write_anchor().changed == 0
    assert anchors_of(third) == [2, 3]
    assert (trainer.journal.root / "runs/run/v/2/anchor.dense/manifest").stat().st_mtime_ns == written


def test_an_anchor_on_demand_that_fails_raises_and_changes_nothing(trainer, monkeypatch):
    trainer.run(1)
    monkeypatch.setattr(Draft, "commit", lambda *_: (_ for _ in ()).throw(JournalError("no space")))
    with pytest.raises(JournalError, match="no space"):
        trainer.publisher.write_anchor()
    monkeypatch.undo()
    assert anchors_of(trainer) == [] and trainer.journal.drafts() == [] and trainer.publisher.anchored is None
    assert trainer.publisher.write_anchor().version == 1
    trainer.run(1)
    assert_same(materialize(trainer.journal, 2), trainer.history[2])


def test_an_anchor_on_demand_after_a_failed_publish_is_of_the_version_before(trainer, monkeypatch):
    trainer.run(1)
    trainer.step()
    monkeypatch.setattr(Draft, "commit", lambda *_: (_ for _ in ()).throw(JournalError("no space")))
    with pytest.raises(JournalError):
        trainer.publish()
    monkeypatch.undo()
    assert trainer.publisher.write_anchor().version == 1
    assert_same(materialize(trainer.journal, 1), trainer.history[1])


def test_no_anchor_of_a_version_that_is_not_sure_to_be_the_newest(trainer, monkeypatch):
    commit, newest = Draft.commit, JournalSink.newest

    def commit_and_fail(draft: Draft, manifest: Manifest) -> None:
        commit(draft, manifest)
        monkeypatch.setattr(JournalSink, "newest", lambda sink: (_ for _ in ()).throw(JournalError("hub is away")))
        raise JournalError("connection lost")

    trainer.step()
    monkeypatch.setattr(Draft, "commit", commit_and_fail)
    with pytest.raises(JournalError, match="connection lost"):
        trainer.publish()
    monkeypatch.setattr(Draft, "commit", commit)
    for hub_is_away in (True, False):
        if not hub_is_away:
            monkeypatch.setattr(JournalSink, "newest", newest)
        with pytest.raises(StateError, match="publish again"):
            trainer.publisher.write_anchor()
    assert trainer.publish().version == 1
    assert trainer.publisher.write_anchor().version == 1


def test_an_anchor_on_demand_settles_one_that_was_due(make_trainer, monkeypatch):
    trainer = make_trainer(anchor_every=1)
    commit = Draft.commit

    def refuse_anchor(draft: Draft, manifest: Manifest) -> None:
        if manifest.kind == "anchor":
            raise JournalError("no space")
        commit(draft, manifest)

    monkeypatch.setattr(Draft, "commit", refuse_anchor)
    trainer.run(1)
    monkeypatch.undo()
    assert trainer.publisher._anchor_due
    trainer.publisher.write_anchor()
    assert not trainer.publisher._anchor_due and anchors_of(trainer) == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("scale"), "1 are missing.*scale"),
        (lambda w: w.update(more=torch.zeros(1)), "'more'"),
        (lambda w: w.update(scale=torch.zeros(2)), "scale"),
        (lambda w: w.update(positions=torch.arange(17, dtype=torch.int32)), "positions"),
    ],
)
def test_other_tensors_are_refused_by_name(trainer, change, words):
    saved = dict(trainer.weights)
    change(trainer.weights)
    with pytest.raises(LayoutError, match=words):
        trainer.publish()
    assert trainer.journal.newest() == 0 and trainer.journal.drafts() == []
    trainer.weights = saved
    trainer.run(1)
    assert_same(materialize(trainer.journal, 1, trainer.history[0]), trainer.history[1])


def test_a_name_twice_is_refused(tmp_path, credentials, trainer):
    pairs = [*trainer.weights.items(), ("scale", trainer.weights["scale"])]
    with pytest.raises(LayoutError, match="'scale' twice"):
        trainer.publisher.publish(pairs)
    with pytest.raises(LayoutError, match="'scale' twice"):
        Publisher(JournalSink(tmp_path / "other", credentials), pairs)


def test_one_storage_under_two_names_is_published_under_both(tmp_path, credentials):
    embed = torch.randn(10, 3)
    weights = {"embed": embed, "head": embed}
    base = {name: t.bfloat16() for name, t in weights.items()}
    sink = JournalSink(tmp_path, credentials)
    publisher = Publisher(sink, weights.items())
    embed[4] += 1
    assert publisher.publish(weights.items()).changed == 6
    assert_same(materialize(sink.journal, 1, base), {name: t.bfloat16() for name, t in weights.items()})


def test_a_dtype_that_cannot_travel_is_refused(tmp_path, credentials):
    with pytest.raises(LayoutError, match=r"angles.*complex64.*leave it out"):
        Publisher(JournalSink(tmp_path, credentials), [("angles", torch.zeros(3, dtype=torch.complex64))])


def test_parameters_that_require_grad(tmp_path, credentials):
    model = torch.nn.Linear(5, 3)
    sink = JournalSink(tmp_path, credentials)
    publisher = Publisher(sink, model.named_parameters())
    base = {name: t.detach().bfloat16() for name, t in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(5)).sum().backward()
    with torch.no_grad():
        model.weight -= model.weight.grad
    publisher.publish(model.named_parameters())
    expected = {name: t.detach().bfloat16() for name, t in model.named_parameters()}
    assert_same(materialize(sink.journal, 1, base), expected)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.bool, torch.complex64, torch.float8_e8m0fnu, "bfloat16"]
)
def test_a_wire_dtype_that_would_lose_weights_is_refused(tmp_path, credentials, dtype):
    with pytest.raises(ConfigError, match="wire_dtype"):
        Publisher(JournalSink(tmp_path, credentials), {"w": torch.randn(3)}.items(), wire_dtype=dtype)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, device="meta"), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), [1.0], None],
)
def test_what_is_no_tensor_with_weights_is_refused(tmp_path, credentials, tensor):
    with pytest.raises(LayoutError, match="w: expected a dense tensor"):
        Publisher(JournalSink(tmp_path, credentials), [("w", tensor)])


def test_no_tensors_are_refused(tmp_path, credentials):
    used_up = iter([("w", torch.zeros(3))])
    list(used_up)
    with pytest.raises(LayoutError, match="used up"):
        Publisher(JournalSink(tmp_path, credentials), used_up)


def test_a_dict_is_refused_with_advice(tmp_path, credentials, trainer):
    with pytest.raises(LayoutError, match=r"\.items\(\)"):
        Publisher(JournalSink(tmp_path / "new", credentials), trainer.weights)
    with pytest.raises(LayoutError, match=r"\.items\(\)"):
        trainer.publisher.publish(trainer.weights)
    trainer.run(1)


def test_threads_take_turns(trainer):
    trainer.step()
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(trainer.publisher.publish, trainer.weights.items()) for _ in range(4)]
    assert sorted(task.result().version for task in tasks) == [1, 2, 3, 4]
    assert_same(materialize(trainer.journal, 4, trainer.history[0]), trainer.wire())


def in_a_fork(work):
    """What `work` raises in a forked child, as its class name and message."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing"
        try:
            work()
        except SparrowError as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(child, 0)
    return message


def test_a_fork_cannot_publish(trainer):
    trainer.step()
    assert "ConfigError" in in_a_fork(lambda: trainer.publisher.publish(trainer.weights.items()))
    assert "ConfigError" in in_a_fork(trainer.publisher.write_anchor)
    assert "JournalError" in in_a_fork(
        lambda: Publisher(trainer.sink, {n: t for n, t in trainer.wire().items()}.items())
    )
    assert trainer.journal.newest() == 0
    assert trainer.publish().version == 1


def test_a_negative_anchor_interval_is_refused(tmp_path, credentials):
    with pytest.raises(ConfigError, match="anchor_every"):
        Publisher(JournalSink(tmp_path, credentials), [], anchor_every=-1)


# Failures


def small_segments(monkeypatch):
    """Several segments a version."""
    from sparrowrl.delta import publisher, segment

    monkeypatch.setattr(publisher, "SegmentPacker", lambda layout: segment.SegmentPacker(layout, 40))


def test_a_publish_that_fails_anywhere_leaves_all_as_it_was(trainer, monkeypatch):
    small_segments(monkeypatch)
    trainer.run(1)
    puts = len(trainer.journal.manifest(1, "0.fast").segments)
    assert puts > 3
    put, commit = Draft.put, Draft.commit
    failed_at = []
    for fatal in range(puts + 3):
        calls = iter(range(1000))
        trainer.step()

        def fail_at(method, what, fatal=fatal, calls=calls):
            def wrapped(draft, argument):
                if next(calls) == fatal:
                    failed_at.append(what)
                    raise JournalError("no space left")
                return method(draft, argument)

            return wrapped

        monkeypatch.setattr(Draft, "put", fail_at(put, "put"))
        monkeypatch.setattr(Draft, "commit", fail_at(commit, "commit"))
        before, newest = snapshot_bits(trainer.publisher), trainer.journal.newest()
        with pytest.raises(JournalError, match="no space left"):
            while True:  # a version may need fewer segments than `fatal`: publish until it fails
                trainer.publish()
                before, newest = snapshot_bits(trainer.publisher), trainer.journal.newest()
        for old, now in zip(before, snapshot_bits(trainer.publisher), strict=True):
            assert_bits_equal(now, old)
        assert trainer.journal.newest() == newest == trainer.publisher.version
        assert trainer.journal.drafts() == []
        monkeypatch.setattr(Draft, "put", put)
        monkeypatch.setattr(Draft, "commit", commit)
        assert trainer.publish().kind == "delta"
        assert_same(materialize(trainer.journal, newest + 1, trainer.history[0]), trainer.wire())
    assert {"put", "commit"} == set(failed_at)


def test_an_error_of_the_weights_iterator_is_passed_on(trainer):
    def weights():
        yield from list(trainer.weights.items())[:3]
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.publisher.publish(weights())
    trainer.run(1)
    assert_same(materialize(trainer.journal, 1, trainer.history[0]), trainer.history[1])


@pytest.mark.parametrize("fails", ["put", "take"])
def test_an_iterator_is_used_up_although_the_publish_failed(trainer, monkeypatch, fails):
    """Ranks may gather tensors in it: one that failed must not leave the others alone."""
    taken = []

    def weights():
        for name, tensor in trainer.weights.items():
            taken.append(name)
            yield name, torch.zeros(1, dtype=torch.complex64) if (fails, name) == ("take", "empty") else tensor

    small_segments(monkeypatch)
    trainer.step()
    if fails == "take":
        with pytest.raises(LayoutError, match="complex64"):
            Publisher(trainer.sink, weights())
    else:
        monkeypatch.setattr(Draft, "put", lambda *_: (_ for _ in ()).throw(JournalError("no space")))
        with pytest.raises(JournalError):
            trainer.publisher.publish(weights())
    assert taken == list(trainer.weights)


def test_a_lost_answer_to_a_commit_is_a_success(trainer, monkeypatch):
    commit = Draft.commit

    def commit_and_fail(draft: Draft, manifest: Manifest) -> None:
        commit(draft, manifest)
        raise JournalError("connection lost")

    monkeypatch.setattr(Draft, "commit", commit_and_fail)
    trainer.run(2)
    monkeypatch.undo()
    assert trainer.publisher.version == 2
    trainer.run(1)
    assert [a.kind for a in trainer.journal.artifacts()] == ["origin", "delta", "delta", "delta"]
    assert_same(materialize(trainer.journal, 3, trainer.history[0]), trainer.history[3])


@pytest.mark.parametrize("newer_weights", [False, True])
def test_a_commit_that_nobody_can_tell_about_is_settled_next_time(trainer, monkeypatch, newer_weights):
    commit, newest = Draft.commit, JournalSink.newest

    def commit_and_fail(draft: Draft, manifest: Manifest) -> None:
        commit(draft, manifest)
        monkeypatch.setattr(JournalSink, "newest", lambda sink: (_ for _ in ()).throw(JournalError("hub is away")))
        raise JournalError("connection lost")

    trainer.step()
    monkeypatch.setattr(Draft, "commit", commit_and_fail)
    with pytest.raises(JournalError, match="connection lost"):
        trainer.publish()
    monkeypatch.setattr(Draft, "commit", commit)
    monkeypatch.setattr(JournalSink, "newest", newest)
    trainer.history[1] = trainer.wire()
    if newer_weights:
        trainer.step()
    done = trainer.publish()
    assert (done.version, done.kind) == ((2, "anchor") if newer_weights else (1, "delta"))
    trainer.run(1)
    for version in range(1, trainer.publisher.version + 1):
        assert_same(materialize(trainer.journal, version, trainer.history[0]), trainer.history[version])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((0, 6, 6, 1), True, 5), ((0, 6, 6, 1), True, 5)], "shards that make up"),  # both publish the same half
        ([((0, 6, 6, 1), True, 5), ((5, 6, 6, 1), True, 5)], "shards that make up"),
        ([((0, 6, 6, 1), True, 5), ((0, 0, 0, 1), True, 0)], "shards that make up"),
        ([((0, 12, 12, 1), True, 5), ((0, 12, 12, 1), False, 6)], "rank 1 holds other bits"),
        ([((0, 12, 12, 1), True, 5), ((0, 6, 6, 1), False, 5)], "rank 1 holds other bits"),
    ],
)
def test_parts_of_ranks_that_do_not_make_up_a_tensor_are_refused(parts, words):
    with pytest.raises(LayoutError, match=words):
        _sum_of_parts("w", 12, parts)


def test_parts_of_ranks_add_up():
    parts = [
        ((0, 6, 6, 1), True, 2**64 - 1),
        ((6, 6, 6, 1), True, 3),
        ((6, 6, 6, 1), False, 3),
        ((0, 0, 0, 1), False, 0),
    ]
    assert _sum_of_parts("w", 12, parts) == 2


# Resuming


def test_resume_with_the_same_weights_goes_on(make_trainer):
    first = make_trainer()
    first.run(2)
    first.sink.close()
    second = make_trainer()
    assert second.publisher.version == 3  # the weights of a new Trainer are those of version 0: an anchor
    second.sink.close()
    third = make_trainer()
    assert third.publisher.version == 3 and third.journal.newest() == 3
    third.run(1)
    assert [(a.target, a.kind) for a in third.journal.artifacts()][-2:] == [(3, "anchor"), (4, "delta")]
    assert_same(materialize(third.journal, 4), third.history[4])
    assert_same(materialize(third.journal, 2, first.history[0]), first.history[2])


def test_a_run_of_another_model_is_refused(tmp_path, credentials, trainer):
    trainer.sink.close()
    with pytest.raises(LayoutError, match="begin a new run"):
        Publisher(JournalSink(tmp_path / "journal", credentials), [("other", torch.zeros(3))])


def test_two_trainers_on_one_run_are_refused(make_trainer):
    first = make_trainer()
    with pytest.raises(JournalLocked, match="process"):
        make_trainer()
    first.sink.close()
    make_trainer()


def test_the_journal_is_signed_with_the_run_key(trainer):
    trainer.run(1)
    other = Journal(trainer.journal.root, "run", Credentials.new("run").run_key)
    with pytest.raises(Exception, match="MAC does not match"):
        other.manifest(1, "0.fast")
    assert Journal(trainer.journal.root, "run").manifest(1, "0.fast").target == 1
