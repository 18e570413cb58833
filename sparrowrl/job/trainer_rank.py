"""A trainer's rank in the run of its job: rank 0 owns the journal and its hub, and all ranks publish together."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.ranks import Ranks
from sparrowrl.delta.retention import Retention
from sparrowrl.delta.sink import JournalSink
from sparrowrl.delta.snapshot import NamedTensors
from sparrowrl.errors import ConfigError
from sparrowrl.job.hub_process import HubProcess
from sparrowrl.job.metrics import of_publish
from sparrowrl.job.options import Options
from sparrowrl.job.run_directory import RunDirectory
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.http import LEASE_SECONDS

logger = logging.getLogger(__name__)


class Run(TypedDict):
    """What other ranks and engines need of a run: `credentials` as in their file, without the writer's token."""

    hub: str
    journal: str
    credentials: dict[str, str]
    writer: str


class Sent(TypedDict):
    """What a publish came to: the version, its state (hex), "origin", "delta" or "anchor", and metrics."""

    version: int
    state: str
    kind: str
    metrics: dict[str, float]


class TrainerRank:
    """One rank. All ranks call `join_run`, then `send` for each version; rank 0 calls `open_run` before."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._directory: RunDirectory | None = None
        self._hub: HubProcess | None = None
        self._sink: JournalSink | HubSink | None = None
        self._ranks: Ranks | None = None
        self._publisher: Publisher | None = None

    @property
    def joined(self) -> bool:
        """Whether this rank can publish."""
        return self._sink is not None

    def open_run(self, hosts: Sequence[str], engines_elsewhere: bool, own_ip: str) -> Run:
        """Rank 0: make or find the journal, and start its hub. Doing it twice is fine.

        `hosts` are the names of all ranks' machines; `own_ip` is where a hub that listens on all addresses is. Raises
        ConfigError, also if somebody cannot reach the hub.
        """
        options = self._options
        if options.only_here and (engines_elsewhere or len(set(hosts)) > 1):
            raise ConfigError(
                f"{options.key}listen: expected an address that other machines reach, for there are engines or trainer "
                f"ranks on them, got {options.listen}; give {options.key}listen the address of {hosts[0]} on a private "
                f"network, or {options.key}address the https://HOST of a proxy before the hub"
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
        url = options.url(self._hub.port, own_ip=own_ip)
        logger.info("run %s: its hub is at %s (pid %d)", options.run, url, self._hub.pid)
        credentials = self._directory.credentials
        assert credentials.writer is not None
        return Run(
            hub=url,
            journal=str(self._directory.path),
            credentials={
                "run": credentials.run,
                "run_key": credentials.run_key.hex(),
                "reader": credentials.reader,
            },
            writer=credentials.writer,
        )

    def join_run(self, run: Run, hosts: Sequence[str], ranks: Ranks) -> None:
        """Be ready to publish into the run that rank 0 opened; where it was joined already nothing is done.

        Ranks of one machine write into the journal itself, others through the hub. Raises ConfigError, TransportError.
        """
        if self._sink is not None:
            return
        self._ranks = ranks
        given = run["credentials"]
        credentials = Credentials(given["run"], bytes.fromhex(given["run_key"]), given["reader"], run["writer"])
        if len(set(hosts)) == 1:
            kept = self._options.keep_versions
            self._sink = JournalSink(run["journal"], credentials, retention=Retention(kept) if kept else None)
        else:
            # The other ranks wait for one that repeats an upload, so it gives up before they do.
            patience = self._options.timeout / 2
            lease_patience = min(LEASE_SECONDS + 5.0, patience)
            self._sink = HubSink(run["hub"], credentials, patience=patience, lease_patience=lease_patience)

    def send(self, named: NamedTensors, wire_dtype: torch.dtype) -> Sent:
        """Make the weights the next version (the first time: version 0, or what the journal has). Called by all ranks.

        Raises the SparrowError of whichever rank failed on all ranks; the version does not exist then, and the next
        call publishes what this one could not.
        """
        began = time.monotonic()
        if self._sink is None:
            raise ConfigError("expected a run to be joined before weights are sent")
        if self._publisher is None:
            self._publisher = Publisher(
                self._sink,
                named,
                wire_dtype=wire_dtype,
                anchor_every=self._options.anchor_every,
                ranks=self._ranks,
            )
            done = self._publisher.last
        else:
            done = self._publisher.publish(named)
        metrics = of_publish(done, time.monotonic() - began, self._publisher.anchored == done.version)
        return Sent(version=done.version, state=self._publisher.state, kind=done.kind, metrics=metrics)

    def write_anchor(self) -> int:
        """Write the newest version whole, for engines that have other weights; its number. Called by all ranks.

        Nothing is written if it has an anchor. Raises as `send`.
        """
        if self._publisher is None:
            raise ConfigError("expected a version to write whole; send weights first")
        return self._publisher.write_anchor().version

    def close(self) -> None:
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


def follow_settings(run: Run, options: Options) -> Mapping[str, Any]:
    """What engines are told (`sparrow_follow`, docs/protocol.md section 5), but for the name of each."""
    return {
        "hub": run["hub"],
        "credentials": run["credentials"],
        "in_flight": options.in_flight,
        "audit_every": options.audit_every,
        "connections": options.connections,
        "start_timeout": options.timeout,
        "drain_timeout": options.timeout,
    }
