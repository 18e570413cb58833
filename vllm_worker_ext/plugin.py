"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes before a model is built."""

from __future__ import annotations

from typing import Any

import torch

BACKEND = "sparrow"


def register() -> None:
    """Offer the weight-transfer backend "sparrow" and prepare the engine core for it; doing it twice is fine.

    An engine that uses neither the backend nor our worker extension is left as it was, and so is a vLLM that was not
    tested: there the backend itself refuses to work when somebody uses it.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from sparrowrl.vllm_worker_ext import hooks, processing, versions

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "sparrowrl.vllm_worker_ext.weight_transfer", "SparrowEngine")
    if not versions.is_usable():
        return
    _keep_cpu_weights_live()
    processing.watch_loading(_updates_weights)
    _let_vllm_look_at_llvmlite()
    hooks.install()


def follows_by_itself(config: Any) -> bool:
    """Whether this VllmConfig's engine follows a trainer through the "sparrow" backend."""
    return config.weight_transfer_config is not None and config.weight_transfer_config.backend == BACKEND


def _updates_weights(config: Any) -> bool:
    """Whether this VllmConfig's engine has its weights changed by us, through the backend or the worker extension."""
    if config is None or follows_by_itself(config):
        return config is not None
    name = config.parallel_config.worker_extension_cls
    if not name:
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from sparrowrl.vllm_worker_ext.worker_extension import WorkerExtension

    return issubclass(resolve_obj_by_qualname(name), WorkerExtension)


def _keep_cpu_weights_live() -> None:
    """On the CPU vLLM multiplies by packed copies of weights; our engines must multiply by the weights themselves."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if _updates_weights(get_current_vllm_config_or_none()):
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
        else:
            pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _let_vllm_look_at_llvmlite() -> None:
    """vLLM 0.32's CPU build looks at `__dict__` of everything in every loaded module when an engine starts.

    llvmlite (numba's compiler) has an object that makes up any attribute it is asked for, this one too, and vLLM then
    fails on it: no engine could start in a process that has run one of our kernels. Here it gets an empty one.
    """
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    ffi.lib._fntab.setdefault("__dict__", {})
