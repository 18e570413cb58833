from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta import publisher, segment
from sparrowrl.delta.apply import apply_block
from sparrowrl.delta.blocks import Block, DenseBlock, SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.layout import Layout, TensorSpec
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.merge import merge
from sparrowrl.delta.segment import SegmentPacker, decode_segment
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import CorruptData, VersionNotFound
from sparrowrl.kernels.bits import INT_OF_WIDTH

LAYOUT = Layout(
    [
        TensorSpec("a", "BF16", (7, 12)),
        TensorSpec("b", "I8", (5,)),
        TensorSpec("c", "I64", (3, 2)),
        TensorSpec("d", "F32", (0,)),
    ]
)
# Ways to cut tensor a (7 x 12): whole, two halves of rows, columns.
CUTS = {
    0: [[Box.whole(84)], [Box(0, 30, 30, 1), Box(30, 54, 54, 1)], [Box(0, 5, 12, 7), Box(5, 7, 12, 7)]],
    1: [[Box.whole(5)]],
    2: [[Box.whole(6)], [Box(0, 1, 2, 3), Box(1, 1, 2, 3)]],
}


@st.composite
def deltas(draw: st.DrawFn) -> list[Block]:
    """The blocks of one delta: each tensor cut somehow, each part left out, sparse or dense."""
    blocks: list[Block] = []
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    for number, cuts in CUTS.items():
        dtype = INT_OF_WIDTH[LAYOUT.tensors[number].width]
        info = torch.iinfo(dtype)
        for box in draw(st.sampled_from(cuts)):
            kind = draw(st.sampled_from(["none", "ones", "sparse", "dense"]))
            if kind == "dense":
                blocks.append(DenseBlock(number, box, torch.randint(-3, 4, (box.elements,), generator=rng).to(dtype)))
            elif kind != "none":
                positions = (torch.rand(box.elements, generator=rng) < 0.4).nonzero().reshape(-1)
                choices = torch.tensor([1, -1] if kind == "ones" else [1, -1, info.min, info.max], dtype=dtype)
                steps = choices[torch.randint(0, len(choices), (len(positions),), generator=rng)]
                blocks.append(SparseBlock(number, box, positions, steps))
    return [block for block in blocks if block.count]


class FakeJournal:
    """Deltas k -> k + 1 held in memory, with made-up states: what `merge` reads of a journal."""

    def __init__(self, chain: list[list[Block]]) -> None:
        self.segments: dict[bytes, bytes] = {}
        self.manifests = [self._write(base, blocks) for base, blocks in enumerate(chain)]

    def _write(self, base: int, blocks: list[Block]) -> Manifest:
        packer = SegmentPacker(LAYOUT, 64)
        data = [part for block in blocks for part in packer.add(block)] + packer.flush()
        self.segments |= {SegmentRef.of(part).digest: part for part in data}
        numbers = sorted({block.tensor for block in blocks})
        counts = {number: sum(b.count for b in blocks if b.tensor == number) for number in numbers}
        return Manifest(
            run="run", kind="delta", codec="fast", base=base, target=base + 1,
            base_state=bytes([base]) * 32, target_state=bytes([base + 1]) * 32, layout=LAYOUT.id, created_ms=base,
            changed=sum(counts.values()),
            tensors=tuple(TensorChange(number, counts[number], 100 * base + number) for number in numbers),
            segments=tuple(dict.fromkeys(SegmentRef.of(part) for part in data)),
        )  # fmt: skip

    def route(self, target: int, starts: set[int]) -> tuple[int, list]:
        base = min(starts)
        journal = Journal("/nowhere", "run")
        return base, [journal.draft(k + 1, f"{k}.fast").artifact for k in range(base, target)]

    def manifest(self, target: int, name: str) -> Manifest:
        return self.manifests[target - 1]

    def layout(self, layout_id: bytes) -> Layout:
        return LAYOUT

    def segment(self, target: int, name: str, ref: SegmentRef) -> bytes:
        return self.segments[ref.digest]


