"""Speaking to a hub: `HubClient` (asyncio, for agents and tools) and `HubSink` (for a trainer's ranks)."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
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
    LimitExceeded,
    SparrowError,
    TransportError,
)
from sparrowrl.transport.choice import Feed
from sparrowrl.transport.http import (
    LEASE_SECONDS,
    LONGEST_WAIT,
    SMALL_BODY,
    WRITER_HEADER,
    error_of,
    worth_retrying,
)
from sparrowrl.transport.records import from_json, parse_json

_CHUNK = 1 << 18  # bytes of read buffer
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: to connect, between two pieces of an answer, and for one whole request (beyond what it asks to wait)."""

    connect: float = 5.0
    silence: float = 15.0
    request: float = 120.0


@dataclass(frozen=True, slots=True)
class DraftSegment:
    """A segment of a draft, by the hub's word only."""

    digest: str
    length: int


@dataclass(frozen=True, slots=True)
class DraftPage:
    """Segments of a draft from some place on. `draft` changes when the trainer begins the draft anew."""

    draft: str
    segments: tuple[DraftSegment, ...]
    committed: bool


class HubClient:
    """One run on one hub. Every method has a deadline and raises errors of the TransportError branch, or CorruptData
    and LimitExceeded when the hub sends what it should not; what it returns or renames has been checked.
    """

    def __init__(
        self, url: str, credentials: Credentials, *, connections: int = 4, deadlines: Deadlines | None = None
    ) -> None:
        """`url` is http(s)://host[:port][/prefix]. Raises ConfigError. Make it inside a running event loop."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"hub address: expected http://host:port or https://host, got {url!r}")
        self.url = url.rstrip("/")
        self.run = credentials.run
        self._token = credentials.writer or credentials.reader
        self._deadlines = deadlines or Deadlines()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections + 3, keepalive_timeout=30),
            auto_decompress=False,
            read_bufsize=_CHUNK,
            headers={"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> HubClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, *, wait: float = 0.0, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limit = self._deadlines
        timeout = aiohttp.ClientTimeout(
            total=limit.request + wait, sock_connect=limit.connect, sock_read=limit.silence + wait
        )
        what = f"{method} {self.url}/{path}"
        try:
            async with self._session.request(
                method, f"{self.url}/{path}", timeout=timeout, allow_redirects=False, **options
            ) as response:
                if response.status != 200:
                    raise error_of(response.status, await _body(response, SMALL_BODY, what), what)
                yield response
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what}: no answer in time; is the hub alive and the network up?") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(f"{what}: {type(error).__name__}: {error}") from error

    async def request(self, method: str, path: str, *, limit: int = SMALL_BODY, **options: Any) -> bytes:
        """One request under the hub's address; the body of its answer, of at most `limit` bytes."""
        async with self._open(method, path, **options) as response:
            return await _body(response, limit, path)

    async def feed(self, after: int | None, engine: str, wait: float = LONGEST_WAIT) -> Feed:
        """What the hub has, as soon as its cursor differs from `after`, or after `wait` seconds."""
        query = {"engine": engine, "wait": str(wait), **({} if after is None else {"after": str(after)})}
        body = await self.request("GET", f"runs/{self.run}/feed", params=query, wait=wait)
        return from_json(Feed, parse_json(body, "feed"), "feed")

    async def draft(self, target: int, name: str, known: str, start: int, wait: float) -> DraftPage:
        """Segments of a draft from `start` on, if the hub's draft is still `known`, else from 0 on.

        Raises VersionNotFound if there is no such draft.
        """
        path = f"{keys.artifact_key(self.run, target, name)}/segments"
        query = {"draft": known, "from": str(start), "wait": str(wait)}
        body = await self.request("GET", path, params=query, wait=wait, limit=limits.MANIFEST_BYTES)
        page = from_json(DraftPage, parse_json(body, "draft"), "draft")
        for segment in page.segments:
            checked_segment(segment)
        return page

    async def download(self, key: str, path: Path, digest: bytes, length: int) -> None:
        """Fetch a segment to `path`: streamed to a temporary file, hashed on the way, renamed when all is right."""
        temporary = path.with_name(f".{path.name}")
        hasher, received = blake3(), 0
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                async with self._open("GET", key) as response:
                    async for chunk in response.content.iter_any():
                        received += len(chunk)
                        if received > length:
                            raise LimitExceeded(f"{key}: expected {length} bytes, the hub sends more")
                        hasher.update(chunk)
                        file.write(chunk)
            if received != length or hasher.digest() != digest:
                raise CorruptData(f"{key}: expected {length} bytes of that hash, got {received} bytes of another")
            os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()

    async def send_status(self, engine: str, body: bytes) -> None:
        """Post an engine's status."""
        await self.request("POST", f"runs/{self.run}/engines/{engine}", data=body)

    async def engines(self) -> Mapping[str, Any]:
        """The last status of every engine, as JSON objects with `age_s` added."""
        body = await self.request("GET", f"runs/{self.run}/engines", limit=limits.MANIFEST_BYTES)
        engines = parse_json(body, "engines").get("engines")
        if not isinstance(engines, dict):
            raise CorruptData(f"engines: expected an object, got {body[:80]!r}")
        return engines

    async def ask(self, engine: str, kind: str) -> int:
        """Queue a request ("audit" or "export") for an engine; its id."""
        body = await self.request("POST", f"runs/{self.run}/engines/{engine}/requests", json={"kind": kind})
        return int(parse_json(body, "request")["id"])


def checked_segment(segment: DraftSegment) -> bytes:
    """The digest of an announced segment. Raises CorruptData if its name or length cannot be right."""
    if not 0 < segment.length <= limits.SEGMENT_BYTES or len(segment.digest) != 64:
        raise CorruptData(f"draft: expected segments of 1 to {limits.SEGMENT_BYTES} bytes, got {segment}")
    try:
        return bytes.fromhex(segment.digest)
    except ValueError as error:
        raise CorruptData(f"draft: expected a hash in hex, got {segment.digest!r}") from error


async def _body(response: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    if (response.content_length or 0) > limit:
        raise LimitExceeded(f"{what}: expected at most {limit} bytes, the hub announces {response.content_length}")
    pieces, received = [], 0
    async for piece in response.content.iter_any():
        received += len(piece)
        if received > limit:
            raise LimitExceeded(f"{what}: expected at most {limit} bytes, the hub sends more")
        pieces.append(piece)
    return b"".join(pieces)


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

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background loop and wait for its end."""
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the background loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def send(self, method: str, path: str, *, patience: float | None = None, **options: Any) -> bytes:
        """One request, repeated while the hub cannot be reached or is busy; all our requests can be repeated."""
        patience = self._patience if patience is None else patience
        deadline = time.monotonic() + patience
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
