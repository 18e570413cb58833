"""Apply steps, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparrowrl.kernels.compiled import compiled


def scatter_add_(live: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See sparrowrl.kernels.scatter.scatter_add_; positions are within `live`."""
    _scatter_add(live.numpy(), positions.numpy(), steps.numpy())


@compiled
def _scatter_add(live: NDArray[Any], positions: NDArray[np.int64], steps: NDArray[Any]) -> None:
    for k in range(positions.size):
        live[positions[k]] += steps[k]