def start_weights() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    return [
        torch.randint(-100, 100, (spec.numel,), generator=rng).to(INT_OF_WIDTH[spec.width]) for spec in LAYOUT.tensors
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(deltas(), min_size=1, max_size=5))
def test_merged_does_what_the_chain_does(chain):
    journal = FakeJournal(chain)
    expected = start_weights()
    for blocks in chain:
        for block in blocks:
            apply_block(expected[block.tensor], block)
    manifest, segments = merge(journal, 0, len(chain))
    assert [SegmentRef.of(data) for data in segments] == list(manifest.segments)
    merged = [block for data in segments for block in decode_segment(data, LAYOUT)]
    got = start_weights()
    for block in merged:
        apply_block(got[block.tensor], block)
    for one, other in zip(got, expected, strict=True):
        assert_bits_equal(one, other)
    counts = {t.number: t.changed for t in manifest.tensors}
    assert counts == {n: sum(b.count for b in merged if b.tensor == n) for n in {b.tensor for b in merged}}
    for tensor in manifest.tensors:
        latest = max(base for base, blocks in enumerate(chain) if any(b.tensor == tensor.number for b in blocks))
        assert tensor.fingerprint == 100 * latest + tensor.number
    assert (manifest.base, manifest.target) == (0, len(chain))
    assert (manifest.base_state, manifest.target_state) == (bytes(32), bytes([len(chain)]) * 32)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(deltas(), min_size=3, max_size=4))
def test_merging_twice_gives_the_bytes_of_merging_once(chain):
    journal = FakeJournal(chain)
    once = merge(journal, 0, len(chain))
    front = FakeJournal(chain)
    manifest, segments = merge(front, 0, 2)
    front.segments |= {SegmentRef.of(data).digest: data for data in segments}
    front.manifests[1] = manifest
    first, *rest = front.route(len(chain), {1})[1]
    front.route = lambda target, starts: (0, [first, *rest])
    assert merge(front, 0, len(chain)) == once


def test_steps_that_cancel_drop_out(trainer):
    trainer.run(1)
    trainer.weights = {name: t.clone() for name, t in trainer.history[0].items()}
    trainer.weights["embed.weight"] = trainer.weights["embed.weight"].float()
    trainer.weights["layers.0.norm.weight"] = trainer.weights["layers.0.norm.weight"].float()
    trainer.weights["scale"] = trainer.weights["scale"].float()
    trainer.publish()
    manifest, segments = merge(trainer.journal, 0, 2)
    assert (manifest.changed, manifest.tensors, segments) == (0, (), [])
    assert manifest.base_state == manifest.target_state


def test_changed_is_the_count_of_weights_that_differ(trainer):
    trainer.run(3)
    manifest, _ = merge(trainer.journal, 0, 3)
    differ = sum(
        int((trainer.history[3][n].view(torch.int16) != trainer.history[0][n].view(torch.int16)).sum())
        for n in ("embed.weight", "layers.0.up.weight")
    )
    assert manifest.changed == differ


def test_an_anchor_cannot_be_merged_across(make_trainer):
    first = make_trainer()
    first.run(2)
    first.sink.close()
    second = make_trainer()  # other weights than version 2's: version 3 is an anchor
    second.run(1)
    for base, target in ((0, 4), (2, 3), (2, 4), (4, 4), (4, 2), (0, 9)):
        with pytest.raises(VersionNotFound):
            second.journal.merged(base, target)
    assert second.journal.merged(0, 2).target == 2


def test_merged_artifacts_are_of_the_same_bytes_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "SegmentPacker", lambda layout: segment.SegmentPacker(layout, 100))
    sink = JournalSink(tmp_path, Credentials.new("run"))
    weights = {"w": torch.zeros(40, 50)}
    trainer = publisher.Publisher(sink, weights.items())
    for k in range(4):
        weights["w"][torch.rand(40, 50, generator=torch.Generator().manual_seed(k)) < 0.1] += 1
        trainer.publish(weights.items())
    journal = sink.journal
    straight = merge(journal, 0, 4)
    for base, target in ((0, 2), (2, 4)):
        journal.merged(base, target)
    made = journal.merged(0, 4)
    assert journal.manifest(4, made.name) == straight[0]
    assert [journal.segment(4, made.name, ref) for ref in straight[0].segments] == straight[1]
    states = [journal.manifest_of(version).target_state for version in journal.versions()]
    assert all(a != b for a, b in pairwise(states))


def test_a_segment_of_a_tensor_that_is_not_there_is_found(trainer, monkeypatch):
    trainer.run(2)
    journal = trainer.journal
    other = Layout([TensorSpec(f"t{number}", "BF16", (4,)) for number in range(99)])
    packer = SegmentPacker(other)
    packer.add(SparseBlock(98, Box.whole(4), torch.tensor([1]), torch.tensor([1], dtype=torch.int16)))
    (segment,) = packer.flush()
    monkeypatch.setattr(journal, "segment", lambda *_: segment)
    with pytest.raises(CorruptData, match="block tensor"):
        merge(journal, 0, 2)
