"""The reward of a completion, in the form in which verl calls it (`reward.custom_reward_function`)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sparrowrl.examples.gsm8k_grpo.tasks import Problem, score


def compute_score(data_source: str, solution_str: str, ground_truth: str, **others: Any) -> float:
    """As of the demo: 1.0 if the last number is the answer, and a little for writing a number at all."""
    return score(solution_str, Problem("", Decimal(ground_truth))).reward
