"""Whole training jobs: verl's own trainers, two FSDP2 ranks, vLLM engines, six synced steps each."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_runs import LONG_COMPLETIONS, run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def test_one_step_off_trains_as_with_verls_own_full_tensors(tmp_path: Path) -> None:
    """From the same seeds, each request with one of its own: the same weights at every sync, bit for bit."""
    ours = run(tmp_path / "ours", "one_step_off")
    ours.assert_exact()
    stock = run(tmp_path / "stock", "one_step_off", backend="full_tensors")
    assert len(ours.states) == 7
    for at, (our_state, stock_state) in enumerate(zip(ours.states, stock.states, strict=True)):
        assert our_state == stock_state, f"sync {at}"
    assert ours.samples == stock.samples
    assert ours.states[-1]["tensors"] != ours.states[0]["tensors"]
    logged = ours.metrics[6]
    assert logged["sparrow/version"] == 6
    assert 0 < logged["sparrow/density"] < 1
    assert logged["sparrow/payload_bytes"] > 0


def test_fully_async_syncs_with_requests_in_flight(tmp_path: Path) -> None:
    ahead = "async_training.staleness_threshold=3"  # else the engine idles until the next sync
    done = run(tmp_path, "fully_async", *LONG_COMPLETIONS, ahead, steps=8)
    done.assert_exact()
    assert any(each["requests_in_flight"] > 0 for each in done.activations(0))
    assert all(sample["stop"] == "completed" for sample in done.samples)
    assert any("sparrow/pause_ms" in logged for logged in done.metrics.values())


def test_separate_async_syncs_with_requests_in_flight(tmp_path: Path) -> None:
    done = run(tmp_path, "separate_async", *LONG_COMPLETIONS)
    done.assert_exact()
    assert any(each["requests_in_flight"] > 0 for each in done.activations(0))
    assert all(sample["stop"] == "completed" for sample in done.samples)


def test_an_engine_of_two_ranks(tmp_path: Path) -> None:
    run(tmp_path, "one_step_off", tensor_parallel_size=2).assert_exact()


def test_two_replicas(tmp_path: Path) -> None:
    run(tmp_path, "one_step_off", replicas=2).assert_exact(replicas=2)
