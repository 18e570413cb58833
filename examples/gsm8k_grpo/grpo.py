"""Group-relative policy optimisation (Shao et al. 2024) with float32 masters and AdamW."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2
GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion: its token ids, the engine's log-probability of each, and its reward."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class Prompted:
    """The completions of one prompt."""

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One update: `kl` is the k3 estimate of KL(engine's policy || trainer's) in nats per token, before the update."""

    loss: float
    gradient_norm: float
    clipped: float
    kl: float
    tokens: int


class Stopped(Exception):
    """The step was given up because the run is ending."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, less their mean, over their standard deviation; all zero if they are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def clipped_loss(logprobs: Tensor, behaviour: Tensor, advantage: Tensor, clip: float = CLIP) -> tuple[Tensor, Tensor]:
    """Sum over tokens of the clipped surrogate loss, and how many tokens the clip holds back.

    Takes float32 [tokens] each: log-probabilities under the policy in training and under the one that sampled, and the
    advantage of each token's completion.
    """
    ratio = torch.exp(logprobs - behaviour)
    free, bounded = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    return -torch.minimum(free, bounded).sum(), (bounded < free).sum()


def packed(group: Prompted, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A prompt and all its completions as one sequence, so that the prompt is computed once.

    Returns ids [1, L], position ids [1, L], an attention mask bool [1, 1, L, L] by which a completion sees the prompt
    and itself, the places [n] of the L whose output predicts a completion token, and those n tokens.
    """
    ids, positions, owner = list(group.prompt), list(range(len(group.prompt))), [0] * len(group.prompt)
    places: list[int] = []
    for number, sample in enumerate(group.samples, start=1):
        places += [len(group.prompt) - 1, *range(len(ids), len(ids) + len(sample.tokens) - 1)]
        ids += sample.tokens
        positions += range(len(group.prompt), len(group.prompt) + len(sample.tokens))
        owner += [number] * len(sample.tokens)
    owners = torch.tensor(owner, device=device)
    mask = ((owners[None, :] == 0) | (owners[None, :] == owners[:, None])).tril()
    targets = torch.tensor(ids[len(group.prompt) :], device=device)
    rows = [torch.tensor([row], device=device) for row in (ids, positions)]
    return rows[0], rows[1], mask[None, None], torch.tensor(places, device=device), targets


def completion_logprobs(model: Any, group: Prompted, dtype: torch.dtype, temperature: float) -> Tensor:
    """Log-probabilities at this temperature, float32 [tokens of all completions], computed in `dtype`.

    Only the logits of these places are computed.
    """
    device = model.device
    ids, positions, mask, places, targets = packed(group, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        hidden = model.base_model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]
        logits = model.get_output_embeddings()(hidden[0, places]).float() / temperature
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


class Trainer:
    """The policy in training: float32 masters, computed in `dtype`; completions are sampled at `temperature`."""

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, lr: float, temperature: float, device: torch.device
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._dtype = dtype
        self._temperature = temperature
        self.stop = threading.Event()
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def weights(self) -> dict[str, Tensor]:
        """The float32 masters under their checkpoint names; a tied tensor is there once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self, groups: Sequence[Prompted]) -> StepStats:
        """One update from a batch, one group at a time through the model. Raises Stopped if `stop` was set."""
        tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        totals = torch.zeros(3, dtype=torch.float64)
        for group in groups:
            if self.stop.is_set():
                raise Stopped
            totals += self._accumulate(group, tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss, clipped, kl = (totals / tokens).tolist()
        return StepStats(loss, float(norm), clipped, kl, tokens)

    def _accumulate(self, group: Prompted, tokens: int) -> Tensor:
        """Add the gradients of one group; returns its sums of loss, clipped tokens and k3."""
        logprobs = completion_logprobs(self.model, group, self._dtype, self._temperature)
        behaviour = logprobs.new_tensor([value for sample in group.samples for value in sample.logprobs])
        shares = zip(group.samples, advantages([sample.reward for sample in group.samples]), strict=True)
        advantage = logprobs.new_tensor([value for sample, value in shares for _ in sample.tokens])
        loss, clipped = clipped_loss(logprobs, behaviour, advantage)
        torch.autograd.backward(loss / tokens)
        difference = (logprobs - behaviour).detach()
        k3 = (difference.exp() - 1 - difference).sum()
        return torch.stack([loss.detach(), clipped, k3]).double().cpu()
