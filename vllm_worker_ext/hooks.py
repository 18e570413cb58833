"""Where the follower is let into vLLM's engine core: a few methods are wrapped, and do as before without a follower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrowrl.vllm_worker_ext import plugin

# The first element of what goes into the core's input queue to have the core's own thread run the second.
JOB = "sparrowrl job"


def install() -> None:
    """Wrap the engine core's methods. Called once per process."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    _wrap(EngineCore, "_initialize_kv_caches", _start)
    _wrap(EngineCore, "preprocess_add_request", _preprocess)
    _wrap(EngineCore, "add_request", _add)
    _wrap(EngineCore, "step", _step)
    _wrap(EngineCore, "step_with_batch_queue", _step)
    _wrap(EngineCore, "wake_up", _wake_up)
    _wrap(EngineCore, "shutdown", _shutdown)
    _wrap(EngineCoreProc, "_handle_client_request", _handle)
    EngineCore.sparrow_follow = _follow


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _start(original: Any, core: Any, vllm_config: Any) -> Any:
    """The model is loaded and warm, nothing is served yet: the moment to find the trainer and catch up with it."""
    result = original(core, vllm_config)
    if plugin.follows_by_itself(vllm_config):
        from sparrowrl.vllm_worker_ext.start import start

        core.sparrow = start(core)
    return result


def _follow(core: Any, settings: Any) -> Any:
    """Follow the run that `settings` describe (docs/protocol.md section 5); the answer says what failed."""
    from sparrowrl.vllm_worker_ext.told import follow

    return follow(core, settings)


def _preprocess(original: Any, core: Any, request: Any) -> Any:
    follower = getattr(core, "sparrow", None)
    if follower is not None:
        request.cache_salt = follower.prefixes.salt(request.cache_salt)
    return original(core, request)


def _add(original: Any, core: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    follower = getattr(core, "sparrow", None)
    if follower is not None:
        follower.prefixes.renew_preempted(core.scheduler)
        follower.prefixes.renew(request)
    return original(core, request, *args, **kwargs)


def _step(original: Any, core: Any) -> Any:
    follower = getattr(core, "sparrow", None)
    if follower is None:
        return original(core)
    if not follower.before_step() and not core.batch_queue:
        return {}, False
    with follower.scheduling():
        outputs, executed = original(core)
    follower.after_step(outputs)
    return outputs, executed


def _handle(original: Any, core: Any, request_type: Any, request: Any) -> Any:
    if request_type == JOB:
        return request()
    return original(core, request_type, request)


def _wake_up(original: Any, core: Any, *args: Any, **kwargs: Any) -> Any:
    follower = getattr(core, "sparrow", None)
    if follower is None or not follower.asleep:
        return original(core, *args, **kwargs)
    result = original(core, *args, **kwargs)
    if not follower.asleep:
        follower.woken()
    return result


def _shutdown(original: Any, core: Any) -> Any:
    follower = getattr(core, "sparrow", None)
    if follower is not None:
        follower.close()
    return original(core)
