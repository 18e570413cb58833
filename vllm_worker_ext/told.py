"""An engine that follows when it is told to: `sparrow_follow`, a utility method of the engine core."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from sparrowrl.config import Credentials, EngineConfig
from sparrowrl.errors import ConfigError, EngineUnsupported, SparrowError, StateError, Unauthorized
from sparrowrl.transport.http import is_address
from sparrowrl.transport.node import ErrorInfo, NodeDirectory
from sparrowrl.vllm_worker_ext import plugin
from sparrowrl.vllm_worker_ext.follower import Follower
from sparrowrl.vllm_worker_ext.hooks import JOB
from sparrowrl.vllm_worker_ext.prefixes import Prefixes

_TOKEN = "token.json"

# A child of vLLM's logger, whose lines therefore show among the engine's own.
logger = logging.getLogger("vllm.sparrowrl")


class Told(TypedDict):
    """What `sparrow_follow` answers (docs/protocol.md section 5)."""

    node_dir: str
    version: int | None
    condition: str
    error: dict[str, str] | None


class Untold:
    """In a follower's place while the engine follows nobody: requests wait."""

    def __init__(self, core: Any, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self.asleep = False  # whether it is or not, nobody touches its weights
        self._core = core

    def before_step(self) -> bool:
        """No step may be made. Raises StateError where the caller makes the steps, and would only spin."""
        if not hasattr(self._core, "input_queue") and self._core.scheduler.has_requests():
            raise StateError("this engine follows no trainer yet, so it serves nothing: call sparrow_follow first")
        return False

    def scheduling(self) -> AbstractContextManager[None]:
        """The context of a step, of which there is none."""
        return nullcontext()

    def after_step(self, outputs: Any) -> None:
        """There is nothing to count."""

    def woken(self) -> None:
        """There is nothing that could have changed."""

    def leave(self) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to end."""


def follow(core: Any, settings: Any) -> Told | Future[Told]:
    """Have the engine follow the run that `settings` describe, instead of what it follows so far, if anything.

    Runs on the core's thread. A core with a loop of its own goes on with its loop while it waits for the hub, and the
    answer is a Future, as vLLM's utility methods may have it. What goes wrong is in the answer; nothing is raised.
    """
    try:
        if not plugin.follows_by_itself(core.vllm_config):
            raise EngineUnsupported("sparrow_follow: expected an engine started with weight-transfer backend 'sparrow'")
        config, credentials = _understood(settings)
        core.sparrow.leave()
        core.sparrow = Untold(core, core.sparrow.prefixes)
        node = NodeDirectory.create(config.engine_id)
        telling = _Telling(core, replace(config, token_file=node.root / _TOKEN), credentials, node)
    except (SparrowError, OSError) as error:
        return _failed(error)
    if hasattr(core, "input_queue"):
        threading.Thread(target=telling.run, name="sparrowrl-told", daemon=True).start()
        return telling.answer
    telling.run()
    return telling.answer.result()


def _understood(settings: Any) -> tuple[EngineConfig, Credentials]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings: expected a mapping, got {type(settings).__name__}")
    credentials = Credentials.of(settings.get("credentials"), "setting credentials")
    others = {name: value for name, value in settings.items() if name != "credentials"}
    config = EngineConfig.from_settings(others, Path(_TOKEN))
    if not is_address(config.hub):
        raise ConfigError(f"setting hub: expected http://host:port or https://host, got {config.hub!r}")
    return config, credentials.for_engines()


class _Telling:
    """One call, from the settings to the answer."""

    def __init__(self, core: Any, config: EngineConfig, credentials: Credentials, node: NodeDirectory) -> None:
        self.answer: Future[Told] = Future()
        self._core, self._node = core, node
        self._deadline = time.monotonic() + config.start_timeout
        try:
            credentials.save(config.token_file)
            self._follower = Follower(core, config, node, core.sparrow.prefixes)
        except OSError:
            node.remove()
            raise
        core.sparrow = self._follower

    def run(self) -> None:
        """Wait for the run, then have the core's thread attach the engine to it."""
        problem, newest = None, 0
        try:
            newest = self._follower.arrival.wait_for_run(self._deadline, self._newest)
        except (SparrowError, OSError) as error:
            problem = error
        end = partial(self._end, newest, problem)
        if hasattr(self._core, "input_queue"):
            self._core.input_queue.put_nowait((JOB, end))
        else:
            end()

    def _newest(self) -> int | None:
        """The newest version. Raises Unauthorized, which no waiting helps."""
        agent = self._node.agent.read()
        if agent is not None and agent.error is not None and agent.error.error == Unauthorized.__name__:
            raise Unauthorized(agent.error.message)
        return self._follower.arrival.newest()

    def _end(self, newest: int, problem: Exception | None) -> None:
        follower = self._follower
        if self._core.sparrow is not follower:
            self.answer.set_result(_failed(StateError("expected to follow this run, but was told to follow another")))
            return
        try:
            if problem is not None:
                raise problem
            follower.attach()
            # Never serve what was outdated when the engine joined; between other versions it makes steps as always.
            follower.least = max(newest, follower.arrival.newest() or 0)
            follower.watch()
        except (SparrowError, OSError) as error:
            logger.error("cannot follow: %s: %s", type(error).__name__, error)
            follower.close()
            self._core.sparrow = Untold(self._core, follower.prefixes)
            self.answer.set_result(_failed(error))
            return
        status = follower.status
        logger.info("follows a run whose newest version is %d; at %s, %s", newest, status.version, status.condition)
        said = Told(node_dir=str(self._node.root), version=status.version, condition=status.condition, error=None)
        self.answer.set_result(said)


def _failed(error: Exception) -> Told:
    return Told(node_dir="", version=None, condition="unknown", error=asdict(ErrorInfo.of(error)))
