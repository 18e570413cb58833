"""The backend "sparrow" of verl's checkpoint engines: every trainer rank publishes what its own shards have changed.

verl makes one object of it in each trainer rank, and one beside each engine rank, where it has nothing to do: engines
follow the hub (server.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sparrowrl.delta.ranks import SingleProcess, TorchRanks
from sparrowrl.delta.snapshot import NamedTensors
from sparrowrl.errors import ConfigError, FrameworkUnsupported
from sparrowrl.job.trainer_rank import Run, Sent, TrainerRank
from sparrowrl.verl_plugin import hooks, support
from sparrowrl.verl_plugin.weights import named_shards

_WIRE_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True, slots=True)
class TrainerWeights:
    """What a trainer rank is given to publish: verl's training engine, and the dtype of the rollout engines' weights
    (`actor_rollout_ref.rollout.dtype`).
    """

    engine: Any
    dtype: str


@CheckpointEngineRegistry.register(hooks.BACKEND)
class SparrowCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One rank's end of the backend. SparrowManager (manager.py) calls, on all trainer ranks: `prepare`, `open_run`,
    `join_run`, then `send_weights` for each version.
    """

    def __init__(self, bucket_size: int, is_master: bool | None = None, **options: Any) -> None:
        """verl says `is_master` in trainer ranks only. Raises ConfigError for a wrong option."""
        self._is_trainer = is_master is not None
        self._is_master = bool(is_master)
        self._options = support.options(options)
        self._rank = TrainerRank(self._options)

    def prepare(self) -> dict[str, Any] | None:
        """In trainer ranks `{"host": name of this machine}`."""
        return {"host": socket.gethostname()} if self._is_trainer else None

    def open_run(self, hosts: list[str], engines_elsewhere: bool) -> Run | None:
        """Have rank 0 make or find the journal, and start its hub; `hosts` are the machines of all trainer ranks.

        Returns, on rank 0, what `join_run` and engines need. Raises ConfigError, also if somebody cannot reach the hub.
        """
        if not self._is_master:
            return None
        return self._rank.open_run(hosts, engines_elsewhere, ray.util.get_node_ip_address())

    def join_run(self, run: Run, hosts: list[str]) -> None:
        """Be ready to publish into the run that rank 0 opened. Called by all ranks of torch.distributed together.

        Raises FrameworkUnsupported if these are not verl's trainer ranks, ConfigError, TransportError.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != len(hosts):
            raise FrameworkUnsupported(
                f"expected a process of torch.distributed per trainer rank: {len(hosts)}, got {world}"
            )
        if not self._rank.joined:
            timeout = timedelta(seconds=self._options.timeout)
            self._rank.join_run(run, hosts, SingleProcess() if world == 1 else TorchRanks(timeout=timeout))

    async def send_weights(self, weights: TrainerWeights, global_steps: int | None = None) -> Sent | None:
        """Make the weights the next version (the first time: version 0, or what the journal has). Called by all ranks.

        Returns what it came to on rank 0. Raises the SparrowError of whichever rank failed on all ranks; the version
        does not exist then, and the next call publishes what this one could not.
        """
        if not isinstance(weights, TrainerWeights):
            raise FrameworkUnsupported(
                "expected verl's training engine, got its stream of tensors: verl was imported without this plugin "
                "(VERL_USE_EXTERNAL_PLUGINS?), or calls it in a way that it was not written for"
            )
        if not self._rank.joined:
            raise ConfigError("expected open_run and join_run before the first weights; is verl's own manager at work?")
        sent = self._rank.send(_shards(weights.engine), _wire_dtype(weights.dtype))
        return sent if self._is_master else None

    def write_anchor(self) -> int:
        """Write the newest version whole, for engines that have other weights; its number. Called by all ranks.

        Nothing is written if it has an anchor. Raises as `send_weights`.
        """
        return self._rank.write_anchor()

    def finalize(self) -> None:
        """End what this rank has of the run: its hub, and its journal if that is a temporary one."""
        self._rank.close()

    # What verl's own manager would call.

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises FrameworkUnsupported."""
        raise _not_ours("build_topology")

    def init_process_group(self, **kwargs: Any) -> None:
        """Raises FrameworkUnsupported."""
        raise _not_ours("init_process_group")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Raises FrameworkUnsupported."""
        raise _not_ours("receive_weights")


def _not_ours(method: str) -> FrameworkUnsupported:
    return FrameworkUnsupported(
        f"checkpoint_engine.backend=sparrow: verl's own manager called {method}; use verl 0.9.1 with its "
        "CheckpointEngineManager, and install sparrowrl in the driver's environment too"
    )


def _shards(engine: Any) -> NamedTensors:
    """`named_shards`, called by whoever iterates: so whatever it raises, on one rank, the publisher tells to all."""
    yield from named_shards(engine)


def _wire_dtype(name: str) -> torch.dtype:
    if name not in _WIRE_DTYPES:
        raise ConfigError(f"actor_rollout_ref.rollout.dtype: expected {', '.join(_WIRE_DTYPES)}, got {name!r}")
    return _WIRE_DTYPES[name]
