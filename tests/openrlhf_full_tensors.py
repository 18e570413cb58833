"""OpenRLHF's stock way of a sync on a CPU, for comparisons: the sync backend "full_tensors", for tests only.

OpenRLHF sends by NCCL, which needs GPUs. Here everything is its own code (the pause with partial rollout, the reset of
prefix caches, DeepSpeed's gather and a Ray call for each parameter, vLLM's loader); only the wire between rank 0 and
the engines is another: gloo.

All processes of the job import it: the example's PROCESS_MODULES names it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt


class _Gloo:
    """A process group with the one method that OpenRLHF calls of vLLM's PyNcclCommunicator."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: Any) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group = stateless_init_torch_distributed_process_group(address, port, rank, world_size, "gloo")

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:
        """From rank `src` to all others."""
        import torch

        self._group.broadcast(tensor.view(torch.uint8), src).wait()


@wrapt.when_imported("openrlhf.utils.distributed_util")  # type: ignore[untyped-decorator]
def _connect_by_gloo(module: ModuleType) -> None:
    module.stateless_init_process_group = _Gloo  # type: ignore[attr-defined]


@wrapt.when_imported("openrlhf.trainer.ray.vllm_worker_wrap")  # type: ignore[untyped-decorator]
def _receive_on_the_cpu(module: ModuleType) -> None:
    def update_weight(self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """OpenRLHF's, but for where the tensor is."""
        import torch

        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0, stream=None)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    module.WorkerWrap.update_weight = update_weight  # type: ignore[attr-defined]


@wrapt.when_imported("vllm.model_executor.layers.utils")  # type: ignore[untyped-decorator]
def _keep_weights_loadable(utils: ModuleType) -> None:
    """vLLM's CPU build multiplies by packed copies and drops the weights, which could then not be loaded again."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]
