"""The agent as a child process: started, restarted when it dies, and told to leave by closing its standard input."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

from sparrowrl.config import EngineConfig

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_STEADY_S = 60.0  # one that lived as long as this is restarted at once
_LEAVE_S = 5.0
_GRACE_S = 10.0  # what an agent has to put its node directory in order, before another is asked to

# A child of vLLM's logger, whose lines therefore show among the engine's own.
logger = logging.getLogger("vllm.sparrowrl")


class AgentProcess:
    """Owner of one `sparrowrl agent` process for the node directory `root`."""

    def __init__(self, root: Path, config: EngineConfig) -> None:
        self._command = [
            *(sys.executable, "-m", "sparrowrl.cli.main", "agent"),
            *("--node-dir", str(root)),
            *("--hub", config.hub),
            *("--token-file", str(config.token_file)),
            *("--engine-id", config.engine_id),
            *("--connections", str(config.connections)),
        ]
        self._backoff = 0.0
        self._again_at: float | None = None
        self._started = time.monotonic()
        self._process = self._start()

    def poll(self) -> None:
        """Start another if it died, after a pause that grows with each death. Call this often."""
        if self._process.poll() is None:
            return
        now = time.monotonic()
        if self._again_at is None:
            steady = now - self._started > _STEADY_S
            self._backoff = 0.0 if steady else min(max(2 * self._backoff, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
            self._again_at = now + self._backoff
            ended = (self._process.pid, self._process.returncode, self._backoff)
            logger.error("the agent (pid %d) ended with code %d; the next starts in %.1f s", *ended)
        elif now >= self._again_at:
            self._again_at, self._started = None, now
            self._process = self._start()

    def renew(self) -> None:
        """Kill one that has had time to put its node directory in order, so that `poll` starts another."""
        if time.monotonic() - self._started > _GRACE_S and self._process.poll() is None:
            logger.error("the agent (pid %d) is killed, for the next to fetch what is damaged", self._process.pid)
            self._process.kill()

    def close(self) -> None:
        """Tell it to leave, and kill it if it does not within 5 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_LEAVE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE)
