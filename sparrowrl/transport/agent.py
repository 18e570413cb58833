"""The agent of one engine: brings what the engine needs next into its node directory (docs/protocol.md section 3)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sparrowrl.config import Credentials
from sparrowrl.delta import keys
from sparrowrl.errors import ConfigError, CorruptData, FingerprintMismatch, SparrowError, VersionNotFound, WrongBase
from sparrowrl.transport.choice import Choice, EngineView, Feed, choose
from sparrowrl.transport.fetch import Fetch, fetch_manifest, mirror_layout
from sparrowrl.transport.leaving import call_when_told
from sparrowrl.transport.node import (
    AgentStatus,
    EngineStatus,
    ErrorInfo,
    NextArtifact,
    NodeDirectory,
    RankStatus,
    write_atomically,
)
from sparrowrl.transport.records import to_json
from sparrowrl.transport.remote import Deadlines, HubClient

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
_FEED_WAIT = 25.0
_STATUS_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_NEXT_SECONDS = 0.005


class Announcer:
    """Writes next.json soon after each change, but seldom enough that it costs little."""

    def __init__(self, node: NodeDirectory) -> None:
        self._node = node
        self._source: Callable[[], NextArtifact | None] = _nothing
        self._timer: asyncio.TimerHandle | None = None
        self._pause = _NEXT_SECONDS

    def show(self, source: Callable[[], NextArtifact | None]) -> None:
        """What `source` returns when it comes to writing is what next.json should say from now on."""
        self._source = source
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self.flush)

    def flush(self) -> None:
        """Write now what was to be written."""
        if self._timer is None:
            return
        self._timer.cancel()
        begin = time.monotonic()
        try:
            self._node.next.write(self._source())
        except OSError as error:  # no room, or the directory is gone: nothing else would say it again
            log.warning("next.json: %s", error)
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_PAUSE, self.flush)
            return
        self._timer = None
        self._pause = max(_NEXT_SECONDS, 20 * (time.monotonic() - begin))


class Agent:
    """Follows one run on one hub for one engine, until `stop` is called."""

    def __init__(
        self,
        node: NodeDirectory,
        url: str,
        credentials: Credentials,
        engine_id: str,
        *,
        connections: int = 4,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Raises ConfigError if `connections` is not at least 1."""
        if connections < 1:
            raise ConfigError(f"connections: expected at least 1, got {connections}")
        self._node = node
        self._url = url
        self._credentials = credentials
        self._engine_id = engine_id
        self._connections = connections
        self._deadlines = deadlines
        self._announcer = Announcer(node)
        self._status = AgentStatus(os.getpid(), url)
        self._feed: Feed | None = None
        self._feed_error: ErrorInfo | None = None
        self._work_error: ErrorInfo | None = None
        self._ranks: dict[int, RankStatus] = {}
        self._engine: EngineStatus | None = None
        self._fetch: Fetch | None = None
        self._task: asyncio.Task[None] | None = None
        self._complete = False
        self._bytes_before = 0
        self._distrusted: tuple[int, str | None] | None = None
        self._next_try = 0.0
        self._pause = _FIRST_PAUSE
        self._wake = asyncio.Event()
        self._post = asyncio.Event()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stop.set()

    async def run(self) -> None:
        """Work until `stop`, or until the node directory is gone. Raises ConfigError if another agent serves it."""
        lock = _lock(self._node)
        try:
            async with HubClient(
                self._url, self._credentials, connections=self._connections, deadlines=self._deadlines
            ) as hub:
                self._look()
                loops = (self._follow_feed(hub), self._watch_engine(), self._work(hub), self._post_status(hub))
                tasks = [asyncio.create_task(loop) for loop in (*loops, self._report(), self._stop.wait())]
                try:
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _end([*tasks, *([self._task] if self._task is not None else [])])
                for task in done:
                    task.result()
        finally:
            os.close(lock)

    # What the hub has

    async def _follow_feed(self, hub: HubClient) -> None:
        pause = _FIRST_PAUSE
        while True:
            after = None if self._feed is None or self._feed_error else self._feed.cursor
            began = time.monotonic()
            try:
                feed = await hub.feed(after, self._engine_id, _FEED_WAIT)
            except SparrowError as error:
                self._feed_error = self._noted(self._feed_error, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            if self._feed_error is not None:
                log.warning("hub %s answers again", self._url)
                self._post.set()
            self._feed_error, pause = None, _FIRST_PAUSE
            self._feed = feed
            self._wake.set()
            if feed.cursor == after and time.monotonic() - began < 1.0:  # a hub that is about to go
                await asyncio.sleep(0.2)

    # What the engine has

    async def _watch_engine(self) -> None:
        while self._look():
            await asyncio.sleep(_LOOK_SECONDS)
        log.warning("node directory %s is gone", self._node.root)

    def _look(self) -> bool:
        """Read the statuses of ranks and engine; False if the node directory is gone."""
        try:
            ranks, engine = self._node.ranks(), self._node.engine.read()
        except FileNotFoundError:
            return False
        except CorruptData as error:
            self._work_error = self._noted(self._work_error, error)
            return True
        if engine != self._engine:
            self._post.set()
        if (ranks, engine) != (self._ranks, self._engine):
            self._ranks, self._engine = ranks, engine
            self._wake.set()
        return True

    def _view(self) -> EngineView | None:
        view = EngineView.of(self._ranks.values())
        if view is not None and (view.version, view.state) == self._distrusted:
            return replace(view, trusted=False)
        return view

    async def _post_status(self, hub: HubClient) -> None:
        pause = _FIRST_PAUSE
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_SECONDS):
                    await self._post.wait()
            self._post.clear()
            if self._engine is None:
                continue
            try:
                await hub.send_status(self._engine_id, to_json(self._engine))
                pause = _FIRST_PAUSE
            except SparrowError as error:
                log.info("could not post the engine's status: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                self._post.set()

    # What to do about it

    async def _work(self, hub: HubClient) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._feed is None:
                continue
            try:
                await self._mirror(hub, self._feed)
                await self._step(hub, self._feed)
                self._show_request()
                self._announcer.flush()
            except (SparrowError, OSError) as error:
                self._work_error = self._noted(self._work_error, error)
                self._try_again()
            await self._collect()

    async def _mirror(self, hub: HubClient, feed: Feed) -> None:
        """Have layout and origin, which the engine needs at its start."""
        run = self._credentials.run
        path = self._node.key_path(keys.manifest_key(run, 0, "origin"))
        if feed.newest is None or path.exists():
            return
        manifest, data = await fetch_manifest(hub, self._credentials, 0, "origin")
        await mirror_layout(self._node, hub, run, manifest.layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)

    async def _step(self, hub: HubClient, feed: Feed) -> None:
        """Begin, keep or give up a fetch, whatever hub and engine make right now."""
        view = self._view()
        if view is not None and self._refused():
            self._distrusted = (view.version, view.state)
            view = self._view()
        if self._fetch is not None and not _applies(self._fetch, view, feed):
            await self._give_up()
        if self._task is not None and self._task.done():
            await self._finished(self._task)
        if view is None:
            await self._give_up()
        elif self._task is None and not self._complete and time.monotonic() >= self._next_try:
            choice = choose(view, feed)
            if choice is None:
                await self._give_up()
                self._work_error = None
            else:
                self._begin(hub, choice, view)

    def _refused(self) -> bool:
        """Whether a worker finds that a delta, all of it, does not lead from what it holds to where it should."""
        if not self._complete or self._fetch is None or self._fetch.choice.kind != "delta":
            return False
        errors = [rank.error for rank in self._ranks.values() if rank.error is not None]
        return any(error.error == FingerprintMismatch.__name__ for error in errors)

    def _begin(self, hub: HubClient, choice: Choice, view: EngineView) -> None:
        self._bytes_before += self._fetch.fetched_bytes if self._fetch is not None else 0
        self._fetch = Fetch(
            self._node, hub, self._credentials, choice,
            base_state=view.state, connections=self._connections, announce=self._announcer.show,
        )  # fmt: skip
        self._task = asyncio.create_task(self._fetch.run())
        self._task.add_done_callback(lambda task: self._wake.set())

    async def _give_up(self) -> None:
        """The engine has this artifact, or needs another, or it is gone: take it back."""
        if self._task is not None:
            await _end([self._task])
        self._bytes_before += self._fetch.fetched_bytes if self._fetch is not None else 0
        self._fetch, self._task, self._complete = None, None, False
        self._announcer.show(_nothing)

    async def _finished(self, task: asyncio.Task[None]) -> None:
        """The fetch has ended: keep the artifact, or raise what went wrong. What was announced is there in any case."""
        self._task = None
        error = task.exception()
        if error is None:
            self._complete = True
            self._status = replace(self._status, fetch_ms=self._fetch.fetch_ms if self._fetch is not None else 0.0)
            self._work_error, self._pause = None, _FIRST_PAUSE
            return
        if isinstance(error, WrongBase):
            view = self._view()
            self._distrusted = (view.version, view.state) if view is not None else None
        was_draft = self._fetch is not None and self._fetch.choice.draft
        if isinstance(error, WrongBase | VersionNotFound):
            await self._give_up()
        if was_draft and isinstance(error, VersionNotFound):  # the trainer dropped it: nothing wrong with that
            self._try_again()
            return
        raise error

    def _try_again(self) -> None:
        self._next_try = time.monotonic() + self._pause
        asyncio.get_running_loop().call_later(self._pause + 0.001, self._wake.set)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _show_request(self) -> None:
        answered = {answer.id for answer in self._engine.answers} if self._engine is not None else set()
        waiting = [asked for asked in (self._feed.requests if self._feed else ()) if asked.id not in answered]
        oldest = min(waiting, key=lambda asked: asked.id, default=None)
        if oldest != self._node.request.read():
            self._node.request.write(oldest)

    async def _collect(self) -> None:
        """Delete artifacts that no rank can need: all but the one at hand and what starts where the engine is."""
        view = self._view()
        versions = self._node.root / "runs" / self._credentials.run / "v"
        for folder in versions.glob("*/*"):
            kind, base, _ = keys.parse_artifact_name(folder.name)
            at_hand = self._fetch is not None and folder == self._node.key_path(self._fetch.key)
            startable = view is not None and base == view.version and view.trusted
            if kind != "origin" and not at_hand and not startable:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                with suppress(OSError):
                    folder.parent.rmdir()

    # What to say about it

    def _noted(self, before: ErrorInfo | None, error: SparrowError | OSError) -> ErrorInfo:
        if isinstance(error, OSError):
            error = ConfigError(f"node directory {self._node.root}: {error}")
        info = ErrorInfo.of(error)
        if info != before:
            log.warning("%s: %s", info.error, info.message)
        return info

    async def _report(self) -> None:
        """Keep agent.json up to date."""
        written: AgentStatus | None = None
        while True:
            fetched = self._fetch.fetched_bytes if self._fetch is not None else 0
            self._status = replace(
                self._status,
                connected=self._feed is not None and self._feed_error is None,
                newest=self._feed.newest if self._feed is not None else None,
                fetched_bytes=self._bytes_before + fetched,
                error=self._feed_error or self._work_error,
            )
            if self._status != written:
                with suppress(OSError):  # the directory is gone, or full: the next try is soon
                    self._node.agent.write(self._status)
                    written = self._status
            await asyncio.sleep(_LOOK_SECONDS)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they end: a cancellation that meets a timeout comes out as the timeout, and is lost."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)


def _nothing() -> None:
    """What next.json says if there is nothing to do."""


def _applies(fetch: Fetch, view: EngineView | None, feed: Feed) -> bool:
    """Whether the engine can still use the artifact."""
    choice = fetch.choice
    if view is None:
        return False
    if choice.kind == "anchor":
        return not view.trusted or view.version < choice.target
    abandoned = choice.draft and (feed.newest or 0) >= choice.target and f"{choice.target}/{fetch.name}" in feed.drafts
    return view.trusted and view.version == choice.base and not abandoned


def _lock(node: NodeDirectory) -> int:
    """Be the only agent of this node directory; the lock ends with the process."""
    descriptor = os.open(node.root / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"node directory {node.root}: another agent serves it already") from error
    return descriptor


def run_agent(node: NodeDirectory, url: str, credentials: Credentials, engine_id: str, *, connections: int) -> None:
    """An agent process: runs until SIGTERM, SIGINT or the end of standard input. Raises ConfigError."""
    asyncio.run(_run_agent(node, url, credentials, engine_id, connections))


async def _run_agent(node: NodeDirectory, url: str, credentials: Credentials, engine_id: str, connections: int) -> None:
    agent = Agent(node, url, credentials, engine_id, connections=connections)
    call_when_told(agent.stop, or_input_ends=True)
    await agent.run()
