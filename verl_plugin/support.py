"""What the plugin does not do in verl, refused by name before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparrowrl.errors import FrameworkUnsupported
from sparrowrl.job.options import Options
from sparrowrl.verl_plugin import hooks

KEY = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.sparrow."
_ROLLOUT = "actor_rollout_ref.rollout"


def options(given: Any) -> Options:
    """What verl hands on from `checkpoint_engine.engine_kwargs.sparrow`, checked. Raises ConfigError."""
    return Options.from_mapping(KEY, {"run": "verl", **given} if isinstance(given, Mapping) else given)


def check_configuration(config: Any) -> None:
    """Check verl's whole configuration (a DictConfig) if it asks for the backend, on the driver.

    Raises FrameworkUnsupported for what is not supported and ConfigError for a wrong option.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.checkpoint_engine.backend != hooks.BACKEND:
        return
    hooks.check_usable()
    options((rollout.checkpoint_engine.get("engine_kwargs") or {}).get(hooks.BACKEND) or {})
    if config.actor_rollout_ref.hybrid_engine and not _has_standalone_engines(config.trainer):
        raise FrameworkUnsupported(
            "checkpoint_engine.backend=sparrow: expected engines beside the trainer, got a trainer whose engines share "
            "its GPUs and its memory, where nothing is sent; use trainer.v1.trainer_mode=separate_async, or verl's "
            "one_step_off_policy or fully_async_policy"
        )
    name = rollout.get("name", "vllm")  # verl itself says that it must be given
    _refuse(
        {
            f"{_ROLLOUT}.name={name} (only vllm)": name != "vllm",
            f"{_ROLLOUT}.data_parallel_size={rollout.data_parallel_size} (start more replicas)": (
                rollout.data_parallel_size > 1
            ),
            f"{_ROLLOUT}.disaggregation.enabled": (rollout.get("disaggregation") or {}).get("enabled", False),
            f"{_ROLLOUT}.quantization={rollout.get('quantization')}": rollout.get("quantization") is not None,
            f"{_ROLLOUT}.qat.enable": (rollout.get("qat") or {}).get("enable", False),
            "adapters that are not merged (set actor_rollout_ref.model.lora.merge=True)": _has_adapters(
                config.actor_rollout_ref.model
            ),
        }
    )


def check_server(rollout: Any, engine_kwargs: dict[str, Any], nodes: int) -> None:
    """Check what one standalone server is about to be started with. Raises FrameworkUnsupported."""
    transfer = engine_kwargs.get("weight_transfer_config")
    _refuse(
        {
            f"{_ROLLOUT}.engine_kwargs.vllm.weight_transfer_config={transfer}": transfer is not None,
            f"an engine over {nodes} nodes (tensor_model_parallel_size={rollout.tensor_model_parallel_size})": nodes
            > 1,
        }
    )


def _has_standalone_engines(trainer: Any) -> bool:
    return bool(trainer.get("use_v1")) and trainer.v1.trainer_mode == "separate_async"


def _has_adapters(model: Any) -> bool:
    lora = model.get("lora") or {}
    return max(model.get("lora_rank") or 0, lora.get("rank") or 0) > 0 and not lora.get("merge", False)


def _refuse(reasons: dict[str, bool]) -> None:
    named = [what for what, asked in reasons.items() if asked]
    if named:
        raise FrameworkUnsupported(f"checkpoint_engine.backend=sparrow: not supported with {'; '.join(named)}")
