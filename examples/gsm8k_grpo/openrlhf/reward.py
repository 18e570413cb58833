"""The reward of completions, in the form in which OpenRLHF calls it (`--reward.remote_url .../reward.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import torch

from sparrowrl.examples.gsm8k_grpo.tasks import Problem, score


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **others: Any) -> dict[str, Any]:
    """As of the demo: 1.0 if the last number is the answer, and a little for writing a number at all.

    A query is a prompt with its completion. Returns float32[n] "rewards" and "scores", and nothing more to log.
    """
    rewards = torch.tensor(
        [
            score(query.removeprefix(prompt), Problem("", Decimal(label))).reward
            for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ]
    )
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
