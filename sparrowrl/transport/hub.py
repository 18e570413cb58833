"""The hub: serves a journal directory over HTTP and takes uploads into it (docs/protocol.md section 2)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from blake3 import blake3

from sparrowrl.config import RUN_NAME, Credentials
from sparrowrl.delta import files, limits
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.keys import ARTIFACT_NAME, HASH, NUMBER, parse_artifact_name
from sparrowrl.delta.manifest import Manifest, SegmentRef
from sparrowrl.delta.retention import Retention
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    FormatError,
    LimitExceeded,
    SparrowError,
    TransportError,
    VersionNotFound,
)
from sparrowrl.transport.board import LOOK_SECONDS, Board
from sparrowrl.transport.desk import Desk
from sparrowrl.transport.http import (
    LONGEST_WAIT,
    SMALL_BODY,
    WRITER_HEADER,
    check_address,
    check_token,
    error_body,
    status_of,
)
from sparrowrl.transport.leaving import call_when_told
from sparrowrl.transport.node import EngineStatus
from sparrowrl.transport.records import from_json, parse_json

log = logging.getLogger(__name__)

_BODY_SECONDS = 60.0
_MERGE_SECONDS = 10.0
_UPLOADS_AT_ONCE = 16  # times 16 MiB: what uploads may hold in memory
_MERGED = re.compile(rf"v/({NUMBER})/({NUMBER})\.fast/manifest", re.ASCII)
_PUT = re.compile(rf"v/({NUMBER})/({ARTIFACT_NAME})/(?:(manifest)|({HASH})\.seg)", re.ASCII)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Hub:
    """The routes over one journal. `app` is an aiohttp application; everything but engines' statuses is on disk."""

    def __init__(self, journal: Journal, credentials: Credentials) -> None:
        """Raises ConfigError if the credentials lack the writer token. Make it inside a running event loop."""
        if not credentials.writer or not credentials.reader:
            raise ConfigError("the hub needs the trainer's credentials file: this one lacks a token")
        self.journal = journal
        self.board = Board(journal)
        self.desk = Desk(journal)
        self._credentials = credentials
        self._uploads = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        self._merging = asyncio.Semaphore(1)
        self._merges: dict[tuple[int, int], asyncio.Task[ArtifactRef]] = {}
        self.app = web.Application(middlewares=[self._guard])
        self.app.cleanup_ctx.append(self._background)
        run = f"/runs/{credentials.run}"
        artifact = run + "/v/{target}/{name}"
        self.app.add_routes(
            [
                web.get("/health", _health),
                web.get(f"{run}/feed", self._feed),
                web.get(f"{run}/head", self._head),
                web.get(f"{run}/engines", self._engines),
                web.post(f"{run}/engines/{{engine}}", self._heard),
                web.post(f"{run}/engines/{{engine}}/requests", self._ask),
                web.get(f"{artifact}/segments", self._draft),
                web.post(f"{run}/writer", self._lead),
                web.delete(f"{run}/writer", self._release),
                web.put(f"{run}/layout/{{layout}}", self._put_layout),
                web.delete(artifact, self._drop),
                web.put(f"{run}/{{tail:.+}}", self._put),
                web.get(f"{run}/{{tail:.+}}", self._get),
            ]
        )

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the journal and the lease for as long as the application runs."""
        await self.board.look()
        tasks = [asyncio.create_task(self.board.watch()), asyncio.create_task(self._expire_lease())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.desk.close()

    async def _expire_lease(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                if await self.desk.expire():
                    log.warning("run %s: its trainer went silent; its lease ended", self.journal.run)
                    await self.board.look_now()
            except SparrowError as error:
                log.error("run %s: cannot end the lease: %s", self.journal.run, error)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, and turn every failure into a JSON answer."""
        try:
            if request.path != "/health":
                writes = request.method in ("PUT", "DELETE") or request.path.endswith(("/requests", "/writer"))
                check_token(request.headers.get("Authorization"), self._tokens(writes))
            return await handler(request)
        except SparrowError as error:
            status, body = status_of(error), error_body(type(error).__name__, str(error))
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}; this hub serves run {self.journal.run}"
            status, body = error.status, error_body("FormatError", what)
        except FileNotFoundError:
            status, body = 404, error_body("VersionNotFound", f"{request.path}: not kept any longer")
        except OSError as error:
            # A client that left is no fault.
            level = logging.INFO if isinstance(error, ConnectionError) else logging.ERROR
            log.log(level, "%s %s: %s", request.method, request.path, error)
            status, body = 503, error_body("JournalError", f"{request.path}: {error.strerror or error}")
        return web.Response(status=status, body=body, content_type="application/json")

    def _tokens(self, writes: bool) -> list[str]:
        writer = self._credentials.writer or ""
        return [writer] if writes else [self._credentials.reader, writer]

    # What engines ask

    async def _get(self, request: web.Request) -> web.StreamResponse:
        tail = request.match_info["tail"]
        key = f"runs/{self.journal.run}/{tail}"
        try:
            path = self.journal.file(key)
        except VersionNotFound:
            merged = _MERGED.fullmatch(tail)
            if merged is None:
                raise
            await self._merge(base=int(merged[2]), target=int(merged[1]))
            path = self.journal.file(key)
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def _merge(self, base: int, target: int) -> None:
        """Have the merged delta; everybody who asks for the same one waits for the same work."""
        if base >= target:
            raise FormatError(f"merged delta: expected a base below the target, got {base} and {target}")
        task = self._merges.get((base, target))
        if task is None:
            task = self._merges[base, target] = asyncio.create_task(self._merge_in_turn(base, target))
            task.add_done_callback(lambda done: self._merges.pop((base, target), None))
        done, _ = await asyncio.wait([task], timeout=_MERGE_SECONDS)
        if not done:
            raise TransportError(f"delta {base} -> {target} is being merged; ask again")
        task.result()

    async def _merge_in_turn(self, base: int, target: int) -> ArtifactRef:
        async with self._merging:
            return await asyncio.to_thread(self.journal.merged, base, target)

    async def _feed(self, request: web.Request) -> web.Response:
        engine = _engine(request.query.get("engine", ""))
        after = request.query.get("after")
        found: list[tuple[str, bytes]] = []

        def is_new() -> bool:
            found[:] = [self._compose_feed(engine)]
            return found[0][0] != after

        await self.board.until(is_new, _seconds(request) if after is not None else 0.0)
        is_new()
        return _json(found[0][1])

    def _compose_feed(self, engine: str) -> tuple[str, bytes]:
        """The cursor, which is a hash of all the rest, and the body."""
        requests = [dataclasses.asdict(asked) for asked in self.desk.requests(engine)]
        rest = {**dataclasses.asdict(self.board.facts), "requests": requests}
        digest = blake3(json.dumps(rest).encode()).digest()
        cursor = int.from_bytes(digest[:6], "little")
        return str(cursor), json.dumps({"cursor": cursor, **rest}).encode()

    async def _draft(self, request: web.Request) -> web.Response:
        target, name = _artifact(request)
        known, start = request.query.get("draft", ""), _whole(request.query.get("from", "0"))
        committed = self.board.committed(target, name)
        view = self.board.draft(target, name)

        def has_more() -> bool:
            nonlocal committed, view
            committed = self.board.committed(target, name)
            view = self.board.draft(target, name)
            return committed or view.id != known or len(view.order) > start

        await self.board.until(has_more, _seconds(request), every=LOOK_SECONDS)
        shown = view.order[start:] if view.id == known else view.order
        segments = [{"digest": segment.digest.hex(), "length": segment.length} for segment in shown]
        return _json({"draft": view.id, "segments": segments, "committed": committed})

    async def _head(self, request: web.Request) -> web.Response:
        """The newest version with the fingerprints of all tensors: where a trainer goes on."""
        return _json(await asyncio.to_thread(self._read_head))

    def _read_head(self) -> dict[str, Any]:
        version = self.journal.newest()
        if version is None:
            return {}
        manifest = self.journal.manifest_of(version)
        return {
            "version": version,
            "name": manifest.name,
            "fingerprints": self.journal.fingerprints(version),
        }

    async def _heard(self, request: web.Request) -> web.Response:
        engine = _engine(request.match_info["engine"])
        raw = parse_json(await _read_body(request, SMALL_BODY), "status")
        if self.desk.heard(engine, from_json(EngineStatus, raw, "status")):
            self.board.wake()
        return _json({})

    async def _engines(self, request: web.Request) -> web.Response:
        return _json({"engines": self.desk.engines()})

    # What writers ask

    async def _ask(self, request: web.Request) -> web.Response:
        engine = _engine(request.match_info["engine"])
        raw = parse_json(await _read_body(request, SMALL_BODY), "request")
        kind = raw.get("kind") if isinstance(raw, dict) else None
        if kind not in ("audit", "export"):
            raise FormatError(f"request: expected the kind audit or export, got {str(kind)[:40]!r}")
        number = self.desk.ask(engine, kind)
        self.board.wake()
        return _json({"id": number})

    async def _lead(self, request: web.Request) -> web.Response:
        await self.desk.require(_writer(request))
        return _json({})

    async def _release(self, request: web.Request) -> web.Response:
        await self.desk.release(_writer(request))
        await self.board.look_now()
        return _json({})

    async def _put_layout(self, request: web.Request) -> web.Response:
        await self.desk.require(_writer(request))
        async with self._uploads:
            data = await _read_body(request, limits.LAYOUT_BYTES)
            if blake3(data).hexdigest() != request.match_info["layout"]:
                raise CorruptData("layout: its hash is not the one in its name; it was damaged on the way")
            await asyncio.to_thread(self.journal.put_layout, data)
        return _json({})

    async def _put(self, request: web.Request) -> web.Response:
        match = _PUT.fullmatch(request.match_info["tail"])
        if match is None:
            raise FormatError(f"expected the key of a layout, segment or manifest, got {request.path[:200]!r}")
        await self.desk.require(_writer(request))
        target, name = int(match[1]), match[2]
        async with self._uploads:
            if match[3]:
                await self._commit(target, name, await _read_body(request, limits.MANIFEST_BYTES))
            else:
                data = await _read_body(request, limits.SEGMENT_BYTES)
                if blake3(data).hexdigest() != match[4]:
                    raise CorruptData("segment: its hash is not the one in its name; it was damaged on the way")
                await asyncio.to_thread(self.journal.draft(target, name).put, data)
        if match[3] or f"{target}/{name}" not in self.board.facts.drafts:
            await self.board.look_now()
        self.board.wake()
        return _json({})

    async def _commit(self, target: int, name: str, data: bytes) -> None:
        manifest = Manifest.decode(data, self._credentials.run_key)
        if (manifest.run, manifest.target, manifest.name) != (self.journal.run, target, name):
            got = f"run {manifest.run}, {manifest.target}/{manifest.name}"
            raise CorruptData(f"manifest: expected that of run {self.journal.run}, {target}/{name}, got {got}")
        present: set[SegmentRef] = set()
        with suppress(VersionNotFound):
            present = self.board.draft(target, name).seen
        missing = [segment for segment in manifest.segments if segment not in present]
        if missing:
            raise CorruptData(
                f"manifest of {target}/{name}: {len(missing)} of its {len(manifest.segments)} segments were not put, "
                f"first {missing[0].digest.hex()}; publish again"
            )
        await asyncio.to_thread(self.journal.draft(target, name).commit, manifest)

    async def _drop(self, request: web.Request) -> web.Response:
        target, name = _artifact(request)
        await self.desk.require(_writer(request))
        await asyncio.to_thread(self.journal.draft(target, name).drop)
        await self.board.look_now()
        self.board.wake()
        return _json({})


