"""A trainer's way to a hub: `HubSink`, the sink of delta/sink.py over HTTP."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3

from sparrowrl.config import Credentials
from sparrowrl.delta import keys, limits
from sparrowrl.delta.layout import Layout, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef
from sparrowrl.delta.sink import Head
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    JournalLocked,
    SparrowError,
    TransportError,
    VersionNotFound,
)
from sparrowrl.transport.http import LEASE_SECONDS, WRITER_HEADER, worth_retrying
from sparrowrl.transport.records import from_json, parse_json
from sparrowrl.transport.remote import Deadlines, HubClient

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_TELL_SECONDS = 2.0  # of trying in vain before it is said

log = logging.getLogger(__name__)

T = TypeVar("T")


class HubSink:
    """A sink (delta/sink.py) that uploads to a hub. For threads without an event loop: its own runs in the background.

    What can be repeated is repeated while the hub is away, for at most `patience` seconds; then DeadlineExceeded. A
    trainer that starts right after another was killed waits up to `lease_patience` seconds for that one's lease to
    end. All methods may also raise Unauthorized, RemoteRefused, JournalLocked (another trainer writes) and
    VersionConflict.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        *,
        connections: int = 4,
        patience: float = 60.0,
        lease_patience: float = LEASE_SECONDS + 5.0,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Connects when first used. Raises ConfigError on a bad address or if the writer token is missing."""
        if credentials.writer is None:
            raise ConfigError("publishing to a hub needs the trainer's credentials file: this one has no writer token")
        self._credentials = credentials
        self._patience = patience
        self._lease_patience = lease_patience
        self.connections = connections
        self._writer: str | None = None
        self._uploads: deque[Future[bytes]] = deque()
        self._heartbeat: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparrowrl-hub-sink", daemon=True)
        self._thread.start()
        try:
            self._client = self.wait(_connect(url, credentials, connections, deadlines))
        except BaseException:
            self._stop()
            raise

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._credentials.run

    @property
    def run_key(self) -> bytes:
        """The key that signs manifests."""
        return self._credentials.run_key

    def lead(self) -> str:
        """Take the run's lease on the hub and keep it until `close`, or this process's end. Raises JournalLocked."""
        if self._writer is None:
            self._writer = secrets.token_hex(16)
            try:
                self.wait(self._take_lease(self._lease_patience))
            except BaseException:
                self._writer = None
                raise
            self._heartbeat = asyncio.run_coroutine_threadsafe(self._beat(), self._loop)
        else:
            self.wait(self._take_lease(0.0))
        return self._writer

    def join(self, token: str) -> None:
        """Write beside the rank that leads with this token. Raises JournalLocked if it does not lead."""
        self._writer = token
        self.wait(self._take_lease(0.0))

    def newest(self) -> Head | None:
        """The newest version; None for an empty run. Raises CorruptData if what the hub says does not add up."""
        return self.wait(self._newest())

    def has(self, target: int, name: str) -> bool:
        """Whether artifact `name` of version `target` is committed."""
        try:
            self.wait(self.send("GET", keys.manifest_key(self.run, target, name), limit=limits.MANIFEST_BYTES))
        except VersionNotFound:
            return False
        return True

    def put_layout(self, data: bytes) -> None:
        """Store the bytes of a layout."""
        key = keys.layout_key(self.run, blake3(data).digest())
        self.wait(self.send("PUT", key, data=data))

    def open(self, target: int, name: str) -> HubDraft:
        """The draft of artifact `name` of version `target`; the hub learns of it with the first segment."""
        return HubDraft(self, keys.artifact_key(self.run, target, name), self._uploads)

    def close(self) -> None:
        """Give the lease back if this rank led, and stop the background thread. Doing it twice is fine."""
        if not self._thread.is_alive():
            return
        try:
            if self._heartbeat is not None:
                self._heartbeat.cancel()
                with suppress(SparrowError):  # the lease ends by itself
                    self.wait(self.send("DELETE", f"runs/{self.run}/writer", patience=0.0))
            self.wait(self._client.__aexit__(None, None, None))
        finally:
            self._stop()

    def __enter__(self) -> HubSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background loop and wait for its end."""
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the background loop. Raises ConfigError if that has ended."""
        if not self._thread.is_alive():
            coroutine.close()
            raise ConfigError("this HubSink was closed, or made before this process was forked: make a new one here")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def send(self, method: str, path: str, *, patience: float | None = None, **options: Any) -> bytes:
        """One request, repeated while the hub cannot be reached or is busy; all our requests can be repeated."""
        patience = self._patience if patience is None else patience
        began = time.monotonic()
        deadline, told = began + patience, False
        headers = {} if self._writer is None else {WRITER_HEADER: self._writer}
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._client.request(method, path, headers=headers, **options)
            except TransportError as error:
                if not worth_retrying(error):
                    raise
                if time.monotonic() + pause > deadline:
                    raise DeadlineExceeded(f"tried for {patience:.0f} s; at last: {error}") from error
                if not told and time.monotonic() > began + _TELL_SECONDS:
                    told = True
                    log.warning("still trying, for %.0f s in all: %s", patience, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _take_lease(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                await self.send("POST", f"runs/{self.run}/writer")
                return
            except JournalLocked:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.5)

    async def _beat(self) -> None:
        """Renew the lease. A failure needs no report: the next upload meets the same one."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            with suppress(SparrowError):
                await self.send("POST", f"runs/{self.run}/writer", patience=0.0)

    async def _newest(self) -> Head | None:
        body = await self.send("GET", f"runs/{self.run}/head", limit=limits.MANIFEST_BYTES)
        raw = parse_json(body, "head")
        if raw == {}:
            return None
        said = from_json(_HeadAnswer, raw, "head")
        key = keys.manifest_key(self.run, said.version, said.name)
        manifest = Manifest.decode(await self.send("GET", key, limit=limits.MANIFEST_BYTES), self.run_key)
        if (manifest.run, manifest.target, manifest.name) != (self.run, said.version, said.name):
            raise CorruptData(f"{key}: the hub sent the manifest of {manifest.run} {manifest.target}/{manifest.name}")
        key = keys.layout_key(self.run, manifest.layout)
        layout = Layout.from_bytes(await self.send("GET", key, limit=limits.LAYOUT_BYTES))
        if layout.id != manifest.layout or state_id(layout, said.fingerprints) != manifest.target_state:
            raise CorruptData(f"head: layout or fingerprints of version {said.version} do not give its state id")
        return Head(said.version, manifest.target_state, manifest.layout, said.fingerprints)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HubDraft:
    """An artifact on its way to a hub; made by HubSink.open. Several uploads are in flight while the caller goes on."""

    def __init__(self, sink: HubSink, key: str, uploads: deque[Future[bytes]]) -> None:
        """`uploads` are all that this rank's sink has on the way, whichever HubDraft began them."""
        self._sink = sink
        self._key = key
        self._uploads = uploads

    def put(self, data: bytes) -> SegmentRef:
        """Send a segment; it is durable after `flush`. Waits while `connections` others are on their way.

        Raises what one of the earlier uploads failed with.
        """
        while len(self._uploads) >= self._sink.connections:
            self._wait_for_oldest()
        digest = blake3(data).digest()
        upload = self._sink.send("PUT", f"{self._key}/{digest.hex()}.seg", data=data)
        self._uploads.append(self._sink.submit(upload))
        return SegmentRef(digest, len(data))

    def flush(self) -> None:
        """Wait until every segment put so far is durable. Raises what an upload failed with; the others end then."""
        while self._uploads:
            self._wait_for_oldest()

    def commit(self, manifest: Manifest) -> None:
        """Make the artifact exist; doing it again changes nothing. Raises VersionConflict unless it is the next."""
        self.flush()
        data = manifest.encode(self._sink.run_key)
        self._sink.wait(self._sink.send("PUT", f"{self._key}/manifest", data=data))

    def drop(self) -> None:
        """Stop this rank's uploads and delete the draft with the segments of all ranks."""
        self._cancel()
        self._sink.wait(self._sink.send("DELETE", self._key))

    def _wait_for_oldest(self) -> None:
        try:
            self._uploads.popleft().result()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        while self._uploads:
            self._uploads.popleft().cancel()


@dataclass(frozen=True, slots=True)
class _HeadAnswer:
    version: int
    name: str
    fingerprints: tuple[int, ...]


async def _connect(url: str, credentials: Credentials, connections: int, deadlines: Deadlines | None) -> HubClient:
    return HubClient(url, credentials, connections=connections, deadlines=deadlines)
