"""verl's stock way of a sync on a CPU, for comparisons: the backend "full_tensors", for tests only.

verl's own backends that send full tensors need NCCL or RDMA. This one goes the same way under verl's manager (abort,
all tensors as `get_per_tensor_param` gathers them, reload by the model's loader, resume); only the wire between rank 0
and the engines is another: a safetensors file a sync, in the job's temporary directory.

verl imports it by `checkpoint_engine.custom_backend_module`, and in vLLM's workers by `VERL_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import wrapt
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_DEADLINE_S = 120.0


@CheckpointEngineRegistry.register("full_tensors")  # type: ignore[untyped-decorator]
class FullTensors(CheckpointEngine):  # type: ignore[misc]
    """Trainer ranks are told `is_master`; engines are not."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._syncs = 0

    @property
    def _file(self) -> Path:
        return Path(tempfile.gettempdir()) / f"full-tensors-{self._syncs}.safetensors"

    def prepare(self) -> dict[str, Any]:
        """Both sides count the syncs."""
        self._syncs += 1
        return {}

    @classmethod
    def build_topology(
        cls, trainers: int, engines: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """There is none."""
        return {}, {}

    def init_process_group(self) -> None:
        """Nothing to connect."""

    def finalize(self) -> None:
        """The engines have read the file."""
        if self._is_master:
            self._file.unlink()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Gather on all ranks, write on rank 0."""
        held = {}
        for name, weight in weights:
            if self._is_master:
                held[name] = weight.detach().to(torch.bfloat16, copy=True).contiguous()
        if self._is_master:
            draft = self._file.with_suffix(".part")
            save_file(held, draft)
            os.replace(draft, self._file)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Read what rank 0 writes."""
        deadline = time.monotonic() + _DEADLINE_S
        while not self._file.exists():
            assert time.monotonic() < deadline, f"no {self._file} within {_DEADLINE_S} s"
            await asyncio.sleep(0.01)
        for name, weight in load_file(self._file).items():
            yield name, weight


@wrapt.when_imported("vllm.model_executor.layers.utils")  # type: ignore[untyped-decorator]
def _keep_weights_loadable(utils: ModuleType) -> None:
    """vLLM's CPU build multiplies by packed copies and drops the weights, which verl could then not load again."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]
