"""The commands init, inspect, verify and materialize, on a real journal."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal


def one_line(outcome, status, *words):
    assert outcome.status == status
    assert outcome.err.count("\n") == 1 and all(word in outcome.err for word in words), outcome.err


# init


def test_init_makes_credentials_for_both_sides(sparrowrl, tmp_path):
    trainer, engine = tmp_path / "trainer.json", tmp_path / "engine.json"
    assert sparrowrl("init", "--run", "my-run", "--out", trainer, "--engine-out", engine).status == 0
    both = [Credentials.load(path) for path in (trainer, engine)]
    assert both[0].writer is not None and both[1].writer is None
    assert both[0].for_engines() == both[1]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (trainer, engine))


def test_init_overwrites_nothing(sparrowrl, tmp_path):
    there = tmp_path / "engine.json"
    there.write_text("precious")
    outcome = sparrowrl("init", "--run", "r", "--out", tmp_path / "new.json", "--engine-out", there)
    one_line(outcome, 2, "ConfigError", "engine.json")
    assert there.read_text() == "precious" and not (tmp_path / "new.json").exists()
    one_line(sparrowrl("init", "--run", "../x", "--out", tmp_path / "new.json"), 2, "run name")
    one_line(sparrowrl("init", "--run", "r", "--out", tmp_path / "no" / "new.json"), 2, "ConfigError", "new.json")


@pytest.mark.parametrize("second", ["new.json", "no/engine.json"])
def test_init_makes_all_or_nothing(sparrowrl, tmp_path, second):
    outcome = sparrowrl("init", "--run", "r", "--out", tmp_path / "new.json", "--engine-out", tmp_path / second)
    one_line(outcome, 2, "ConfigError", second)
    assert list(tmp_path.iterdir()) == []


# inspect


def test_inspect_shows_a_journal(sparrowrl, published):
    outcome = sparrowrl("inspect", published.root)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "run run: 3 tensors, 1,206 weights, version 3"
    head = lines[2].split()
    assert head == [
        "version",
        "kind",
        "base",
        "changed",
        "density",
        "tensors",
        "segments",
        "size",
        "bits/change",
        "created",
    ]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["0", "origin"], ["1", "delta"], ["2", "delta"], ["2", "anchor"], ["3", "delta"],
    ]  # fmt: skip
    assert sparrowrl("inspect", published.root / "runs" / "run").out == outcome.out


def test_inspect_as_json_agrees_with_the_files(sparrowrl, published):
    (run,) = json.loads(sparrowrl("inspect", "--json", published.root).out)["runs"]
    assert (run["run"], run["newest"], run["tensors"], run["weights"], run["drafts"]) == ("run", 3, 3, 1206, [])
    for each in run["artifacts"]:
        folder = published.root / "runs/run/v" / str(each["version"]) / each["name"]
        assert each["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
        assert each["segments"] == len(list(folder.glob("*.seg")))
        if each["changed"]:
            assert each["bits_per_changed"] == 8 * each["bytes"] / each["changed"]
            assert each["density"] == each["changed"] / 1206
    assert run["artifacts"][-1]["state"] == run["state"]


def test_inspect_shows_an_artifact(sparrowrl, published):
    folder = published.root / "runs/run/v/1/0.fast"
    outcome = sparrowrl("inspect", folder)
    assert outcome.status == 0 and "a.weight" in outcome.out and "40x30" in outcome.out
    (segment,) = folder.glob("*.seg")
    assert segment.stem in outcome.out
    found = json.loads(sparrowrl("inspect", "--json", folder).out)
    assert found["tensor_list"][0]["name"] == "a.weight"
    assert found["tensor_list"][0]["changed"] == found["changed"]
    assert found["segment_list"] == [{"blake3": segment.stem, "bytes": segment.stat().st_size}]


def test_inspect_shows_drafts_and_empty_runs(sparrowrl, published):
    published.journal.draft(4, "3.fast").put(b"half")
    assert "draft 4/3.fast, not committed" in sparrowrl("inspect", published.root).out
    (published.root / "runs" / "new").mkdir()
    assert "run new: no version yet" in sparrowrl("inspect", published.root).out


def test_inspect_of_a_manifest_that_says_odd_things(sparrowrl, published):
    folder = published.root / "runs/run/v/1/0.fast"
    manifest = published.journal.manifest(1, "0.fast")

    def says(**changes):
        (folder / "manifest").write_bytes(replace(manifest, **changes).encode(None))
        return sparrowrl("inspect", folder)

    assert "created 9007199254740991 ms" in says(created_ms=(1 << 53) - 1).out
    one_line(says(tensors=(replace(manifest.tensors[0], number=9),)), 3, "CorruptData", "tensor number")


def test_inspect_of_something_else(sparrowrl, tmp_path, published):
    for path in (tmp_path, tmp_path / "not there", published.key):
        one_line(sparrowrl("inspect", path), 2, "ConfigError", "expected a journal")
    one_line(sparrowrl("inspect", published.root / "runs/run/v/9/8.fast"), 1, "VersionNotFound")
    (published.root / "runs/run/v/1/0.fast/manifest").write_bytes(b"damaged")
    one_line(sparrowrl("inspect", published.root), 3, "CorruptData", "v/1/0.fast/manifest")


# verify


def test_verify_passes_a_good_journal(sparrowrl, published):
    outcome = sparrowrl("verify", published.root, "--key", published.key)
    assert outcome.status == 0
    assert outcome.out.splitlines()[-1] == "5 artifacts are whole and signed with the run key"
    assert outcome.out.count("ok run ") == 5
    assert "signatures not checked" in sparrowrl("verify", published.root / "runs/run/v/2/anchor.dense").out


def test_verify_stops_at_the_first_damage(sparrowrl, published):
    (segment,) = (published.root / "runs/run/v/2/1.fast").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-3] ^= 1
    segment.write_bytes(data)
    outcome = sparrowrl("verify", published.root)
    one_line(outcome, 3, "CorruptData", segment.name)
    assert outcome.out.splitlines() == ["ok run 0/origin", "ok run 1/0.fast"]
    segment.unlink()
    one_line(sparrowrl("verify", published.root), 3, "CorruptData", segment.name)


def test_verify_finds_another_signer(sparrowrl, published, tmp_path):
    Credentials.new("run").save(tmp_path / "stranger.json")
    one_line(sparrowrl("verify", published.root, "--key", tmp_path / "stranger.json"), 3, "MAC")
    Credentials.new("other").save(tmp_path / "other.json")
    one_line(sparrowrl("verify", published.root, "--key", tmp_path / "other.json"), 2, "run other")


def test_verify_finds_a_version_that_was_cut_out(sparrowrl, published):
    published.journal.remove(next(a for a in published.journal.artifacts() if a.name == "anchor.dense"))
    published.journal.remove(next(a for a in published.journal.artifacts() if a.target == 1))
    outcome = sparrowrl("verify", published.root)
    assert outcome.out.count("states not checked") == 2
    one_line(outcome, 3, "CorruptData", "newest version")


def test_verify_compares_checkpoints(sparrowrl, published, tmp_path):
    for version, path in enumerate(published.checkpoints):
        done = sparrowrl("verify", published.root, "--checkpoint", path, "--version", version)
        assert done.status == 0 and "bit for bit" in done.out
    wrong = sparrowrl("verify", published.root, "--checkpoint", published.checkpoints[0], "--version", 1)
    one_line(wrong, 3, "FingerprintMismatch", "a.weight", "version 1")
    weights = load_file(published.checkpoints[3])
    weights["scalar"] = -weights["scalar"]
    save_file(weights, tmp_path / "bad.safetensors")
    one_line(sparrowrl("verify", published.root, "--checkpoint", tmp_path / "bad.safetensors"), 3, "scalar")
    del weights["scalar"]
    save_file(weights, tmp_path / "bad.safetensors")
    one_line(sparrowrl("verify", published.root, "--checkpoint", tmp_path / "bad.safetensors"), 3, "scalar")


def test_verify_compares_a_checkpoint_with_the_artifact_given(sparrowrl, published):
    folder = published.root / "runs/run/v/1/0.fast"
    assert "is version 1 " in sparrowrl("verify", folder, "--checkpoint", published.checkpoints[1]).out
    one_line(sparrowrl("verify", folder, "--checkpoint", published.checkpoints[3]), 3, "version 1")


def test_verify_finds_that_nothing_leads_to_the_newest(sparrowrl, published):
    published.journal.remove(next(a for a in published.journal.artifacts() if a.kind == "anchor"))
    assert sparrowrl("verify", published.root).status == 0
    (published.root / "runs/run/v/2/1.fast/manifest").unlink()
    outcome = sparrowrl("verify", published.root, "--key", published.key)
    one_line(outcome, 3, "CorruptData", "newest version")
    assert "3/2.fast" in outcome.out


def test_verify_finds_a_missing_layout(sparrowrl, published):
    next((published.root / "runs/run/layout").iterdir()).unlink()
    one_line(sparrowrl("verify", published.root), 3, "CorruptData", "layout")


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_an_artifact_that_is_deleted_meanwhile_is_left_out(sparrowrl, published, monkeypatch, command):
    read = Journal.manifest

    def late(journal, target, name):
        if target == 1:
            for artifact in journal.at(1)[0]:
                journal.remove(artifact)
        return read(journal, target, name)

    monkeypatch.setattr(Journal, "manifest", late)
    outcome = sparrowrl(command, published.root)
    assert outcome.status == 0 and "anchor" in outcome.out and not outcome.err
    assert not any(line.split()[:2] == ["1", "delta"] or "1/0.fast" in line for line in outcome.out.splitlines())


def test_verify_with_nothing_to_verify(sparrowrl, published, tmp_path):
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    one_line(sparrowrl("verify", tmp_path / "empty"), 2, "nothing to verify")
    one_line(sparrowrl("verify", published.root, "--version", 1), 2, "--checkpoint")
    one_line(sparrowrl("verify", published.root, "--checkpoint", published.key), 2, "not a safetensors file")
    one_line(sparrowrl("verify", published.root, "--checkpoint", tmp_path / "empty"), 2, "got none")


# materialize


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_materialize_writes_a_version(sparrowrl, published, tmp_path, version):
    out = tmp_path / "out.safetensors"
    base = published.checkpoints[0]
    done = sparrowrl(
        "materialize", "--journal", published.root, "--run", "run", "--version", version, "--base", base, "--out", out,
        "--key", published.key,
    )  # fmt: skip
    assert done.status == 0
    got, expected = load_file(out), load_file(published.checkpoints[version])
    assert got.keys() == expected.keys()
    for name in expected:
        assert_bits_equal(got[name], expected[name])
    assert published.journal.manifest_of(version).target_state.hex() in done.out
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_materialize_from_an_anchor_needs_no_base(sparrowrl, published, tmp_path):
    where = ["materialize", "--journal", published.root, "--run", "run", "--out", tmp_path / "out.safetensors"]
    assert sparrowrl(*where).status == 0
    assert_bits_equal(
        load_file(tmp_path / "out.safetensors")["a.weight"], load_file(published.checkpoints[3])["a.weight"]
    )
    one_line(sparrowrl(*where, "--version", 1), 2, "ConfigError", "anchor", "--base")
    one_line(sparrowrl(*where, "--version", 9), 1, "VersionNotFound")


@pytest.mark.parametrize("out", ["nowhere/out.safetensors", "folder", "key.json/out.safetensors", "device"])
def test_materialize_refuses_a_place_that_is_no_file(sparrowrl, published, tmp_path, out):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "device")
    where = ["materialize", "--journal", published.root, "--run", "run", "--out", tmp_path / out]
    one_line(sparrowrl(*where), 2, "ConfigError", out)
    assert (tmp_path / "device").is_fifo()


def test_materialize_reads_a_folder_of_files(sparrowrl, published, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, tensor in load_file(published.checkpoints[0]).items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    where = ["materialize", "--journal", published.root, "--run", "run", "--out", tmp_path / "out.safetensors"]
    assert sparrowrl(*where, "--version", 1, "--base", folder).status == 0
    save_file({"b": load_file(published.checkpoints[0])["b"]}, folder / "more.safetensors")
    one_line(sparrowrl(*where, "--version", 1, "--base", folder), 2, "tensor b")


def test_materialize_refuses_another_base(sparrowrl, published, tmp_path):
    out = tmp_path / "out.safetensors"
    where = ["materialize", "--journal", published.root, "--run", "run", "--version", 1, "--out", out]
    one_line(sparrowrl(*where, "--base", published.checkpoints[1]), 3, "WrongBase", "a.weight")
    one_line(sparrowrl(*where, "--base", tmp_path / "nothing"), 2, "nothing")
    where[4] = "nobody"
    one_line(sparrowrl(*where, "--base", published.checkpoints[0]), 1, "VersionNotFound")
    assert not out.exists()
