"""The receiver on a real vLLM worker: what it activates is what a fresh engine would load, bit for bit, or nothing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driven import Bench
from engines import EXTENSION, MODELS, PROMPTS, Tensors, Trainer, generate, save_checkpoint, worker_of

from helpers import assert_bits_equal, skip_before, wait_for
from sparrowrl.delta.blocks import SparseBlock
from sparrowrl.delta.box import Box
from sparrowrl.delta.manifest import Manifest
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.transport.node import NextArtifact
from sparrowrl.vllm_worker_ext.receiver import Receiver

pytestmark = pytest.mark.vllm
Start = Callable[..., Any]


@pytest.mark.parametrize("kind", MODELS)
def test_activated_equals_freshly_loaded(kind: str, bench: Callable[..., Bench], engine: Start) -> None:
    b = bench(kind)
    reply = b.attach()
    assert reply["ok"] and reply["condition"] == "exact" and reply["version"] == 0, reply
    before = generate(b.llm, PROMPTS)
    weights = b.trainer.step()
    key = b.stage(1, "0.fast")
    assert generate(b.llm, PROMPTS, tokens=4) == [(t[:4], p[:4]) for t, p in before]  # staging has touched nothing
    reply = b.call("activate", key)
    assert reply["ok"] and reply["version"] == 1, reply
    b.assert_holds(weights, 1)
    after = generate(b.llm, PROMPTS)
    fresh = engine(save_checkpoint(b.folder, b.root / "fresh", weights))
    assert after == generate(fresh, PROMPTS) and after != before


def test_twenty_versions_then_a_merged_delta(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3")
    assert b.attach()["ok"]
    for version in range(1, 21):
        weights = b.trainer.step(0.01 if version % 5 else 0.9)  # every fifth is dense
        assert b.call("activate", b.stage(version, f"{version - 1}.fast"))["ok"]
        assert b.status().version == version
    b.assert_holds(weights, 20)
    for fraction in (0.02, 0.9, 0.02):  # of a tensor with dense blocks, a merged delta counts all that it carries
        weights = b.trainer.step(fraction)
    b.trainer.journal.merged(20, 23)
    assert b.call("activate", b.stage(23, "20.fast"))["ok"]
    b.assert_holds(weights, 23)


def test_activating_twice_does_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.attach()
    weights = b.trainer.step()
    key = b.stage(1, "0.fast")
    assert b.call("activate", key)["ok"]
    again = b.call("activate", key)
    assert again["ok"] and again["detail"] == "active already"
    b.assert_holds(weights, 1)


def test_a_tied_head_that_is_published_too_is_proved_not_written(
    engine: Start, checkpoint: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    folder, weights = checkpoint("qwen3-tied")
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    b = Bench(engine(folder, worker_extension_cls=EXTENSION), folder, both, tmp_path)
    assert b.attach()["condition"] == "exact"
    change = torch.zeros(500, 128, dtype=torch.bool)
    change[::7, ::11] = True
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        b.trainer.weights[name][change] += 1
    b.trainer.publisher.publish(b.trainer.weights.items())
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    b.assert_holds(b.trainer.weights, 1)
    b.trainer.weights["model.embed_tokens.weight"][0, 0] += 1  # the trainer's head is not tied: no such engine
    b.trainer.publisher.publish(b.trainer.weights.items())
    b.fetched.offer(2, "1.fast")
    reason = b.refused()
    assert reason.startswith("FingerprintMismatch: lm_head.weight") and "nothing was written" in reason
    assert b.call("audit")["ok"]
    b.receiver.close()
    b.fetched.node.remove()


def test_drafts_are_staged_while_they_grow_and_forgotten_when_dropped(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3")
    b.attach()
    weights = b.trainer.step(0.9)
    b.fetched.offer(1, "0.fast", segments=0)
    wait_for(lambda: b.receiver._staged is not None, 60, "the draft to be begun")
    b.fetched.offer(1, "0.fast", segments=1)
    wait_for(lambda: b.receiver._staged is not None and len(b.receiver._staged.taken) == 1, 60, "a segment to be taken")
    assert b.status().staged is None
    b.fetched.node.next.write(None)
    wait_for(lambda: b.receiver._staged is None, 60, "the draft to be forgotten")
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    b.assert_holds(weights, 1)


# Negative controls: each fault is noticed by name, and nothing of it is served.


def test_a_skipped_activation_is_noticed(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.attach()
    b.trainer.step()
    b.trainer.step()
    b.fetched.offer(2, "1.fast")
    assert b.refused().startswith("WrongBase")
    assert b.call("audit")["version"] == 0


def test_an_activation_of_what_is_not_staged_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.attach()
    reply = b.call("activate", "runs/test/v/1/0.fast")
    assert not reply["ok"] and reply["error"]["error"] == "StateError" and reply["condition"] == "exact"


def test_a_flipped_live_bit_fails_the_audit_and_only_an_anchor_helps(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3", anchor_every=2)
    b.attach()
    b.trainer.step()
    weights = b.trainer.step()
    worker_of(b.llm).get_model().model.layers[1].mlp.down_proj.weight.data.view(torch.int16)[5, 7] ^= 1
    reply = b.call("audit")
    assert not reply["ok"] and reply["condition"] == "unknown"
    assert reply["error"]["error"] == "FingerprintMismatch"
    assert "model.layers.1.mlp.down_proj.weight" in reply["error"]["message"]
    b.fetched.offer(1, "0.fast")
    assert b.refused().startswith(("UnknownState", "FingerprintMismatch"))
    wait_for(lambda: "UnknownState" in b.refused(), 60, "the delta to be refused")
    reply = b.call("activate", b.stage(2, "anchor.dense"))
    assert reply["ok"] and reply["condition"] == "exact", reply
    b.assert_holds(weights, 2)


def test_a_bit_that_flipped_where_a_delta_writes_is_noticed_before_anything_is_written(
    bench: Callable[..., Bench],
) -> None:
    b = bench("qwen3")
    b.attach()
    b.trainer.step()
    model = worker_of(b.llm).get_model()
    model.model.layers[0].mlp.down_proj.weight.data.view(torch.int16)[:] ^= 1
    before = [p.clone() for p in model.parameters()]
    b.fetched.offer(1, "0.fast")
    assert b.refused().startswith("FingerprintMismatch: model.layers.0.mlp.down_proj.weight")
    for p, old in zip(model.parameters(), before, strict=True):
        assert_bits_equal(p.data, old)


def test_a_delta_from_another_state_of_the_same_number_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3")
    b.attach()
    mine = b.trainer
    other = Trainer.begin(b.root / "other", mine.weights, credentials=mine.credentials)
    other.seed = 100
    weights = mine.step()
    other.step()
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    other.step()
    b.fetched.trainer = other
    b.fetched.offer(2, "1.fast")
    assert b.refused().startswith("WrongBase") and "base state" in b.refused()
    b.assert_holds(weights, 1)


def test_a_missing_segment_a_corrupt_one_and_a_forged_manifest(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3")
    b.attach()
    weights = b.trainer.step(0.9)
    folder = b.fetched.copy(1, "0.fast")
    manifest = b.trainer.journal.manifest(1, "0.fast")
    names = tuple(ref.digest.hex() for ref in manifest.segments)
    key = "runs/test/v/1/0.fast"

    def offer(some: tuple[str, ...]) -> None:
        b.fetched.node.next.write(NextArtifact(key, "delta", 0, 1, some, True))

    offer(names[:-1])
    assert b.refused().startswith("CorruptData") and "segments of its manifest" in b.refused()
    whole = (folder / f"{names[0]}.seg").read_bytes()
    (folder / f"{names[0]}.seg").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    b.offer_again()
    offer(names)
    wait_for(lambda: "hash that is its name" in b.refused(), 60, "the corrupt segment to be noticed")
    assert not (folder / f"{names[0]}.seg").exists()  # for an agent to fetch it again
    b.offer_again()
    offer(names)
    wait_for(lambda: "not there any more" in b.refused(), 60, "the missing segment to be noticed")
    (folder / f"{names[0]}.seg").write_bytes(whole)
    (folder / "manifest").write_bytes(manifest.encode(bytes(32)))
    b.offer_again()
    offer(names)
    wait_for(lambda: "MAC" in b.refused(), 60, "the forged manifest to be noticed")
    assert not (folder / "manifest").exists()
    (folder / "manifest").write_bytes(manifest.encode(b.trainer.credentials.run_key))
    assert b.call("audit")["version"] == 0
    b.offer_again()
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    b.assert_holds(weights, 1)


def test_a_status_that_was_lost_is_written_again(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench("qwen3")
    b.attach()
    path = b.fetched.node.rank(0).path
    path.unlink()
    wait_for(path.exists, 60, "the status that was deleted")
    path.write_text("[]")
    wait_for(lambda: path.read_text() != "[]", 60, "the status that was overwritten")
    b.trainer.step()

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    key = b.stage(1, "0.fast")
    with monkeypatch.context() as patched:
        patched.setattr("sparrowrl.transport.node.write_atomically", full)
        assert b.call("activate", key)["ok"]
        assert b.status().version == 0
    wait_for(lambda: b.status().version == 1, 60, "the status, once there is room again")


def test_blocks_that_overlap_or_do_not_add_up_are_refused(bench: Callable[..., Bench]) -> None:
    b = bench("qwen3")
    b.attach()
    b.trainer.step()
    true = b.trainer.journal.manifest(1, "0.fast")
    layout = b.trainer.journal.layout()
    block = SparseBlock(3, Box.whole(layout.tensors[3].numel), torch.tensor([4]), torch.tensor([1], dtype=torch.int16))
    packer = SegmentPacker(layout)
    data = [*packer.add(block), *packer.flush()]
    folder = b.fetched.node.root / "runs/test/v/1/0.fast"
    folder.mkdir(parents=True)
    from blake3 import blake3

    from sparrowrl.delta.manifest import SegmentRef, TensorChange

    def commit(changed: int, fingerprint: int) -> None:
        refs = tuple(SegmentRef(blake3(d).digest(), len(d)) for d in data)
        change = TensorChange(3, changed, fingerprint)
        fake = Manifest(
            true.run,
            "delta",
            "fast",
            0,
            1,
            true.base_state,
            true.target_state,
            true.layout,
            0,
            changed,
            (change,),
            refs,
        )
        (folder / "manifest").write_bytes(fake.encode(b.trainer.credentials.run_key))
        for ref, d in zip(refs, data, strict=True):
            (folder / f"{ref.digest.hex()}.seg").write_bytes(d)
        names = tuple(ref.digest.hex() for ref in refs)
        b.offer_again()
        b.fetched.node.next.write(NextArtifact("runs/test/v/1/0.fast", "delta", 0, 1, names, True))

    commit(2, 0)
    wait_for(lambda: "expected 2 changes" in b.refused(), 60, "the count to be noticed")
    commit(1, 0)
    wait_for(lambda: "FingerprintMismatch" in b.refused(), 60, "the fingerprint to be noticed")
    again = SparseBlock(3, block.box, torch.tensor([5]), torch.tensor([1], dtype=torch.int16))
    data += [*packer.add(again), *packer.flush()]
    commit(2, 0)
    wait_for(lambda: "overlap" in b.refused(), 60, "the overlap to be noticed")
    assert b.call("audit")["version"] == 0


def test_an_engine_with_other_weights_is_unknown_until_an_anchor(
    engine: Start, checkpoint: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    folder, weights = checkpoint("llama")
    other = {name: t + 1 if name.endswith("norm.weight") else t for name, t in weights.items()}
    llm = engine(save_checkpoint(folder, tmp_path / "other", other), worker_extension_cls=EXTENSION)
    b = Bench(llm, folder, weights, tmp_path, anchor_every=1)
    reply = b.attach()
    assert reply["ok"] and reply["condition"] == "unknown" and "layernorm.weight" in reply["detail"]
    new = b.trainer.step()
    assert b.call("activate", b.stage(1, "anchor.dense"))["ok"]
    b.assert_holds(new, 1)
    new = b.trainer.step()
    assert b.call("activate", b.stage(2, "1.fast"))["ok"]
    b.assert_holds(new, 2)
    b.receiver.close()
    b.fetched.node.remove()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "gpt-oss"])
def test_an_engine_without_weights_is_unknown_until_an_anchor(
    kind: str, engine: Start, checkpoint: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    """Its padding is random, so even where no weight is opaque to others, its embedding is reloaded."""
    folder, weights = checkpoint(kind)
    llm = engine(folder, load_format="dummy", worker_extension_cls=EXTENSION)
    b = Bench(llm, folder, weights, tmp_path, anchor_every=1)
    reply = b.attach()
    assert reply["ok"] and reply["condition"] == "unknown"
    b.trainer.step()
    assert b.call("activate", b.stage(1, "anchor.dense"))["ok"]
    new = b.trainer.step()
    assert b.call("activate", b.stage(2, "1.fast"))["ok"]
    b.assert_holds(new, 2)
    fresh = engine(save_checkpoint(folder, tmp_path / "fresh", new))
    assert generate(llm, PROMPTS) == generate(fresh, PROMPTS)
    b.receiver.close()
    b.fetched.node.remove()


def test_experts_that_are_packed_unseen_are_caught_by_the_first_proof(
    engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build packs experts in the same shape: nothing but the sums of the live bits can tell."""
    skip_before("0.29", "leaves packed experts their loaders")
    from zoo import make_model

    folder = tmp_path / "model"
    weights = make_model(folder, "qwen3-moe")
    monkeypatch.setattr("sparrowrl.vllm_worker_ext.attachment.processed", lambda model: ())
    b = Bench(engine(folder, worker_extension_cls="fresh.FreshExtension"), folder, weights, tmp_path)
    reply = b.attach()
    assert reply["ok"] and reply["condition"] == "exact", reply
    layout, opaque = b.trainer.journal.layout(), b.receiver._attachment.placement.opaque  # type: ignore[union-attr]
    assert {layout.tensors[n].name for n in opaque} == {name for name in weights if ".experts." in name}
    new = b.trainer.step()
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    b.assert_holds(new, 1)
    checkpoint = save_checkpoint(folder, tmp_path / "new", new)
    assert b.llm.collective_rpc("fresh_differences", args=(str(checkpoint),)) == [{}]
    b.receiver.close()
    b.fetched.node.remove()


def test_attaching_without_a_directory_answers_and_does_not_raise(bench: Callable[..., Bench], tmp_path: Path) -> None:
    b = bench()
    reply = b.call("attach", str(tmp_path / "nowhere"), str(b.trainer.root / "token.json"))
    assert not reply["ok"] and reply["error"]["error"] == "ConfigError" and reply["condition"] == "unknown"


def test_an_engine_that_is_not_ours_still_packs_its_weights(
    engine: Start, checkpoint: Callable[[str], tuple[Path, Tensors]]
) -> None:
    llm = engine(checkpoint("qwen3")[0], packs=True)
    assert worker_of(llm).get_model().model.layers[0].mlp.down_proj.weight.numel() == 0


def test_an_attach_waits_for_a_stager_that_is_about_to_take_the_lock(tmp_path: Path) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=1))
    receiver = Receiver(torch.nn.Linear(1, 1), config)  # type: ignore[arg-type]

    def stager() -> None:
        receiver._stop.wait(60)
        with receiver._lock:
            pass

    receiver._thread = thread = threading.Thread(target=stager)
    thread.start()
    reply = receiver.attach(1, str(tmp_path / "nowhere"), str(tmp_path / "token.json"))
    assert not reply["ok"] and not thread.is_alive()