@asynccontextmanager
async def listening(
    journal_root: Path,
    credentials: Credentials,
    *,
    host: str = "127.0.0.1",
    port: int = 8590,
    allow_remote: bool = False,
    retention: Retention | None = None,
) -> AsyncIterator[str]:
    """A hub that serves inside the `with`; yields its address. Port 0 takes a free one.

    Raises ConfigError if the address is refused or in use, or the journal cannot be written.
    """
    check_address(host, port, allow_remote)
    journal = Journal(journal_root, credentials.run, credentials.run_key, retention=retention)
    _check_writable(journal.root / "runs" / credentials.run)
    hub = Hub(journal, credentials)
    runner = web.AppRunner(hub.app, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}"
        hub.board.close()
    finally:
        await runner.cleanup()


async def _serve(
    ready: Callable[[str], None], journal_root: Path, credentials: Credentials, until_stdin_ends: bool, options: Any
) -> None:
    stop = asyncio.Event()
    call_when_told(stop.set, or_input_ends=until_stdin_ends)
    async with listening(journal_root, credentials, **options) as url:
        ready(url)
        await stop.wait()


def run_hub(
    ready: Callable[[str], None],
    journal_root: Path,
    credentials: Credentials,
    *,
    until_stdin_ends: bool = False,
    **options: Any,
) -> None:
    """A hub process: `listening`, with its options, until SIGTERM, SIGINT or (if so asked) the end of standard input.

    `ready` gets the address.
    """
    asyncio.run(_serve(ready, journal_root, credentials, until_stdin_ends, options))


