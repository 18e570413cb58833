"""What an engine must have from its agent before it can be attached to a run: waited for, within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from sparrowrl.config import EngineConfig
from sparrowrl.errors import DeadlineExceeded, StateError
from sparrowrl.transport.node import NodeDirectory
from sparrowrl.vllm_worker_ext.agent_process import AgentProcess

_POLL_S = 0.005
_PROGRESS_S = 10.0

# A child of vLLM's logger, whose lines therefore show among the engine's own.
logger = logging.getLogger("vllm.sparrowrl")


class Arrival:
    """Waits for what one agent brings into one node directory, and keeps the agent running meanwhile."""

    def __init__(self, node: NodeDirectory, agent: AgentProcess, config: EngineConfig, stop: threading.Event) -> None:
        self._node, self._agent, self._config, self._stop = node, agent, config, stop

    def newest(self) -> int | None:
        """The newest version that the hub has, as far as the agent knows; None if it does not."""
        agent = self._node.agent.read()
        return agent.newest if agent is not None and agent.connected else None

    def wait_for_run(self, deadline: float, newest: Callable[[], int | None]) -> int:
        """Wait for the number of the newest version, and then for the run's layout and origin; returns the number.

        Raises as `wait` does.
        """
        number = self.wait(deadline, "the newest version", newest)
        self.wait(deadline, "the layout and the origin", self._origin_is_there)
        return int(number)

    def wait(self, deadline: float, what: str, look: Callable[[], Any]) -> Any:
        """Poll `look` until it returns something other than None.

        Raises DeadlineExceeded that says what went wrong, and StateError if the engine has stopped following.
        """
        told = time.monotonic()
        while (found := look()) is None:
            self._agent.poll()
            now = time.monotonic()
            if now > deadline or now > told + _PROGRESS_S:
                told = now
                known = self._known_trouble()
                if now > deadline:
                    raise DeadlineExceeded(
                        f"waited {self._config.start_timeout} s (start_timeout, or SPARROWRL_START_TIMEOUT) for {what} "
                        f"from the hub at {self._config.hub}: {known}"
                    )
                logger.warning("waiting for %s from the hub at %s: %s", what, self._config.hub, known)
            if self._stop.wait(_POLL_S):
                raise StateError(
                    f"waited for {what} from the hub at {self._config.hub}, but was told to stop following it"
                )
        return found

    def _known_trouble(self) -> str:
        """What keeps this engine from its start, the ranks' own errors first: they are the cause of the agent's."""
        agent = self._node.agent.read()
        errors = [rank.error for rank in self._node.ranks().values()]
        errors += [agent.error] if agent is not None else []
        known = "; ".join(f"{error.error}: {error.message}" for error in errors if error is not None)
        if known or agent is None or not agent.connected:
            return known or "no error so far"
        if agent.newest is None:
            return "the hub answers, but the run has no version yet: start its trainer (sparrowrl.Publisher)"
        return "no error so far"

    def _origin_is_there(self) -> bool | None:
        runs = self._node.root / "runs"
        return True if any(runs.glob("*/v/0/origin/manifest")) and any(runs.glob("*/layout/*")) else None
