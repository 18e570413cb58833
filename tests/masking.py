"""A worker extension of another owner, which puts itself between the model and its sampler as verl's does."""

from __future__ import annotations

from typing import Any

import torch

BANNED = list(range(2, 200))


def mask(model: Any) -> None:
    """Have the model never choose a token of BANNED."""
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(*args, **kwargs)
        logits[..., BANNED] = float("-inf")
        return logits

    model.compute_logits = compute_logits


class Masking:
    """For `worker_extension_cls="masking.Masking"`."""

    def mask_model(self) -> None:
        mask(self.model_runner.model)  # type: ignore[attr-defined]
