"""How the CPU kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

# Conversions inside compiled code: numba must be told, type checkers need not know.
i64: Any = np.int64
u64: Any = np.uint64


def compiled(function: F) -> F:
    """Compile `function` with numba at its first call, for each set of dtypes once and for all (cached on disk).

    It runs without the interpreter lock: a thread that stages a version does not stop the others.
    """
    return cast(F, numba.njit(nogil=True, cache=True)(function))
