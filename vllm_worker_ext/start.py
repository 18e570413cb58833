"""How an engine with weight-transfer backend "sparrow" starts: at the newest version, or waiting to be told."""

from __future__ import annotations

import logging
import time
from typing import Any

from sparrowrl.config import EngineConfig, follows_later
from sparrowrl.transport.node import NodeDirectory
from sparrowrl.vllm_worker_ext.follower import Follower
from sparrowrl.vllm_worker_ext.prefixes import Prefixes
from sparrowrl.vllm_worker_ext.told import Untold
from sparrowrl.vllm_worker_ext.versions import check_supported, unsynced_draft

# A child of vLLM's logger, whose lines therefore show among the engine's own.
logger = logging.getLogger("vllm.sparrowrl")


def start(core: Any) -> Follower | Untold:
    """Begin to follow what the environment says, or, with SPARROWRL_HUB=later, nobody before one is told to.

    Raises EngineUnsupported, and otherwise what `_follow` does.
    """
    check_supported(core.vllm_config)
    if warning := unsynced_draft(core.vllm_config):
        logger.warning(warning)
    if follows_later():
        logger.info("this engine makes no step before its owner calls sparrow_follow")
        return Untold(core, Prefixes())
    return _follow(core, EngineConfig.from_environment())


def _follow(core: Any, config: EngineConfig) -> Follower:
    """Follow a hub: version 0 proved and the newest version activated before this returns.

    Raises ConfigError, PlacementError, or DeadlineExceeded if the hub cannot be reached or gives no way to its newest
    version within SPARROWRL_START_TIMEOUT seconds.
    """
    node = NodeDirectory.create(config.engine_id)
    follower = None
    try:
        follower = Follower(core, config, node, Prefixes())
        deadline = time.monotonic() + config.start_timeout
        newest = follower.arrival.wait_for_run(deadline, follower.arrival.newest)
        follower.attach()
        follower.catch_up(deadline, newest)
        follower.watch()
    except BaseException:
        if follower is not None:
            follower.close()
        node.remove()
        raise
    logger.info("at version %s, all live weights proved", follower.status.version)
    return follower
