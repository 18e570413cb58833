"""One sync, from the driver's side: the trainer publishes, and every replica is waited for while it goes on generating.

verl's own manager aborts all requests, frees the KV caches, transfers, and resumes. Here nothing is aborted: an engine
fetches and stages while it generates, and switches between two of its steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from sparrowrl.errors import DeadlineExceeded
from sparrowrl.job.metrics import of_sync
from sparrowrl.job.ray_errors import ours
from sparrowrl.job.replica import Report
from sparrowrl.job.trainer_rank import Run, Sent, follow_settings
from sparrowrl.verl_plugin import hooks, support

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class SparrowManager(CheckpointEngineManager):  # type: ignore[misc]
    """verl's checkpoint-engine manager for the backend "sparrow"; verl makes it by itself (hooks.py).

    `report` is called with the metrics of each sync, for a trainer that drops what `update_weights` returns.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        """Raises FrameworkUnsupported, and ConfigError for a wrong option; starts nothing yet."""
        hooks.check_usable()
        super().__init__(config, actor_wg, replicas)
        self.report: Callable[[Metrics], None] | None = None
        self._options = support.options(config.engine_kwargs.get(hooks.BACKEND) or {})
        self._run: Run | None = None
        self._has_anchor = False
        self._followers: set[Any] = set()  # servers whose engines follow the run
        self._newest: tuple[int, str, int | None] | None = None  # version, state, and verl's global_steps

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> Metrics:
        """Make the trainer's weights the next version, and return when every replica serves it.

        Raises a SparrowError if the version could not be published (nothing is lost, the next call repairs it) or a
        replica did not get there within `timeout` seconds.
        """
        began = time.monotonic()
        if self._run is None:
            self._run = await self._open()
        published = await self._publish(global_steps)
        self._newest = (published["version"], published["state"], global_steps)
        reports = await self._reach(self.replicas, *self._newest)
        metrics = {**published["metrics"], **of_sync(reports, time.monotonic() - began)}
        if self.report is not None:
            self.report(metrics)
        return metrics

    @auto_await  # type: ignore[untyped-decorator]
    async def add_replicas(self, replicas: list[Any]) -> None:
        """Take on more replicas; when this returns they serve the newest version. Raises a SparrowError."""
        super().add_replicas(replicas)
        if self._newest is not None:
            await self._reach(replicas, *self._newest)

    async def _open(self) -> Run:
        """Have rank 0 of the trainer begin the run, and the others join it."""
        hosts = [answer["host"] for answer in await self._trainer("prepare")]
        servers = [replica.servers[0] for replica in self.replicas]
        elsewhere = set(await self._all("the servers' names", (s.sparrow_host.remote() for s in servers))) - {hosts[0]}
        run: Run = (await self._trainer("open_run", hosts, bool(elsewhere)))[0]
        await self._trainer("join_run", run, hosts)
        return run

    async def _publish(self, global_steps: int | None) -> Sent:
        refs = self.actor_wg.update_weights(global_steps=global_steps, mode=hooks.BACKEND)
        results = await self._all("the trainer to publish", refs)
        published: Sent = next(result for result in results if result)
        self._has_anchor |= published["kind"] == "anchor" or bool(published["metrics"].get("sparrow/anchor"))
        return published

    async def _reach(self, replicas: list[Any], version: int, state: str, global_steps: int | None) -> list[Report]:
        """Have replicas follow, and wait until they have the version; an anchor is written if one cannot do without."""
        servers = [replica.servers[0] for replica in replicas]
        await self._all("new replicas to follow", (self._follow(server) for server in servers))

        def wait(has_anchor: bool) -> Iterable[Awaitable[Report]]:
            arguments = (version, state, global_steps, self._options.timeout, has_anchor)
            return [server.sparrow_reach.remote(*arguments) for server in servers]

        reports: list[Report] = await self._all(f"replicas at version {version}", wait(self._has_anchor))
        if any(report["condition"] == "unknown" for report in reports):
            logger.warning(
                "a replica holds weights of its own (load_format=dummy?): the trainer writes an anchor for it"
            )
            await self._trainer("write_anchor")
            self._has_anchor = True
            reports = await self._all(f"replicas at version {version}", wait(True))
        return reports

    async def _follow(self, server: Any) -> None:
        if server in self._followers:
            return
        assert self._run is not None
        await server.sparrow_follow.remote(follow_settings(self._run, self._options))
        self._followers.add(server)

    async def _trainer(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the checkpoint engine on all trainer ranks."""
        ranks = self.actor_wg.world_size
        per_rank = [[argument] * ranks for argument in arguments]
        refs = self.actor_wg.execute_checkpoint_engine([method] * ranks, *per_rank)
        return await self._all(f"the trainer's {method}", refs)

    async def _all(self, what: str, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """All results, in order, within the deadline; the first failure as the SparrowError that it is."""
        seconds = 2 * self._options.timeout  # the other side has deadlines of its own, and says more
        try:
            return list(await asyncio.wait_for(asyncio.gather(*map(_plain, calls)), seconds))
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {seconds} s for {what}: no answer; is a process of the job stuck?"
            ) from None


async def _plain(call: Awaitable[Any]) -> Any:
    """The result of a Ray call, or the error that its method raised, without Ray's wrapping."""
    try:
        return await call
    except ray.exceptions.RayError as error:
        if (own := ours(error, "a trainer rank or an engine")) is not None:
            raise own from error
        raise
