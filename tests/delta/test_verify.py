from __future__ import annotations

from dataclasses import replace

import pytest

from sparrowrl.delta.journal import Journal
from sparrowrl.delta.manifest import TensorChange
from sparrowrl.delta.segment import SegmentPacker, decode_segment
from sparrowrl.delta.verify import verify_artifact, verify_checkpoint
from sparrowrl.errors import CorruptData, FingerprintMismatch, FormatError, VersionNotFound


@pytest.fixture
def journal(make_trainer):
    """Four versions, an anchor, and a merged delta; read anew, so that nothing is remembered."""
    trainer = make_trainer(anchor_every=2)
    trainer.run(3)
    trainer.weights["embed.weight"].normal_()
    trainer.publish()
    trainer.journal.merged(1, 4)
    return Journal(trainer.journal.root, "run", trainer.journal._run_key)


def rewrite(journal: Journal, target: int, name: str, **changes: object) -> None:
    """Replace a manifest by a signed one that says something else."""
    manifest = replace(journal.manifest(target, name), **changes)
    journal.file(f"runs/run/v/{target}/{name}/manifest").write_bytes(manifest.encode(journal._run_key))


def artifact(journal: Journal, target: int, name: str):
    return next(a for a in journal.artifacts() if (a.target, a.name) == (target, name))


def replace_segments(journal: Journal, target: int, name: str, edit) -> None:
    """Write the artifact's blocks anew after `edit` and sign a manifest that names the new segments."""
    manifest, layout = journal.manifest(target, name), journal.layout()
    blocks = [b for ref in manifest.segments for b in decode_segment(journal.segment(target, name, ref), layout)]
    packer = SegmentPacker(layout)
    data = [part for block in edit(blocks) for part in packer.add(block)] + packer.flush()
    refs = []
    for part in data:
        ref = type(manifest.segments[0]).of(part)
        (journal.folder(artifact(journal, target, name)) / f"{ref.digest.hex()}.seg").write_bytes(part)
        refs.append(ref)
    rewrite(journal, target, name, segments=tuple(refs))


def test_a_good_journal_passes(journal):
    kinds = [(a.kind, verify_artifact(journal, a)) for a in journal.artifacts()]
    assert kinds.count(("delta", True)) == 5 and kinds.count(("anchor", True)) == 2 and len(kinds) == 8


def test_states_that_cannot_be_checked_are_told(journal):
    for old in journal.artifacts():
        if old.target < 2:
            journal.remove(old)
    assert [verify_artifact(journal, a) for a in journal.artifacts() if a.name == "1.fast"] == [False, False]


def test_every_flipped_byte_is_found(journal):
    """In each file of each artifact, at a few places."""
    for each in journal.artifacts():
        for path in journal.folder(each).iterdir():
            good = path.read_bytes()
            for place in {0, 5, len(good) // 2, len(good) - 1}:
                bad = bytearray(good)
                bad[place] ^= 0x10
                path.write_bytes(bad)
                with pytest.raises(FormatError):
                    verify_artifact(Journal(journal.root, "run", journal._run_key), each)
            path.write_bytes(good)


def test_a_missing_segment_is_found(journal):
    next(journal.folder(artifact(journal, 1, "0.fast")).glob("*.seg")).unlink()
    with pytest.raises(CorruptData, match="1/0"):
        verify_artifact(journal, artifact(journal, 1, "0.fast"))


def test_an_element_covered_twice_is_found(journal):
    manifest, layout = journal.manifest(1, "0.fast"), journal.layout()
    (ref,) = manifest.segments
    sparse = decode_segment(journal.segment(1, "0.fast", ref), layout)[0]
    packer = SegmentPacker(layout)
    one = replace(sparse, positions=sparse.positions[:1], steps=sparse.steps[:1])
    packer.add(one)
    (extra,) = packer.flush()
    again = type(ref).of(extra)
    (journal.folder(artifact(journal, 1, "0.fast")) / f"{again.digest.hex()}.seg").write_bytes(extra)
    rewrite(journal, 1, "0.fast", segments=(ref, again))
    with pytest.raises(CorruptData, match="covered twice"):
        verify_artifact(journal, artifact(journal, 1, "0.fast"))


def without_a_tensor(blocks):
    return blocks[:1]


def without_a_change(blocks):
    return [blocks[0], replace(blocks[1], positions=blocks[1].positions[1:], steps=blocks[1].steps[1:])]


@pytest.mark.parametrize(
    ("edit", "words"), [(without_a_tensor, "not in both"), (without_a_change, "the segments have")]
)
def test_segments_that_hold_something_else_are_found(journal, edit, words):
    replace_segments(journal, 1, "0.fast", edit)
    with pytest.raises(CorruptData, match=words):
        verify_artifact(journal, artifact(journal, 1, "0.fast"))


def test_an_anchor_with_another_bit_is_found(journal):
    def flip(blocks):
        blocks[3].bits[0] ^= 1
        return blocks

    replace_segments(journal, 2, "anchor.dense", flip)
    with pytest.raises(CorruptData, match="do not have the fingerprint"):
        verify_artifact(journal, artifact(journal, 2, "anchor.dense"))


def test_wrong_states_are_found(journal):
    manifest = journal.manifest(3, "2.fast")
    first, *rest = manifest.tensors
    for changes, words in (
        ({"base_state": bytes(32)}, "base state"),
        ({"target_state": bytes(32)}, "target state"),
        ({"tensors": (TensorChange(first.number, first.changed, first.fingerprint ^ 1), *rest)}, "target state"),
    ):
        rewrite(journal, 3, "2.fast", **changes)
        with pytest.raises(CorruptData, match=words):
            verify_artifact(Journal(journal.root, "run", journal._run_key), artifact(journal, 3, "2.fast"))
        rewrite(journal, 3, "2.fast", **{name: getattr(manifest, name) for name in changes})
    assert verify_artifact(journal, artifact(journal, 3, "2.fast"))


def test_artifacts_of_a_version_that_disagree_are_found(journal):
    rewrite(journal, 4, "1.fast", target_state=bytes(32))
    with pytest.raises(CorruptData, match="state"):
        verify_artifact(journal, artifact(journal, 4, "1.fast"))


def test_checkpoints(trainer):
    trainer.run(2)
    verify_checkpoint(trainer.journal, 2, trainer.history[2])
    with pytest.raises(FingerprintMismatch, match="embed"):
        verify_checkpoint(trainer.journal, 1, trainer.history[2])
    with pytest.raises(FingerprintMismatch, match="scale"):
        verify_checkpoint(trainer.journal, 2, {n: t for n, t in trainer.history[2].items() if n != "scale"})
    with pytest.raises(VersionNotFound):
        verify_checkpoint(trainer.journal, 3, trainer.history[2])
