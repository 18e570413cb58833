"""One artifact from the hub into the node directory: several connections, nothing fetched twice, nothing unchecked."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from sparrowrl.config import Credentials
from sparrowrl.delta import keys, limits
from sparrowrl.delta.manifest import Manifest
from sparrowrl.errors import ConfigError, CorruptData, FormatError, SparrowError, WrongBase
from sparrowrl.transport.choice import Choice
from sparrowrl.transport.node import NextArtifact, NodeDirectory, write_atomically
from sparrowrl.transport.remote import HubClient

_DRAFT_WAIT = 20.0  # seconds that one question for more segments may take


async def fetch_manifest(hub: HubClient, credentials: Credentials, target: int, name: str) -> tuple[Manifest, bytes]:
    """A manifest that this run's key has signed and that belongs where it lies, and its bytes. Raises CorruptData."""
    key = keys.manifest_key(credentials.run, target, name)
    data = await hub.request("GET", key, limit=limits.MANIFEST_BYTES)
    return checked_manifest(data, credentials, target, name), data


def checked_manifest(data: bytes, credentials: Credentials, target: int, name: str) -> Manifest:
    """Decode a manifest, check its MAC, and that it is the one asked for. Raises FormatError."""
    manifest = Manifest.decode(data, credentials.run_key)
    if (manifest.run, manifest.target, manifest.name) != (credentials.run, target, name):
        raise CorruptData(
            f"manifest: expected run {credentials.run} {target}/{name}, got {manifest.run} "
            f"{manifest.target}/{manifest.name}"
        )
    return manifest


async def mirror_layout(node: NodeDirectory, hub: HubClient, run: str, layout: bytes) -> None:
    """Have the layout of this id in the node directory. Raises CorruptData if the hub sends another."""
    path = node.key_path(keys.layout_key(run, layout))
    if path.exists():
        return
    data = await hub.request("GET", keys.layout_key(run, layout), limit=limits.LAYOUT_BYTES)
    if blake3(data).digest() != layout:
        raise CorruptData(f"layout {layout.hex()}: the hub sent {len(data)} bytes with another hash")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


class Fetch:
    """Fetches one artifact. `run` may fail or be cancelled at any time; another Fetch goes on where it was."""

    def __init__(
        self,
        node: NodeDirectory,
        hub: HubClient,
        credentials: Credentials,
        choice: Choice,
        *,
        base_state: str | None,
        connections: int,
        announce: Callable[[Callable[[], NextArtifact]], None],
    ) -> None:
        """`base_state` (hex) is what the engine holds; `announce` is told that what next.json should say changed."""
        self.choice = choice
        self.fetched_bytes = 0
        self.name = keys.artifact_name(choice.kind, choice.base, _CODEC[choice.kind])
        self.key = keys.artifact_key(credentials.run, choice.target, self.name)
        self._node = node
        self._hub = hub
        self._credentials = credentials
        self._base_state = base_state
        self._connections = connections
        self._announce = announce
        self._folder = node.key_path(self.key)
        self._queue: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._listed: dict[str, int] = {}
        self._queued: set[str] = set()
        self._present: set[str] = set()
        self._committed = False
        self._began = time.monotonic()
        self.fetch_ms = 0.0

    async def run(self) -> None:
        """Have the whole artifact, committed. Raises TransportError, FormatError, VersionNotFound if it is gone,
        WrongBase if it does not start from the engine's state, ConfigError if there is no room.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(".*"):
            path.unlink()
        self._present = {path.stem for path in self._folder.glob("*.seg")}
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(self._connections)]
                manifest, data = await self._list()
                await self._queue.join()
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        self._finish(manifest, data)

    async def _work(self) -> None:
        while True:
            digest, length = await self._queue.get()
            key = f"{self.key}/{digest}.seg"
            await self._hub.download(key, self._folder / f"{digest}.seg", bytes.fromhex(digest), length)
            self.fetched_bytes += length
            self._present.add(digest)
            self._announce(self._next)
            self._queue.task_done()

    async def _list(self) -> tuple[Manifest, bytes]:
        """Queue all segments; the manifest, which says that these are all."""
        manifest_path = self._folder / "manifest"
        if self.choice.draft and not manifest_path.exists():
            await self._follow_draft()
        manifest, data = await self._have_manifest(manifest_path)
        if manifest.base_state is not None and self._base_state not in (None, manifest.base_state.hex()):
            raise WrongBase(
                f"{self.key}: starts from state {manifest.base_state.hex()}, the engine holds {self._base_state}"
            )
        await mirror_layout(self._node, self._hub, self._credentials.run, manifest.layout)
        self._listed = {segment.digest.hex(): segment.length for segment in manifest.segments}
        self._check_present()
        self._check_room()
        self._announce(self._next)
        self._queue_missing()
        return manifest, data

    async def _have_manifest(self, path: Path) -> tuple[Manifest, bytes]:
        if path.exists():
            try:
                data = path.read_bytes()
                return checked_manifest(data, self._credentials, self.choice.target, self.name), data
            except FormatError:
                path.unlink()
        return await fetch_manifest(self._hub, self._credentials, self.choice.target, self.name)

    async def _follow_draft(self) -> None:
        """Queue segments as the trainer puts them, until it commits."""
        known, committed = "", False
        while not committed:
            page = await self._hub.draft(self.choice.target, self.name, known, len(self._listed), _DRAFT_WAIT)
            if page.draft != known:
                known, self._listed = page.draft, {}
            for segment in page.segments:
                self._listed[segment.digest] = segment.length
            limits.check_at_most("segments of a draft", len(self._listed), limits.SEGMENTS)
            self._announce(self._next)
            self._queue_missing()
            committed = page.committed

    def _queue_missing(self) -> None:
        for digest, length in self._listed.items():
            if digest not in self._present and digest not in self._queued:
                self._queued.add(digest)
                self._queue.put_nowait((digest, length))

    def _check_present(self) -> None:
        """Have files of another length than the manifest's fetched again."""
        for digest in self._present & self._listed.keys():
            path = self._folder / f"{digest}.seg"
            if path.stat().st_size != self._listed[digest]:
                path.unlink()
                self._present.discard(digest)
                self._queued.discard(digest)

    def _check_room(self) -> None:
        missing = sum(length for digest, length in self._listed.items() if digest not in self._present)
        free = shutil.disk_usage(self._folder).free
        if missing > free:
            raise ConfigError(
                f"{self._node.root}: {missing} bytes to fetch, {free} free; enlarge /dev/shm (docker: --shm-size)"
            )

    def _finish(self, manifest: Manifest, data: bytes) -> None:
        """Every segment is there: drop those of earlier drafts, and commit."""
        for path in self._folder.glob("*.seg"):
            if path.stem not in self._listed:
                path.unlink()
        if not (self._folder / "manifest").exists():
            write_atomically(self._folder / "manifest", data)
        self._committed = True
        self.fetch_ms = 1000 * (time.monotonic() - self._began)
        self._announce(self._next)

    def _next(self) -> NextArtifact:
        here = tuple(digest for digest in self._listed if digest in self._present)
        choice = self.choice
        return NextArtifact(self.key, choice.kind, choice.base, choice.target, here, self._committed, self.fetch_ms)


_CODEC = {"origin": None, "delta": "fast", "anchor": "dense"}


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to tell: one of ours if there is one."""
    leaves: list[BaseException] = []
    rest: list[BaseException] = [failures]
    while rest:
        error = rest.pop(0)
        if isinstance(error, BaseExceptionGroup):
            rest.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, SparrowError)), leaves[0])
