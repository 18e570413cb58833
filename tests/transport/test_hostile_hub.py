"""A real agent against a fake hub that lies: it must say so, pass nothing bad on, and recover when the lying ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.transport.agent import Agent
from sparrowrl.transport.node import NodeDirectory
from sparrowrl.transport.remote import Deadlines

SECONDS = 20.0
DEADLINES = Deadlines(connect=1.0, silence=0.4, request=1.0)
Answer = Callable[[web.Request, bytes], Any]


class FakeHostileHub:
    """Passes requests on to a real hub, and what `lies` says about a kind of path is done to the answers."""

    def __init__(self, url: str) -> None:
        self.real = url
        self.lies: dict[str, Answer] = {}
        self.told = 0

    def lie_about(self, path: str) -> Answer | None:
        kinds = {
            "segment": path.endswith(".seg"),
            "manifest": path.endswith("fast/manifest"),
            "origin": path.endswith("origin/manifest"),
            "layout": "/layout/" in path,
            "feed": path.endswith("/feed"),
            "draft": path.endswith("/segments"),
        }
        return next((self.lies[kind] for kind, fits in kinds.items() if fits and kind in self.lies), None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        wanted = self.real + request.path_qs
        body = await request.read()
        headers = {"Authorization": request.headers["Authorization"]}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, wanted, headers=headers, data=body) as answer,
        ):
            data = await answer.read()
        lie = self.lie_about(request.path)
        if lie is not None and answer.status == 200:
            self.told += 1
            told = await lie(request, data)
            return told if isinstance(told, web.StreamResponse) else web.Response(body=told)
        return web.Response(status=answer.status, body=data, content_type=answer.content_type)


def changed(change: Callable[[bytes], bytes]) -> Answer:
    async def lie(request: web.Request, data: bytes) -> bytes:
        return change(data)

    return lie


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


async def break_off(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang(request: web.Request, data: bytes) -> bytes:
    await asyncio.sleep(60)
    return data


async def hang_half_way(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(60)
    return response


async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 16))


async def announce_a_terabyte(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(1 << 40)})
    await response.prepare(request)
    await response.write(data)
    return response


async def fail(request: web.Request, data: bytes) -> web.Response:
    return web.Response(status=500, text="<html>it is not you, it is me</html>")


def feed_with(**fields: Any) -> Answer:
    return changed(lambda data: json.dumps({**json.loads(data), "cursor": 1, **fields}).encode())


@pytest.fixture
async def hostile(hub: Any) -> AsyncIterator[tuple[FakeHostileHub, str]]:
    fake = FakeHostileHub(hub.url)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield fake, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {SECONDS} s for {what}") from None


def bad_files(node: NodeDirectory, good: set[str]) -> list[Path]:
    """Files that are named as segments and are not the trainer's, and manifests: none of them may be there."""
    segments = [path for path in node.root.rglob("*.seg") if not path.name.startswith(".")]
    wrong = [path for path in segments if blake3(path.read_bytes()).hexdigest() != path.stem or path.stem not in good]
    return wrong + list((node.root / "runs/run-1/v/1").rglob("manifest"))


async def check(
    hostile: tuple[FakeHostileHub, str], credentials: Credentials, node: NodeDirectory, rank: Any, trainer: Any,
    about: str, lie: Answer, expected: str,
) -> None:  # fmt: skip
    fake, url = hostile
    rank.say(0, trainer.state)
    rank.start()
    await asyncio.to_thread(trainer.publish, 4, 40_000)
    fake.lies[about] = lie
    agent = Agent(node, url, credentials.for_engines(), "engine-1", connections=2, deadlines=DEADLINES)
    task = asyncio.create_task(agent.run())

    def says() -> str:
        status = node.agent.read()
        return "" if status is None or status.error is None else f"{status.error.error}: {status.error.message}"

    try:
        await until(lambda: expected in says(), f"{expected} in agent.json")
        await until(lambda: fake.told >= 3, "the agent to try again")
        assert rank.version == 0 and not rank.staged
        assert not bad_files(node, set(trainer.published[1]))
        fake.lies.clear()
        await until(lambda: rank.version == 1, "version 1, once the hub is honest")
        await until(lambda: says() == "", "the error to go")
        assert rank.digests["runs/run-1/v/1/0.fast"] == trainer.published[1]
    finally:
        agent.stop()
        await asyncio.wait_for(task, SECONDS)


