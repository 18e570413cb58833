"""Speaking to a hub from an event loop: what agents and tools use, and what is promised about bytes and time."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from blake3 import blake3

from sparrowrl.config import Credentials
from sparrowrl.delta import keys, limits
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    LimitExceeded,
    TransportError,
)
from sparrowrl.transport.choice import Feed
from sparrowrl.transport.http import (
    LONGEST_WAIT,
    SMALL_BODY,
    error_of,
    is_address,
)
from sparrowrl.transport.records import from_json, parse_json

_CHUNK = 1 << 18  # bytes of read buffer


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
        if not is_address(url):
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
        except aiohttp.ClientConnectorError as error:
            raise TransportError(
                f"{what}: cannot connect ({error.os_error}); is `sparrowrl hub` running there?"
            ) from error
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
            check_segment(segment)
        return page

    async def download(self, key: str, path: Path, digest: bytes, length: int) -> None:
        """Fetch a segment to `path`: streamed to a temporary file, hashed on the way, renamed when all is right."""
        temporary = path.with_name(f".{path.name}")
        hasher, received = blake3(), 0
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                async with self._open("GET", key) as response:
                    _check_announced(response, length, key)
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


def check_segment(segment: DraftSegment) -> None:
    """Raise CorruptData if this can be neither name nor length of a segment."""
    if not re.fullmatch(keys.HASH, segment.digest, re.ASCII) or not 0 < segment.length <= limits.SEGMENT_BYTES:
        raise CorruptData(
            f"draft: expected hashes in hex and lengths of 1 to {limits.SEGMENT_BYTES}, got {segment.digest[:80]!r} "
            f"and {segment.length}"
        )


def _check_announced(response: aiohttp.ClientResponse, limit: int, what: str) -> None:
    if (response.content_length or 0) > limit:
        raise LimitExceeded(f"{what}: expected at most {limit} bytes, the hub announces {response.content_length}")


async def _body(response: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    _check_announced(response, limit, what)
    pieces, received = [], 0
    async for piece in response.content.iter_any():
        received += len(piece)
        if received > limit:
            raise LimitExceeded(f"{what}: expected at most {limit} bytes, the hub sends more")
        pieces.append(piece)
    return b"".join(pieces)
