"""The backend "sparrow" of verl's checkpoint engines: every trainer rank publishes what its own shards have changed.

verl makes one object of it in each trainer rank, and one beside each engine rank, where it has nothing to do: engines
follow the hub (server.py).
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Published, Publisher
from sparrowrl.delta.ranks import Ranks, SingleProcess, TorchRanks
from sparrowrl.delta.retention import Retention
from sparrowrl.delta.sink import JournalSink
from sparrowrl.delta.snapshot import NamedTensors
from sparrowrl.errors import ConfigError, FrameworkUnsupported
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.http import LEASE_SECONDS
from sparrowrl.verl_plugin import hooks
from sparrowrl.verl_plugin.hub_process import HubProcess
from sparrowrl.verl_plugin.options import KEY, Options
from sparrowrl.verl_plugin.run_directory import RunDirectory
from sparrowrl.verl_plugin.weights import named_shards

_WIRE_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}

logger = logging.getLogger(__name__)


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
        self._options = Options.from_mapping(options)
        self._directory: RunDirectory | None = None
        self._hub: HubProcess | None = None
        self._ranks: Ranks | None = None
        self._sink: JournalSink | HubSink | None = None
        self._publisher: Publisher | None = None

    def prepare(self) -> dict[str, Any] | None:
        """In trainer ranks `{"host": name of this machine}`."""
        return {"host": socket.gethostname()} if self._is_trainer else None

    def open_run(self, hosts: list[str], engines_elsewhere: bool) -> dict[str, Any]:
        """Have rank 0 make or find the journal, and start its hub; `hosts` are the machines of all trainer ranks.

        Returns what `join_run` and engines need, on rank 0: the hub's address, credentials as in their file, without
        the writer's token and with it beside them. Raises ConfigError, also if somebody cannot reach the hub.
        """
        if not self._is_master:
            return {}
        options = self._options
        if options.only_here and (engines_elsewhere or len(set(hosts)) > 1):
            raise ConfigError(
                f"{KEY}listen: expected an address that other machines reach, for there are engines or trainer ranks "
                f"on them, got {options.listen}; write {KEY}listen=ADDRESS_OF_{hosts[0]} on a private network, or "
                f"{KEY}address=https://HOST of a proxy before the hub"
            )
        if self._directory is None:
            self._directory = RunDirectory(options.journal_dir, options.run)
        if self._hub is None:
            self._hub = HubProcess(
                self._directory.path,
                self._directory.credentials_file,
                host=options.listen,
                port=options.port,
                keep_versions=options.keep_versions,
                start_seconds=options.timeout,
            )
        url = options.url(self._hub.port, own_ip=ray.util.get_node_ip_address())
        logger.info("run %s: its hub is at %s (pid %d)", options.run, url, self._hub.pid)
        credentials = self._directory.credentials
        return {
            "hub": url,
            "journal": str(self._directory.path),
            "credentials": {
                "run": credentials.run,
                "run_key": credentials.run_key.hex(),
                "reader": credentials.reader,
            },
            "writer": credentials.writer,
        }

    def join_run(self, run: dict[str, Any], hosts: list[str]) -> None:
        """Be ready to publish into the run that rank 0 opened. Called by all ranks of torch.distributed together.

        Raises FrameworkUnsupported if these are not verl's trainer ranks, ConfigError, TransportError.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != len(hosts):
            raise FrameworkUnsupported(
                f"expected a process of torch.distributed per trainer rank: {len(hosts)}, got {world}"
            )
        seconds = self._options.timeout
        if self._ranks is None:
            self._ranks = SingleProcess() if world == 1 else TorchRanks(timeout=timedelta(seconds=seconds))
        if self._sink is not None:
            return
        given = run["credentials"]
        credentials = Credentials(given["run"], bytes.fromhex(given["run_key"]), given["reader"], run["writer"])
        if len(set(hosts)) == 1:
            kept = self._options.keep_versions
            self._sink = JournalSink(run["journal"], credentials, retention=Retention(kept) if kept else None)
        else:
            # The other ranks wait for one that repeats an upload, so it gives up before they do.
            patience = seconds / 2
            lease_patience = min(LEASE_SECONDS + 5.0, patience)
            self._sink = HubSink(run["hub"], credentials, patience=patience, lease_patience=lease_patience)

    async def send_weights(self, weights: TrainerWeights, global_steps: int | None = None) -> dict[str, Any]:
        """Make the weights the next version (the first time: version 0, or what the journal has). Called by all ranks.

        Returns, on rank 0, `{"version", "kind", "metrics"}` (docs/verl.md). Raises the SparrowError of whichever rank
        failed on all ranks; the version does not exist then, and the next call publishes what this one could not.
        """
        began = time.monotonic()
        if not isinstance(weights, TrainerWeights):
            raise FrameworkUnsupported(
                "expected verl's training engine, got its stream of tensors: verl was imported without this plugin "
                "(VERL_USE_EXTERNAL_PLUGINS?), or calls it in a way that it was not written for"
            )
        if self._sink is None or self._ranks is None:
            raise ConfigError("expected open_run and join_run before the first weights; is verl's own manager at work?")
        named = _shards(weights.engine)
        if self._publisher is None:
            self._publisher = Publisher(
                self._sink,
                named,
                wire_dtype=_wire_dtype(weights.dtype),
                anchor_every=self._options.anchor_every,
                ranks=self._ranks,
            )
            done = self._publisher.last
        else:
            done = self._publisher.publish(named)
        if not self._is_master:
            return {}
        metrics = _metrics(done, time.monotonic() - began, self._publisher.anchored == done.version)
        return {"version": done.version, "kind": done.kind, "metrics": metrics}

    def write_anchor(self) -> int:
        """Write the newest version whole, for engines that have other weights; its number. Called by all ranks.

        Nothing is written if it has an anchor. Raises as `send_weights`.
        """
        if self._publisher is None:
            raise ConfigError("expected a version to write whole; send weights first")
        return self._publisher.write_anchor().version

    def finalize(self) -> None:
        """End what this rank has of the run: its hub, and its journal if that is a temporary one."""
        self._publisher = None
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

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


def _metrics(done: Published, seconds: float, anchor: bool) -> dict[str, float]:
    return {
        "sparrow/version": float(done.version),
        "sparrow/density": done.changed / max(done.elements, 1),
        "sparrow/changed": float(done.changed),
        "sparrow/payload_bytes": float(done.payload_bytes),
        "sparrow/bits_per_changed": done.bits_per_changed,
        "sparrow/publish_s": seconds,
        "sparrow/diff_s": done.diff_ms / 1000,
        "sparrow/encode_s": done.encode_ms / 1000,
        "sparrow/put_s": done.put_ms / 1000,
        "sparrow/commit_s": done.commit_ms / 1000,
        "sparrow/anchor": float(anchor),
    }
