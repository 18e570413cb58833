"""Where the plugin is let into verl: a few names are wrapped as verl imports them, and do as before for other backends.

verl calls the plugin's module, but tells nobody if that fails, and processes that use another backend import it too. So
what cannot work is not raised on import: it is kept, and raised where somebody uses the backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from sparrowrl.errors import FrameworkUnsupported

BACKEND = "sparrow"
TESTED = ("0.9.1",)

_problems: list[str] = []


def install() -> None:
    """Say what is to be done when verl imports one of these modules (at once, if it has)."""
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "verl.utils.config": _check_configuration,
        "verl.trainer.main_ppo": _check_run,
        "verl.checkpoint_engine.base": _offer_backend,
        "verl.workers.engine_workers": _hand_over_engine,
        "verl.workers.rollout.vllm_rollout.vllm_async_server": _prepare_server,
        "verl.experimental.fully_async_policy.fully_async_trainer": _keep_metrics,
    }
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, module)


def check_usable() -> None:
    """Raise FrameworkUnsupported unless this verl is what the plugin was written for and tested with."""
    installed = importlib.metadata.version("verl")
    if installed not in TESTED:
        raise FrameworkUnsupported(f"verl {installed}: expected one that was tested, {' or '.join(TESTED)}")
    if _problems:
        raise FrameworkUnsupported(_problems[0])


def _wrap(owner: Any, name: str, parameters: str, wrapper: Callable[..., Any]) -> None:
    """Make `owner.name(...)` call `wrapper(original, ...)`; `parameters` are those that `name` was written with."""
    original = getattr(owner, name, None)
    found = "nothing" if original is None else " ".join(inspect.signature(original).parameters)
    found = found.removesuffix(" _ray_trace_ctx")  # Ray's own, in a class that it has made an actor of
    if original is None or found != parameters:
        where = getattr(owner, "__qualname__", owner.__name__)
        _problems.append(f"verl's {where}.{name}: expected the parameters {parameters}, got {found}; not verl 0.9.1?")
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    @functools.wraps(original)
    async def wrapped_coroutine(*args: Any, **kwargs: Any) -> Any:
        return await wrapper(original, *args, **kwargs)

    # Ray looks at a method to know whether to await what it returns.
    setattr(owner, name, wrapped_coroutine if inspect.iscoroutinefunction(original) else wrapped)


# The driver's process, before anything is started.


def _check_configuration(module: ModuleType) -> None:
    _wrap(module, "validate_config", "config use_reference_policy use_critic", _check_then)


def _check_run(module: ModuleType) -> None:
    """fully_async calls no `validate_config`."""
    _wrap(module, "run_ppo", "config task_runner_class", _check_then)


def _check_then(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    from sparrowrl.verl_plugin import support

    support.check_configuration(config)
    return original(config, *args, **kwargs)


# Every process that synchronizes weights.


def _offer_backend(module: ModuleType) -> None:
    """Register the backend, and have verl's manager make ours where the configuration asks for the backend.

    Some of verl's trainers let one name another manager class, others do not; this holds for all.
    """
    stock = module.CheckpointEngineManager
    expected, found = "self config actor_wg replicas", " ".join(inspect.signature(stock.__init__).parameters)
    if found != expected or "__new__" in vars(stock):
        _problems.append(f"verl's {stock.__qualname__}: expected __init__({expected}), no __new__, got ({found})")

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is stock and config.backend == BACKEND:
            from sparrowrl.verl_plugin.manager import SparrowManager

            return object.__new__(SparrowManager)
        return object.__new__(cls)

    stock.__new__ = new

    importlib.import_module("sparrowrl.verl_plugin.backend")  # which registers itself


# Trainer ranks.


def _hand_over_engine(module: ModuleType) -> None:
    _wrap(module.ActorRolloutRefWorker, "update_weights", "self global_steps mode", _send_from_engine)


async def _send_from_engine(original: Any, worker: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
    """verl gives a backend a stream of full tensors; ours gets the training engine, to read each rank's own shards."""
    if (worker.config.rollout.checkpoint_engine.backend if mode == "auto" else mode) != BACKEND:
        return await original(worker, global_steps=global_steps, mode=mode)
    from sparrowrl.verl_plugin.backend import TrainerWeights

    weights = TrainerWeights(worker.actor.engine, worker.config.rollout.dtype)
    return await worker.checkpoint_engine.send_weights(weights, global_steps=global_steps)


# Engines.


def _prepare_server(module: ModuleType) -> None:
    from sparrowrl.verl_plugin import server

    stock = module.vLLMHttpServer
    _wrap(stock, "_preprocess_engine_kwargs", "self engine_kwargs", server.prepare)
    _wrap(
        stock,
        "generate",
        "self prompt_ids sampling_params request_id image_data video_data audio_data mm_processor_kwargs priority "
        "kv_transfer_params",
        server.generate,
    )
    stock.sparrow_host = server.host
    stock.sparrow_follow = server.follow
    stock.sparrow_reach = server.reach


# Metrics.


def _keep_metrics(module: ModuleType) -> None:
    """fully_async's trainer drops what its manager returns."""
    trainer = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    _wrap(trainer, "_setup_checkpoint_manager", "self", _setup_manager)


async def _setup_manager(original: Any, trainer: Any, **tracing: Any) -> None:
    await original(trainer, **tracing)
    trainer.checkpoint_manager.report = functools.partial(_add_metrics, trainer)


def _add_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    if hasattr(trainer, "metrics"):  # made at its first step
        trainer.metrics.update(metrics)
