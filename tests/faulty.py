"""A worker extension that fails on demand in the middle of staging or activating, once, in one rank.

`worker_extension_cls="faulty.FaultyExtension"`: this folder must be on the PYTHONPATH of the workers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from fresh import FreshExtension

from sparrowrl.vllm_worker_ext.agreement import Agreement
from sparrowrl.vllm_worker_ext.attachment import Attachment
from sparrowrl.vllm_worker_ext.changes import Write
from sparrowrl.vllm_worker_ext.staging import Staged

# Where a rank can fail: before anything, and between any two of what an activation does.
STAGES: dict[str, tuple[type, str]] = {
    "take a segment": (Staged, "take"),
    "finish staging": (Staged, "finish"),
    "write": (Write, "do"),
    "prove": (Write, "check"),
    "carry": (Attachment, "carry"),
    "audit": (Attachment, "live_parts"),
    "vote": (Agreement, "decide"),
}


class FaultyExtension(FreshExtension):
    """What tests ask each worker of an engine."""

    rank: int

    def fault_environment(self, variables: dict[str, str]) -> None:
        """Set environment variables of this worker."""
        os.environ.update(variables)

    def fault_arm(self, rank: int, stage: str, kind: str, after: int, seconds: float) -> None:
        """Have this rank fail once, at its (after + 1)-th call from now: "raise", "kill" itself, or "hang"."""
        if self.rank != rank:
            return
        owner, name = STAGES[stage]
        original: Callable[..., Any] = getattr(owner, name)
        left = after

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return original(*args, **kwargs)
            setattr(owner, name, original)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise RuntimeError(f"injected into {stage}")
            threading.Event().wait(seconds)
            return original(*args, **kwargs)

        setattr(owner, name, failing)
