"""Inside vLLM: learns where weights live, stages deltas beside them and activates them between two engine steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrowrl.vllm_worker_ext.worker_extension import WorkerExtension as WorkerExtension

__all__ = ["WorkerExtension"]


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(f"module 'sparrowrl.vllm_worker_ext' has no attribute {name!r}")
    from sparrowrl.vllm_worker_ext.worker_extension import WorkerExtension

    return WorkerExtension
