"""Engines that follow a real hub by themselves, through a real agent, with weight-transfer backend "sparrow"."""

from __future__ import annotations

import os
import shutil
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, core_of, generate, save_checkpoint, worker_of
from followed import ENGINE_ID, Runner, Site
from safetensors.torch import load_file

from helpers import assert_bits_equal, wait_for
from sparrowrl.errors import DeadlineExceeded, EngineUnsupported, UnknownState
from sparrowrl.vllm_worker_ext.versions import facts
from sparrowrl.vllm_worker_ext.worker_extension import receiver_of

pytestmark = pytest.mark.vllm


def node_directories() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"sparrowrl-{ENGINE_ID}-{os.getpid()}")]


def told_version(llm: Any) -> str | None:
    """The version that vLLM's own clients are told; None where vLLM has no place for it."""
    return core_of(llm).get_weight_version() if facts().keeps_version else None


def test_follows_answers_and_leaves_nothing_behind(site: Callable[..., Site], tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    s = site(SPARROWRL_EXPORT_DIR=str(tmp_path / "exports"))
    llm = s.engine()
    status = s.follower.status
    assert (status.version, status.condition, status.audited, status.audit_ok) == (0, "exact", 0, True)
    before = generate(llm, PROMPTS)
    for version in (1, 2, 3):
        weights = s.trainer.step()
        s.reach(version)
    assert told_version(llm) in ("3", None)
    after = generate(llm, PROMPTS)
    assert after == generate(s.fresh(weights), PROMPTS) and after != before
    status = s.follower.status
    assert [(a.base, a.version, a.kind, a.fingerprint_ok, a.aborted) for a in status.activations] == [
        (v - 1, v, "delta", True, 0) for v in (1, 2, 3)
    ]
    assert all(a.changed > 0 and a.payload_bytes > 0 and a.stage_ms > 0 and a.pause_ms > 0 for a in status.activations)
    audit = s.ask("audit")
    assert audit.ok and s.follower.status.audited == 3 and s.follower.status.audit_ok
    assert s.ask("export").ok
    exported = load_file(tmp_path / "exports" / f"{ENGINE_ID}-v3.safetensors")
    assert sorted(exported) == sorted(weights)
    for name, tensor in weights.items():
        assert_bits_equal(exported[name], tensor)
    llm.llm_engine.engine_core.shutdown()
    assert not node_directories()


def test_a_late_engine_has_the_newest_version_before_it_serves(site: Callable[..., Site]) -> None:
    s = site("llama")
    for _ in range(5):
        weights = s.trainer.step()
    llm = s.engine()
    assert s.follower.status.version == 5 and told_version(llm) in ("5", None)
    assert [(a.base, a.version) for a in s.follower.status.activations] == [(0, 5)]
    assert generate(llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)


def test_an_engine_with_other_weights_starts_from_an_anchor(site: Callable[..., Site]) -> None:
    s = site("qwen3", anchor_every=2)
    start = {name: t.clone() for name, t in s.trainer.weights.items()}
    other = {name: t + 1 if name.endswith("norm.weight") else t for name, t in start.items()}
    for _ in range(3):
        weights = s.trainer.step()
    llm = s.engine(save_checkpoint(s.folder, s.root / "other", other))
    assert [(a.base, a.version, a.kind) for a in s.follower.status.activations] == [
        (None, 2, "anchor"),
        (2, 3, "delta"),
    ]
    assert generate(llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)


def test_other_weights_and_no_anchor_is_a_clear_error(site: Callable[..., Site]) -> None:
    s = site("qwen3", SPARROWRL_START_TIMEOUT="4")
    other = {name: t + 1 if name.endswith("norm.weight") else t for name, t in s.trainer.weights.items()}
    with pytest.raises(DeadlineExceeded, match=r"FingerprintMismatch: live weights of .*layernorm"):
        s.engine(save_checkpoint(s.folder, s.root / "other", other))
    assert not node_directories()


def test_no_hub_is_a_clear_error(site: Callable[..., Site]) -> None:
    s = site(SPARROWRL_HUB="http://127.0.0.1:9", SPARROWRL_START_TIMEOUT="4")
    with pytest.raises(DeadlineExceeded, match=r"SPARROWRL_START_TIMEOUT.*http://127\.0\.0\.1:9"):
        s.engine()
    assert not node_directories()


def spans(output: Any) -> list[tuple[str, int, int]]:
    """Which weight version made which of the request's output tokens."""
    return [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]


def in_queue(core: Any) -> list[str]:
    """The requests of batches that were computed but whose tokens were not taken yet, once for each batch."""
    return [name.split("-")[0] for _, scheduled, _ in core.batch_queue or () for name in scheduled.num_scheduled_tokens]


@pytest.mark.parametrize("queued", [False, True], ids=["step", "batch queue"])
def test_requests_in_flight_go_on_and_say_which_version_made_what(site: Callable[..., Site], queued: bool) -> None:
    s = site("qwen3")
    llm = s.engine()
    core = core_of(llm)
    if queued:  # as async scheduling or pipelining would have it: results are taken a step after they are computed
        core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
        core.step_fn = core.step_with_batch_queue
    run = Runner(llm)
    names = [run.add(prompt, 40) for prompt in PROMPTS]
    run.step(12)
    while queued and not in_queue(core):
        run.step()
    s.trainer.step(0.3)
    s.ready()
    # What is in the queue has been computed with the old weights, and its token is still to come.
    made = {name: len(run.outputs[name].outputs[0].token_ids) + in_queue(core).count(name) for name in names}
    run.step(1 + int(queued))
    assert s.follower.status.version == 1
    run.finish()
    (activation,) = s.follower.status.activations
    assert activation.requests_in_flight == 3 and activation.aborted == 0
    old = Runner(s.fresh(load_file(s.folder / "model.safetensors"), "old"))
    theirs = [old.add(prompt, 40) for prompt in PROMPTS]
    old.finish()
    for name, other in zip(names, theirs, strict=True):
        output = run.outputs[name]
        assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 40
        pairs = zip(run.result(name)[1], old.result(other)[1], strict=True)
        assert next(k for k, (mine, expected) in enumerate(pairs) if mine != expected) == made[name]
        if facts().stamps_requests:
            assert spans(output) == [("0", 0, made[name]), ("1", made[name], 40)]


def test_a_core_with_a_loop_takes_the_results_of_batches_in_flight_first(site: Callable[..., Site]) -> None:
    s = site("qwen3")
    core = core_of(s.engine())
    core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
    core.step_fn = core.step_with_batch_queue
    run = Runner(s.llm)
    run.add(PROMPTS[0], 20)
    while not in_queue(core):
        run.step()
    taken: list[Any] = []
    core._process_engine_step = lambda: taken.append(core.step_fn()[0])  # as EngineCoreProc, but for its output queue
    s.follower._finish_batches()
    assert not core.batch_queue and core.scheduler.pause_state.name == "UNPAUSED"
    outputs = [output for some in taken if some for output in some.values()]
    assert sum(len(one.new_token_ids) for output in outputs for one in output.outputs) == 1
    if facts().stamps_requests:
        assert [output.weight_version for output in outputs if output.outputs] == ["0"]


def test_drain_lets_running_requests_finish_first(site: Callable[..., Site]) -> None:
    s = site("qwen3", SPARROWRL_IN_FLIGHT="drain")
    llm = s.engine()
    run = Runner(llm)
    name = run.add(PROMPTS[0], 30)
    run.step(5)
    s.trainer.step()
    s.ready()
    waiting = run.add(PROMPTS[1], 10)
    run.step(3)
    assert s.follower.status.version == 0 and not run.outputs[name].finished
    run.finish()
    assert s.follower.status.version == 1 and s.follower.status.activations[0].requests_in_flight == 0
    assert run.outputs[waiting].finished
    if facts().stamps_requests:
        assert spans(run.outputs[name]) == [("0", 0, 30)] and spans(run.outputs[waiting]) == [("1", 0, 10)]


def test_an_unknown_engine_serves_nothing_until_an_anchor(site: Callable[..., Site]) -> None:
    s = site("qwen3", anchor_every=2, SPARROWRL_START_TIMEOUT="10")
    llm = s.engine()
    worker_of(llm).get_model().model.norm.weight.data.view(torch.int16)[3] ^= 4
    answer = s.ask("audit")
    assert not answer.ok and "model.norm.weight" in answer.detail
    assert s.follower.status.condition == "unknown" and s.follower.status.audit_ok is False
    run = Runner(llm)
    name = run.add(PROMPTS[0], 6)
    with pytest.raises(UnknownState, match="no anchor"):
        run.step()
    assert name not in run.outputs
    s.trainer.step()
    weights = s.trainer.step()
    run.finish()
    assert s.follower.status.condition == "exact" and s.follower.status.version == 2
    assert [a.kind for a in s.follower.status.activations] == ["anchor"]
    fresh = Runner(s.fresh(weights))
    other = fresh.add(PROMPTS[0], 6)
    fresh.finish()
    assert run.result(name) == fresh.result(other)


def test_a_bit_lost_where_a_delta_writes_leads_to_an_audit_and_an_anchor(site: Callable[..., Site]) -> None:
    s = site("qwen3", anchor_every=2)
    llm = s.engine()
    worker_of(llm).get_model().model.norm.weight.data.view(torch.int16)[:] ^= 4
    s.trainer.step(0.9)

    def noticed() -> bool:
        core_of(llm).step_fn()
        return s.follower.status.condition == "unknown"

    wait_for(noticed, 60, "the audit")
    status = s.follower.status
    assert status.audit_ok is False and status.error is not None and "model.norm.weight" in status.error.message
    assert not status.activations
    s.trainer.step()
    s.reach(2)
    assert s.follower.status.condition == "exact" and [a.kind for a in s.follower.status.activations] == ["anchor"]


def test_a_dead_agent_is_replaced(site: Callable[..., Site]) -> None:
    s = site()
    s.engine()
    agent = s.follower._agent._process
    os.kill(agent.pid, signal.SIGKILL)
    s.trainer.step()
    s.reach(1)
    assert s.follower._agent._process.pid != agent.pid


def test_what_was_damaged_in_the_node_directory_is_fetched_again(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sparrowrl.vllm_worker_ext.agent_process._GRACE_S", 3.0)
    s = site()
    receiver = receiver_of(worker_of(s.engine()))
    node = s.follower._node

    def fetched(version: int) -> bool:
        wanted = node.next.read()
        return wanted is not None and wanted.committed and wanted.target == version

    for version in (1, 2, 3):
        with receiver._lock:  # nothing is staged meanwhile
            s.trainer.step()
            wait_for(lambda version=version: fetched(version), 60, f"version {version} to be fetched")  # type: ignore[misc]
            folder = node.root / f"runs/test/v/{version}/{version - 1}.fast"
            segment = next(folder.glob("*.seg"))
            if version == 1:
                segment.write_bytes(bytes(segment.stat().st_size))
            elif version == 2:
                segment.unlink()
            else:
                (folder / "manifest").unlink()
        s.reach(version)
    caplog.clear()
    node.next.path.write_text("garbage")
    s.trainer.step()
    s.reach(4)
    assert sum("next.json" in record.message for record in caplog.records) <= 2  # the follower and the rank


def test_an_engine_whose_node_directory_was_removed_says_so_once(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    s = site()
    llm = s.engine()
    shutil.rmtree(s.follower._node.root)
    wait_for(lambda: not s.follower._watcher.is_alive(), 60, "the follower to give up")
    assert [record.message for record in caplog.records if "RemoveIPC" in record.message]
    assert generate(llm, PROMPTS)


def test_audits_come_every_n_versions(site: Callable[..., Site]) -> None:
    s = site(SPARROWRL_AUDIT_EVERY="2")
    s.engine()
    for version in (1, 2, 3):
        s.trainer.step()
        s.reach(version)
    assert s.follower.status.audited == 2 and s.follower.status.audit_ok


def test_vllms_own_updates_are_refused(site: Callable[..., Site]) -> None:
    s = site()
    llm = s.engine()
    with pytest.raises(EngineUnsupported, match="follows a SparrowRL hub"):
        worker_of(llm).start_weight_update()
    assert core_of(llm).sparrow.status.condition == "exact"


def test_an_engine_with_a_feature_that_was_not_tested_does_not_start(site: Callable[..., Site]) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    s = site()
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(EngineUnsupported, match="KV connector"):
        s.engine(kv_transfer_config=connector)
    ensure_kv_transfer_shutdown()  # vLLM 0.24 leaves the connector to the next engine of this process


def test_an_untested_vllm_is_refused_unless_insisted(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    s = site()
    monkeypatch.setattr(vllm, "__version__", "9.9.9+cpu")
    with pytest.raises(EngineUnsupported, match=r"vLLM 9\.9\.9.*SPARROWRL_UNTESTED_VLLM"):
        s.engine()
    monkeypatch.setenv("SPARROWRL_UNTESTED_VLLM", "1")
    assert facts().stamps_requests  # taken for the newest tested