def _check_writable(folder: Path) -> None:
    probe = folder / f"probe{files.TEMPORARY}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"journal {folder}: cannot write there: {error.strerror or error}") from error


async def _health(request: web.Request) -> web.Response:
    return _json({"ok": True})


def _json(body: object) -> web.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.Response(body=data, content_type="application/json")


def _engine(engine: str) -> str:
    if not RUN_NAME.fullmatch(engine):
        raise FormatError(f"engine id: expected {RUN_NAME.pattern}, got {engine[:80]!r}")
    return engine


def _artifact(request: web.Request) -> tuple[int, str]:
    target, name = request.match_info["target"], request.match_info["name"]
    parse_artifact_name(name)
    return _whole(target), name


def _whole(text: str) -> int:
    if not re.fullmatch(NUMBER, text, re.ASCII):
        raise FormatError(f"expected a whole number, got {text[:40]!r}")
    return int(text)


def _seconds(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII):
        raise FormatError(f"wait: expected seconds, got {text[:40]!r}")
    return min(float(text), LONGEST_WAIT)


def _writer(request: web.Request) -> str:
    writer = request.headers.get(WRITER_HEADER, "")
    if not re.fullmatch(r"[0-9a-zA-Z_-]{16,64}", writer, re.ASCII):
        raise FormatError(f"expected the header {WRITER_HEADER} with a random id of 16 to 64 letters and digits")
    return writer


async def _read_body(request: web.Request, limit: int) -> bytes:
    """The body, refused before it is read if its announced length is beyond `limit` bytes."""
    if (request.content_length or 0) > limit:
        raise LimitExceeded(f"body: expected at most {limit} bytes, got {request.content_length}")
    pieces, received = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.content.iter_any():
                received += len(piece)
                if received > limit:
                    raise LimitExceeded(f"body: expected at most {limit} bytes, got more")
                pieces.append(piece)
    except TimeoutError as error:
        raise DeadlineExceeded(f"body: {received} bytes came in {_BODY_SECONDS:.0f} s, then nothing") from error
    return b"".join(pieces)
