"""The optimisation of the GSM8K demo, against sums done by hand and against the plain way to compute them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparrowrl.examples.gsm8k_grpo.grpo import (
    Prompted,
    Sample,
    Stopped,
    Trainer,
    advantages,
    clipped_loss,
    completion_logprobs,
)

CPU = torch.device("cpu")
GROUP = Prompted(
    prompt=(5, 6, 7, 8, 9),
    samples=(
        Sample((20, 21, 22), (-5.0, -5.0, -5.0), 1.0),
        Sample((30,), (-5.0,), 0.0),
        Sample((40, 41, 1), (-5.0, -5.0, -5.0), 0.0),
    ),
)


def test_advantages_by_hand() -> None:
    # mean 0.5, deviation 0.5
    assert advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=3e-4)
    assert advantages([0.3, 0.3]) == [0.0, 0.0]


def test_the_clipped_loss_by_hand() -> None:
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5]
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    behaviour = torch.full((5,), -3.0)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    loss, clipped = clipped_loss(logprobs, behaviour, advantage, clip=0.2)
    # 1.0*2, min(1.5, 1.2)*2, 0.5*2, 1.5*-2, min(0.5*-2, 0.8*-2)
    assert loss.item() == pytest.approx(-(2.0 + 2.4 + 1.0 - 3.0 - 1.6))
    assert clipped.item() == 2
    loss.backward()
    # The derivative by a log-probability is -ratio * advantage, and zero where the clip holds it back.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, -1.0, 3.0, 0.0])


def test_a_packed_group_is_what_each_completion_is_alone(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        got = completion_logprobs(model, GROUP, torch.float32, temperature=0.7)
        alone = []
        for sample in GROUP.samples:
            ids = torch.tensor([[*GROUP.prompt, *sample.tokens]])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / 0.7, dim=-1)
            places = range(len(GROUP.prompt) - 1, ids.shape[1] - 1)
            alone += [logprobs[place, token].item() for place, token in zip(places, sample.tokens, strict=True)]
    assert got.tolist() == pytest.approx(alone, abs=1e-5)


def test_a_step_makes_the_better_completion_likelier(tiny: Path) -> None:
    trainer = Trainer(tiny, torch.float32, 1e-3, 1.0, CPU)
    with torch.no_grad():
        before = completion_logprobs(trainer.model, GROUP, torch.float32, 1.0)
    exact = [tuple(before[part].tolist()) for part in (slice(0, 3), slice(3, 4), slice(4, 7))]
    sampled = [Sample(s.tokens, logprobs, s.reward) for s, logprobs in zip(GROUP.samples, exact, strict=True)]
    stats = trainer.step([Prompted(GROUP.prompt, tuple(sampled))])
    with torch.no_grad():
        after = completion_logprobs(trainer.model, GROUP, torch.float32, 1.0)
    assert after[:3].sum() > before[:3].sum()
    assert after[3:].sum() < before[3:].sum()
    # On policy every ratio is 1: nothing is clipped, and the loss is minus the mean advantage over the tokens.
    high, low = advantages([1.0, 0.0, 0.0])[:2]
    assert stats.tokens == 7
    assert stats.clipped == 0
    assert stats.loss == pytest.approx(-(3 * high + 4 * low) / 7, abs=1e-5)
    assert stats.kl == pytest.approx(0, abs=1e-6)
    assert math.isfinite(stats.gradient_norm) and stats.gradient_norm > 0


def test_equal_rewards_change_nothing(tiny: Path) -> None:
    trainer = Trainer(tiny, torch.float32, 1e-3, 1.0, CPU)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    group = Prompted(GROUP.prompt, tuple(Sample(s.tokens, s.logprobs, 0.3) for s in GROUP.samples))
    assert trainer.step([group]).gradient_norm == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())


def test_weights_have_the_names_of_the_checkpoint(tiny: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        assert set(Trainer(tiny, torch.bfloat16, 1e-5, 1.0, CPU).weights()) == set(file.keys())


def test_a_step_can_be_given_up(tiny: Path) -> None:
    trainer = Trainer(tiny, torch.float32, 1e-3, 1.0, CPU)
    trainer.stop.set()
    with pytest.raises(Stopped):
        trainer.step([GROUP])
