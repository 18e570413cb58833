from __future__ import annotations

import pytest
import torch

from helpers import assert_bits_equal
from sparrowrl.delta.apply import apply_block, wire_bits
from sparrowrl.delta.materialize import first_mismatch, materialize
from sparrowrl.delta.segment import decode_segment
from sparrowrl.errors import CorruptData, FingerprintMismatch, LayoutError, VersionNotFound, WrongBase


def test_the_base_may_be_in_the_trainers_dtype_and_have_more_tensors(trainer):
    base = {name: t.clone() for name, t in trainer.weights.items()} | {"rotary": torch.zeros(3)}
    copies = {name: t.clone() for name, t in base.items()}
    trainer.run(2)
    got = materialize(trainer.journal, 2, base)
    for name, expected in trainer.history[2].items():
        assert_bits_equal(got[name], expected)
    for name, expected in copies.items():
        assert_bits_equal(base[name], expected)


def test_another_base_is_refused_by_name(trainer):
    trainer.run(1)
    base = trainer.history[0]
    wrong = {**base, "scale": base["scale"] + 1}
    with pytest.raises(WrongBase, match="scale"):
        materialize(trainer.journal, 1, wrong)
    with pytest.raises(WrongBase):
        materialize(trainer.journal, 1, trainer.history[1])
    with pytest.raises(LayoutError, match="scale"):
        materialize(trainer.journal, 1, {name: t for name, t in base.items() if name != "scale"})
    with pytest.raises(LayoutError, match="positions"):
        materialize(trainer.journal, 1, {**base, "positions": torch.arange(16)})


def test_without_base_and_anchor_there_is_no_way(trainer):
    trainer.run(1)
    with pytest.raises(VersionNotFound):
        materialize(trainer.journal, 1)
    with pytest.raises(VersionNotFound):
        materialize(trainer.journal, 5, trainer.history[0])


def test_merged_deltas_are_used(trainer):
    trainer.run(4)
    journal = trainer.journal
    journal.merged(0, 4)
    for artifact in journal.artifacts():
        if artifact.kind == "delta" and artifact.target < 4:
            journal.remove(artifact)
    got = materialize(journal, 4, trainer.history[0])
    for name, expected in trainer.history[4].items():
        assert_bits_equal(got[name], expected)


# Negative controls: what the fingerprints must catch


def live_weights(trainer):
    layout = trainer.journal.layout()
    return layout, [wire_bits(trainer.history[0][spec.name], spec.torch_dtype).clone() for spec in layout.tensors]


def blocks_of(journal, target, name):
    refs = journal.manifest(target, name).segments
    return [b for ref in refs for b in decode_segment(journal.segment(target, name, ref), journal.layout())]


def test_a_block_left_out_applied_twice_or_a_flipped_bit_is_found(trainer):
    trainer.run(1)
    journal = trainer.journal
    layout, good = live_weights(trainer)
    blocks = blocks_of(journal, 1, "0.fast")
    assert len(blocks) == 2
    for block in blocks:
        apply_block(good[block.tensor], block)
    assert first_mismatch(layout, good, journal.fingerprints(1)) is None
    for times in (0, 2):
        _, weights = live_weights(trainer)
        for block in (blocks[0], *[blocks[1]] * times):
            apply_block(weights[block.tensor], block)
        assert first_mismatch(layout, weights, journal.fingerprints(1)) == layout.tensors[blocks[1].tensor].name
    for number, spec in enumerate(layout.tensors):
        for place in (0, spec.numel - 1) if spec.numel else ():
            weights = [w.clone() for w in good]
            weights[number][place] ^= 1
            assert first_mismatch(layout, weights, journal.fingerprints(1)) == spec.name
    swapped = [w.clone() for w in good]
    swapped[blocks[0].tensor] = swapped[blocks[0].tensor].flip(0)
    assert first_mismatch(layout, swapped, journal.fingerprints(1)) is not None


def test_a_journal_whose_content_is_not_what_its_manifest_says_is_found(trainer, monkeypatch):
    """A forger who can sign puts another delta's segments under a manifest: only the fingerprints can tell."""
    trainer.run(2)
    journal = trainer.journal
    other = journal.manifest(2, "1.fast").segments
    segment, manifest = journal.segment, journal.manifest(1, "0.fast")
    assert len(other) == len(manifest.segments) == 1

    def forged(target, name, ref):
        return segment(2, "1.fast", other[0]) if target == 1 else segment(target, name, ref)

    monkeypatch.setattr(journal, "segment", forged)
    with pytest.raises(FingerprintMismatch, match="came out with other bits"):
        materialize(journal, 1, trainer.history[0])


def test_a_damaged_segment_is_found(trainer):
    trainer.run(1)
    journal = trainer.journal
    path = next(journal.folder(journal.artifacts()[1]).glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=path.name):
        materialize(journal, 1, trainer.history[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_base_of_no_floats_is_refused(trainer, dtype):
    trainer.run(1)
    base = {**trainer.history[0], "scale": torch.tensor(2).to(dtype)}
    with pytest.raises(LayoutError, match="expected scale of BF16"):
        materialize(trainer.journal, 1, base)
