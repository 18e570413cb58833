"""Apply steps, as plain torch."""

from __future__ import annotations

from torch import Tensor


def scatter_add_(live: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See sparrowrl.kernels.scatter.scatter_add_."""
    live[positions] = live[positions] + steps
