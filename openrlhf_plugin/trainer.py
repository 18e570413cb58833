"""The sync in each rank of OpenRLHF's actor: all ranks publish what they hold, rank 0 waits for the engines."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import time
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.logging_utils import init_logger

from sparrowrl.delta.ranks import Ranks, SingleProcess, TorchRanks, together
from sparrowrl.job.metrics import of_sync
from sparrowrl.job.replica import Report
from sparrowrl.job.trainer_rank import Run, Sent, TrainerRank
from sparrowrl.openrlhf_plugin import flags
from sparrowrl.openrlhf_plugin.engines import Engines
from sparrowrl.openrlhf_plugin.weights import ActorWeights

_ENGINES_DTYPE = torch.bfloat16  # as create_vllm_engines has it, whatever the trainer's

logger = init_logger("openrlhf.sparrowrl")

Metrics = dict[str, float]


class SparrowActorPPOTrainer(ActorPPOTrainer):  # type: ignore[misc]
    """One rank's trainer of the actor. When it is made, its weights are version 0 (or go on in the run's journal), and
    all engines are at them; from then on `broadcast_to_vllm` makes the next version.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError, FrameworkUnsupported, and what an engine says that cannot follow."""
        super().__init__(*args, **kwargs)
        self._options = flags.options(self.args)
        self._rank = TrainerRank(self._options)
        self._engines = Engines(self.vllm_engines, self._options)
        self._weights = ActorWeights(self.actor, self.args.ds.zero_stage, self.args.ds.tensor_parallel_size)
        self._has_anchor = False
        self._reports: list[Report] = []  # rank 0's, of the last sync
        self._engines_hosts = self._engines.hosts()  # by all ranks, for that may take longer than any later wait
        self._ranks: Ranks = SingleProcess()
        if dist.get_world_size() > 1:
            # The others wait for rank 0 while it waits for the engines: at most for two calls, and some more.
            self._ranks = TorchRanks(timeout=timedelta(seconds=4 * self._options.timeout + 60))
        run, hosts = json.loads(together(self._ranks, socket.gethostname, self._open))
        self._rank.join_run(run, hosts, self._ranks)
        sent = self._send()
        together(self._ranks, lambda: None, lambda _: self._have_engines_follow(run))
        self._bring_engines_to(sent)
        if dist.get_rank() == 0:
            self._announce(run, sent)

    def _init_vllm_sync_group(self, backend: str) -> None:
        """OpenRLHF's own way to connect rank 0 to the engines; there is no process group here."""

    def broadcast_to_vllm(self) -> Metrics:
        """Make the weights the next version, and return when all engines serve it. Called by all ranks.

        Returns, on rank 0, the metrics of the sync (docs/jobs.md). Raises a SparrowError if the version could not be
        published, or an engine is not at it within `timeout` seconds, or found to be at other weights.
        """
        began = time.monotonic()
        sent = self._send()
        self._bring_engines_to(sent)
        if dist.get_rank() != 0:
            return {}
        return {**sent["metrics"], **of_sync(self._reports, time.monotonic() - began)}

    def leave_run(self) -> None:
        """End the hub, and the journal if it is a temporary one. Nothing is published after that."""
        self._rank.close()

    def _open(self, hosts: list[str]) -> str:
        """Rank 0: begin the run. Returns it and the ranks' hosts, as JSON."""
        elsewhere = self._engines_hosts - {hosts[0]}
        run = self._rank.open_run(hosts, bool(elsewhere), ray.util.get_node_ip_address())
        return json.dumps((run, hosts))

    def _have_engines_follow(self, run: Run) -> None:
        if self.args.vllm.enable_sleep:
            self._engines.wake()  # OpenRLHF has put them to sleep as soon as they were there
        self._engines.follow(run)

    def _send(self) -> Sent:
        sent = self._rank.send(self._weights.shards(), _ENGINES_DTYPE)
        self._has_anchor |= sent["kind"] == "anchor" or bool(sent["metrics"]["sparrow/anchor"])
        return sent

    def _bring_engines_to(self, sent: Sent) -> None:
        """Wait for all engines; an anchor is written if one cannot do without. Called by all ranks."""
        if together(self._ranks, lambda: None, lambda _: self._reach(sent)):
            return
        if dist.get_rank() == 0:
            logger.warning("an engine has other weights than the run's version 0: the trainer writes an anchor for it")
        self._rank.write_anchor()
        self._has_anchor = True
        together(self._ranks, lambda: None, lambda _: self._reach(sent))

    def _reach(self, sent: Sent) -> bool:
        """Rank 0: whether all engines are at the version; the others need an anchor."""
        self._reports = self._engines.reach(sent["version"], sent["state"], self._has_anchor)
        return all(report["condition"] == "exact" for report in self._reports)

    def _announce(self, run: Run, sent: Sent) -> None:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("openrlhf", "vllm", "deepspeed"))
        logger.info(
            f"sparrowrl {importlib.metadata.version('sparrowrl')} syncs {len(self._engines)} engines ({versions}): "
            f"hub at {run['hub']}, journal in {run['journal']}, at version {sent['version']}"
        )