@pytest.mark.parametrize(
    ("about", "lie", "expected"),
    [
        ("segment", changed(flip), "CorruptData"),
        ("segment", changed(lambda data: data[:-1]), "CorruptData"),
        ("segment", changed(lambda data: b""), "CorruptData"),
        ("segment", changed(lambda data: data + b"x"), "LimitExceeded"),
        ("segment", endless, "LimitExceeded"),
        ("segment", announce_a_terabyte, "LimitExceeded"),
        ("segment", break_off, "TransportError"),
        ("segment", hang, "DeadlineExceeded"),
        ("segment", hang_half_way, "DeadlineExceeded"),
        ("segment", fail, "TransportError"),
        ("manifest", changed(flip), "CorruptData"),
        ("manifest", changed(lambda data: data[:40]), "CorruptData"),
        ("manifest", changed(lambda data: b"<html>"), "CorruptData"),
        ("manifest", announce_a_terabyte, "LimitExceeded"),
        ("manifest", hang, "DeadlineExceeded"),
        ("origin", changed(flip), "CorruptData"),
        ("layout", changed(lambda data: data + b"x"), "CorruptData"),
        ("feed", changed(lambda data: b"[1]"), "CorruptData"),
        ("feed", changed(lambda data: b"\xff"), "CorruptData"),
        ("feed", changed(lambda data: b"[" * 100_000), "CorruptData"),
        ("feed", feed_with(newest="1"), "CorruptData"),
        ("feed", feed_with(drafts=[3]), "CorruptData"),
        ("feed", feed_with(newest=-1), "CorruptData"),
        ("feed", feed_with(newest=9, bases=[{"first": 0, "last": 8}]), "VersionNotFound"),
        ("feed", announce_a_terabyte, "LimitExceeded"),
        ("feed", endless, "LimitExceeded"),
        ("feed", fail, "TransportError"),
    ],
)
async def test_a_lie_is_named_and_not_passed_on(
    hostile: tuple[FakeHostileHub, str], credentials: Credentials, node: NodeDirectory, rank: Any, trainer: Any,
    about: str, lie: Answer, expected: str,
) -> None:  # fmt: skip
    await check(hostile, credentials, node, rank, trainer, about, lie, expected)


@pytest.mark.parametrize("what", ["another key", "another run", "another version", "another layout"])
async def test_a_manifest_that_is_well_made_but_not_the_one_asked_for(
    hostile: tuple[FakeHostileHub, str], credentials: Credentials, node: NodeDirectory, rank: Any, trainer: Any,
    byte_trainer: Any, what: str, journal_root: Path,
) -> None:  # fmt: skip
    async def lie(request: web.Request, data: bytes) -> bytes:
        journal = Journal(journal_root, "run-1", credentials.run_key)
        manifest = journal.manifest(1, "0.fast")
        fields = {name: getattr(manifest, name) for name in type(manifest).__dataclass_fields__}
        other = {
            "another key": {}, "another run": {"run": "run-2"}, "another version": {"target": 2},
            "another layout": {"layout": b"\1" * 32},
        }[what]  # fmt: skip
        key = b"\1" * 32 if what == "another key" else credentials.run_key
        return type(manifest)(**{**fields, **other}).encode(key)

    expected = "VersionNotFound" if what == "another layout" else "CorruptData"
    await check(hostile, credentials, node, rank, trainer, "manifest", lie, expected)


@pytest.mark.parametrize(
    ("digest", "length"),
    [
        ("../" * 20 + "tmp/x", 10),
        ("A" * 64, 10),
        ("0" * 63, 10),
        ("0" * 64, 0),
        ("0" * 64, -1),
        ("0" * 64, (16 << 20) + 1),
    ],
)
async def test_a_draft_cannot_name_what_is_no_segment(
    hostile: tuple[FakeHostileHub, str], credentials: Credentials, node: NodeDirectory, rank: Any, trainer: Any,
    sink: Any, digest: str, length: int,
) -> None:  # fmt: skip
    fake, url = hostile
    rank.say(0, trainer.state)
    rank.start()
    draft = sink.open(1, "0.fast")
    await asyncio.to_thread(draft.put, b"first")
    page = {"draft": "d", "segments": [{"digest": digest, "length": length}], "committed": False}
    fake.lies["draft"] = changed(lambda data: json.dumps(page).encode())
    agent = Agent(node, url, credentials.for_engines(), "engine-1", deadlines=DEADLINES)
    task = asyncio.create_task(agent.run())
    try:
        await until(lambda: "CorruptData" in str((s := node.agent.read()) and s.error), "CorruptData in agent.json")
        assert not list(node.root.rglob("*.seg"))
        fake.lies.clear()
        assert await asyncio.to_thread(trainer.write, [b"first", b"second"]) == 1
        await until(lambda: rank.version == 1, "version 1")
    finally:
        agent.stop()
        await asyncio.wait_for(task, SECONDS)
