"""An activation that fails on the way is undone, bit for bit; what cannot be undone is unknown until an anchor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import Bench

from sparrowrl.kernels.scatter import scatter_add_
from sparrowrl.vllm_worker_ext import changes as changes_module

pytestmark = pytest.mark.vllm


# 2 % changed goes as steps, 90 % mostly as whole ranges of bits.
@pytest.mark.parametrize(("fraction", "fail_at"), [(0.02, 0), (0.02, 1), (0.02, 7), (0.9, 0)])
def test_a_failure_of_any_write_is_undone(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, fraction: float, fail_at: int
) -> None:
    b = bench("qwen3")
    b.attach()
    start = b.exported()
    weights = b.trainer.step(fraction)
    key = b.stage(1, "0.fast")
    calls = itertools.count()

    def scatter(*args: Any) -> None:
        if next(calls) == fail_at:
            raise RuntimeError("injected")
        scatter_add_(*args)

    with monkeypatch.context() as patch:
        patch.setattr(changes_module, "scatter_add_", scatter)
        reply = b.call("activate", key)
    assert not reply["ok"] and reply["error"] == {"error": "RuntimeError", "message": "injected"}
    assert reply["condition"] == "exact" and reply["version"] == 0
    b.assert_holds(start, 0)
    b.offer_again()
    assert b.call("activate", b.stage(1, "0.fast"))["ok"]
    b.assert_holds(weights, 1)


@pytest.mark.parametrize("fraction", [0.02, 0.9])
def test_a_write_that_does_not_stick_is_noticed_and_undone(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    b = bench("qwen3")
    b.attach()
    start = b.exported()
    b.trainer.step(fraction)
    key = b.stage(1, "0.fast")
    write = changes_module.Write.do

    def write_and_spoil(self: changes_module.Write, live: torch.Tensor) -> torch.Tensor | None:
        old = write(self, live)
        if 5 in self.tensors and fraction < 0.5:  # one step too many
            live[self.where[:1]] += 1  # type: ignore[index]
            spoiled.append((live, self.where[:1]))  # type: ignore[index]
        elif 5 in self.tensors:
            live[self.where] ^= 1
        return old

    spoiled: list[tuple[torch.Tensor, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(changes_module.Write, "do", write_and_spoil)
        reply = b.call("activate", key)
    assert not reply["ok"]
    if spoiled:  # negated steps cannot take back what somebody else wrote, and the rank says so
        assert reply["error"]["error"] == "UnknownState" and reply["condition"] == "unknown"
        return
    assert reply["error"]["error"] == "FingerprintMismatch" and reply["condition"] == "exact"
    b.assert_holds(start, 0)


def test_an_undo_that_fails_leaves_the_rank_unknown(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("qwen3", anchor_every=2)
    b.attach()
    b.trainer.step()
    key = b.stage(1, "0.fast")
    count = 0

    def scatter(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("injected")
        scatter_add_(*args)

    with monkeypatch.context() as patch:
        patch.setattr(changes_module, "scatter_add_", scatter)
        reply = b.call("activate", key)
    assert not reply["ok"] and reply["error"]["error"] == "UnknownState" and reply["condition"] == "unknown"
    assert b.call("audit")["error"]["error"] == "UnknownState"
    weights = b.trainer.step()
    assert b.call("activate", b.stage(2, "anchor.dense"))["condition"] == "exact"
    b.assert_holds(weights, 2)


def test_a_failed_restore_leaves_the_rank_unknown(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench("qwen3", anchor_every=1)
    b.attach()
    weights = b.trainer.step()
    key = b.stage(1, "anchor.dense")
    with monkeypatch.context() as patch:
        patch.setattr(changes_module.Write, "do", lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
        reply = b.call("activate", key)
    assert not reply["ok"] and reply["condition"] == "unknown"
    b.offer_again()
    assert b.call("activate", b.stage(1, "anchor.dense"))["ok"]
    b.assert_holds(weights, 1)
