"""The hub over real sockets: who may do what, what is refused, what survives its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from blake3 import blake3

from helpers import wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.retention import Retention
from sparrowrl.errors import ConfigError
from sparrowrl.transport import desk
from sparrowrl.transport.http import WRITER_HEADER
from sparrowrl.transport.hub import listening
from sparrowrl.transport.remote import HubClient

# Starts the command in its arguments with a pipe as its input, says its process id, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""
WRITER = {WRITER_HEADER: "w" * 32}


class Caller:
    """Raw requests, with any token and any body."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def __call__(self, method: str, path: str, token: str | None, **options: Any) -> tuple[int, Any]:
        headers = {**options.pop("headers", {}), **({} if token is None else {"Authorization": f"Bearer {token}"})}
        async with self.session.request(method, self.url + path, headers=headers, **options) as response:
            body = await response.read()
            return response.status, json.loads(body) if "json" in response.content_type else body


@pytest.fixture
async def call(hub: Any) -> AsyncIterator[Caller]:
    async with aiohttp.ClientSession() as session:
        yield Caller(hub.url, session)


ROUTES = [
    ("GET", "/runs/run-1/feed?engine=e", "reader"),
    ("GET", "/runs/run-1/head", "reader"),
    ("GET", "/runs/run-1/engines", "reader"),
    ("GET", "/runs/run-1/v/0/origin/manifest", "reader"),
    ("GET", "/runs/run-1/v/1/0.fast/segments", "reader"),
    ("POST", "/runs/run-1/engines/e", "reader"),
    ("POST", "/runs/run-1/engines/e/requests", "writer"),
    ("POST", "/runs/run-1/writer", "writer"),
    ("DELETE", "/runs/run-1/writer", "writer"),
    ("PUT", f"/runs/run-1/layout/{'0' * 64}", "writer"),
    ("PUT", f"/runs/run-1/v/1/0.fast/{'0' * 64}.seg", "writer"),
    ("PUT", "/runs/run-1/v/1/0.fast/manifest", "writer"),
    ("DELETE", "/runs/run-1/v/1/0.fast", "writer"),
    ("GET", "/anything", "reader"),
]


@pytest.mark.parametrize(("method", "path", "needs"), ROUTES)
async def test_every_route_asks_for_its_token(
    call: Caller, credentials: Credentials, method: str, path: str, needs: str
) -> None:
    wrong = [None, "", "x", credentials.reader + "x", *([credentials.reader] if needs == "writer" else [])]
    for token in wrong:
        status, body = await call(method, path, token)
        assert (status, body["error"]) == (401, "Unauthorized")
    status, _ = await call(method, path, credentials.writer)
    assert status != 401


async def test_health_needs_no_token(call: Caller) -> None:
    assert await call("GET", "/health", None) == (200, {"ok": True})


@pytest.mark.parametrize(
    "path",
    [
        "/runs/run-1/../../etc/passwd", "/runs/run-1/%2e%2e/%2e%2e/etc/passwd", "/runs/run-1/v/0/origin/..%2fmanifest",
        "/runs/run-1/hub.json", "/runs/run-1/writer.lock", "/runs/run-1/v/01/0.fast/manifest",
        "/runs/other/v/0/origin/manifest",
        "/runs/run-1/v/1/0.fast/ABCD.seg", "/runs/run-1//v/0/origin/manifest", "/runs/run-1/v/0/origin/manifest%00",
    ],
)  # fmt: skip
async def test_what_is_no_key_is_not_served(
    call: Caller, trainer: Any, credentials: Credentials, hub: Any, path: str
) -> None:
    port = int(hub.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)  # clients normalise such paths
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {credentials.reader}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    assert answer.split(b" ")[1] in (b"400", b"404")
    assert b"error" in answer


async def test_files_are_served_as_they_are(
    call: Caller, trainer: Any, credentials: Credentials, journal_root: Path
) -> None:
    trainer.publish(segments=2, size=300_000)
    for name in [f"{digest}.seg" for digest in trainer.published[1]] + ["manifest"]:
        key = f"runs/run-1/v/1/0.fast/{name}"
        assert await call("GET", f"/{key}", credentials.reader) == (200, (journal_root / key).read_bytes())
    status, body = await call("GET", f"/runs/run-1/v/1/0.fast/{'0' * 64}.seg", credentials.reader)
    assert (status, body["error"]) == (404, "VersionNotFound")


@pytest.mark.parametrize(
    ("path", "limit"),
    [(f"v/1/0.fast/{'0' * 64}.seg", 16 << 20), ("v/1/0.fast/manifest", 64 << 20), (f"layout/{'0' * 64}", 64 << 20)],
)
async def test_a_body_that_is_too_long_is_refused_before_it_is_sent(
    hub: Any, credentials: Credentials, path: str, limit: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]))
    writer.write(
        f"PUT /runs/run-1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {credentials.writer}\r\n"
        f"{WRITER_HEADER}: {'w' * 32}\r\nContent-Length: {limit + 1}\r\n\r\n".encode()
    )
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_body_without_length_is_cut_off_at_the_limit(call: Caller, credentials: Credentials) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(1 << 20)

    path = f"/runs/run-1/v/1/0.fast/{'0' * 64}.seg"
    try:
        status, body = await call("PUT", path, credentials.writer, data=endless(), headers=WRITER)
    except aiohttp.ClientConnectionError:
        return  # refused while we were still sending
    assert (status, body["error"]) == (413, "LimitExceeded")


async def test_bytes_with_another_hash_than_their_name_are_refused(
    call: Caller, credentials: Credentials, journal_root: Path
) -> None:
    name = blake3(b"right").hexdigest()
    for path in (f"v/1/0.fast/{name}.seg", f"layout/{name}"):
        status, body = await call("PUT", f"/runs/run-1/{path}", credentials.writer, data=b"wrong", headers=WRITER)
        assert (status, body["error"]) == (400, "CorruptData")
    assert not list(journal_root.rglob("*.seg"))


@pytest.mark.parametrize("header", ["", "short", "w" * 65, "w" * 31 + "\x7f"])
async def test_a_writer_has_to_say_who_it_is(call: Caller, credentials: Credentials, header: str) -> None:
    name = blake3(b"x").hexdigest()
    try:
        status, body = await call(
            "PUT", f"/runs/run-1/v/1/0.fast/{name}.seg", credentials.writer, data=b"x", headers={WRITER_HEADER: header}
        )
    except (ValueError, aiohttp.ClientError):
        return  # the client itself refuses to send it
    assert (status, body["error"]) == (400, "FormatError")


async def test_a_manifest_that_does_not_belong_is_refused(
    call: Caller, credentials: Credentials, trainer: Any, sink: Any
) -> None:
    headers = {WRITER_HEADER: sink.lead()}
    table = [3, trainer.table[1]]
    draft = sink.open(1, "0.fast")
    refs = [draft.put(b"segment")]
    draft.flush()
    good = trainer.manifest("delta", 1, table, refs)
    missing = trainer.manifest("delta", 1, table, [*refs, type(refs[0])(b"\1" * 32, 10)])
    astray = trainer.manifest("delta", 1, table, refs, base_state=b"\2" * 32)
    cases = [
        (good.encode(bytes(32)), 400, "CorruptData"),  # another key's MAC
        (good.encode(credentials.run_key)[:-1], 400, "CorruptData"),
        (trainer.manifest("delta", 1, table, refs, run="other").encode(credentials.run_key), 400, "CorruptData"),
        (missing.encode(credentials.run_key), 400, "CorruptData"),
        (astray.encode(credentials.run_key), 409, "VersionConflict"),
        (b"", 400, "CorruptData"),
    ]  # fmt: skip
    for data, status, error in cases:
        got, body = await call("PUT", "/runs/run-1/v/1/0.fast/manifest", credentials.writer, data=data, headers=headers)
        assert (got, body["error"]) == (status, error)
    for _ in range(2):  # a commit whose answer was lost is repeated
        data = good.encode(credentials.run_key)
        got, _ = await call("PUT", "/runs/run-1/v/1/0.fast/manifest", credentials.writer, data=data, headers=headers)
        assert got == 200
    other = trainer.manifest("delta", 1, [4, table[1]], refs).encode(credentials.run_key)
    got, body = await call("PUT", "/runs/run-1/v/1/0.fast/manifest", credentials.writer, data=other, headers=headers)
    assert (got, body["error"]) == (409, "VersionConflict")
    got, body = await call("DELETE", "/runs/run-1/v/1/0.fast", credentials.writer, headers=headers)
    assert (got, body["error"]) == (409, "VersionConflict")


async def test_the_feed_wakes_when_the_hub_takes_an_upload(hub: Any, trainer: Any, credentials: Credentials) -> None:
    async with HubClient(hub.url, credentials.for_engines()) as client:
        first = await client.feed(None, "e", 0.0)
        assert (first.newest, first.state, first.drafts, first.bases) == (0, trainer.state, (), ())
        waiting = asyncio.create_task(client.feed(first.cursor, "e", 30.0))
        await asyncio.to_thread(trainer.publish)
        async with asyncio.timeout(20):
            feed = await waiting
            while feed.newest != 1:
                feed = await client.feed(feed.cursor, "e", 30.0)
        assert feed.state == trainer.state
        assert [(span.first, span.last) for span in feed.bases] == [(0, 0)]


async def test_the_feed_wakes_when_another_process_writes_the_journal(
    hub: Any, local_trainer: Any, credentials: Credentials
) -> None:
    async with HubClient(hub.url, credentials.for_engines()) as client:
        async with asyncio.timeout(20):
            feed = await client.feed(None, "e", 0.0)
            while feed.newest != 0:
                feed = await client.feed(feed.cursor, "e", 30.0)
            draft = local_trainer.sink.open(1, "0.fast")
            waiting = asyncio.create_task(client.feed(feed.cursor, "e", 30.0))
            ref = draft.put(b"one")
            feed = await waiting
            assert feed.drafts == ("1/0.fast",)
            page = await client.draft(1, "0.fast", "", 0, 0.0)
            assert [segment.digest for segment in page.segments] == [ref.digest.hex()]
            more = asyncio.create_task(client.draft(1, "0.fast", page.draft, 1, 30.0))
            second = draft.put(b"two")
            assert [segment.digest for segment in (await more).segments] == [second.digest.hex()]
            end = asyncio.create_task(client.draft(1, "0.fast", page.draft, 2, 30.0))
            table = [9, local_trainer.table[1]]
            draft.commit(local_trainer.manifest("delta", 1, table, [ref, second]))
            assert (await end).committed


async def test_an_unchanged_feed_comes_back_after_the_wait(hub: Any, trainer: Any, credentials: Credentials) -> None:
    async with HubClient(hub.url, credentials.for_engines()) as client:
        feed = await client.feed(None, "e", 0.0)
        assert await client.feed(feed.cursor, "e", 0.2) == feed


async def test_a_merged_delta_is_made_once_for_all_who_ask(
    hub: Any, sink: Any, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, journal_root: Path
) -> None:
    merges: list[tuple[int, int]] = []
    merged = Journal.merged

    def counting(journal: Journal, base: int, target: int) -> Any:
        merges.append((base, target))
        return merged(journal, base, target)

    monkeypatch.setattr(Journal, "merged", counting)
    weights = {"w": torch.zeros(5000, dtype=torch.bfloat16)}
    publisher = Publisher(sink, weights.items())
    for step in range(1, 4):
        weights["w"][step::5] += 1
        publisher.publish(weights.items())
    async with HubClient(hub.url, credentials.for_engines(), connections=8) as client:
        wanted = "runs/run-1/v/3/0.fast/manifest"
        bodies = await asyncio.gather(*(client.request("GET", wanted) for _ in range(8)))
    assert merges == [(0, 3)]
    assert set(bodies) == {(journal_root / wanted).read_bytes()}


async def test_a_merged_delta_that_cannot_be_is_not_found(call: Caller, trainer: Any, credentials: Credentials) -> None:
    trainer.publish(kind="anchor")
    for key in ("v/1/0.fast/manifest", "v/9/1.fast/manifest"):
        status, body = await call("GET", f"/runs/run-1/{key}", credentials.reader)
        assert (status, body["error"]) == (404, "VersionNotFound")
    status, body = await call("GET", "/runs/run-1/v/1/1.fast/manifest", credentials.reader)
    assert (status, body["error"]) == (400, "FormatError")


async def test_requests_and_bad_statuses(call: Caller, credentials: Credentials) -> None:
    ask = "/runs/run-1/engines/e/requests"
    assert (await call("POST", ask, credentials.writer, json={"kind": "audit"}))[0] == 404, "never heard of"
    for bad in (b"", b"[]", b"{", b'{"version": "one"}', b'{"activations": [{}]}'):
        status, body = await call("POST", "/runs/run-1/engines/e", credentials.reader, data=bad)
        assert (status, body["error"]) == (400, "CorruptData")
    assert (await call("POST", "/runs/run-1/engines/e", credentials.reader, data=bytes((1 << 20) + 1)))[0] == 413
    assert (await call("POST", "/runs/run-1/engines/a%2fb", credentials.reader, json={}))[0] in (400, 404)
    assert (await call("POST", "/runs/run-1/engines/e", credentials.reader, json={"version": 3}))[0] == 200
    assert (await call("POST", ask, credentials.writer, json={"kind": "format-disk"}))[0] == 400
    for number in range(1, desk._REQUESTS_PER_ENGINE + 1):
        assert await call("POST", ask, credentials.writer, json={"kind": "audit"}) == (200, {"id": number})
    assert (await call("POST", ask, credentials.writer, json={"kind": "audit"}))[0] == 413
    _, body = await call("GET", "/runs/run-1/engines", credentials.reader)
    assert body["engines"]["e"]["version"] == 3


async def test_a_lease_ends_when_its_writer_is_silent_and_its_draft_goes(
    hub: Any, call: Caller, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, journal_root: Path
) -> None:
    name = blake3(b"x").hexdigest()
    path = f"/runs/run-1/v/1/0.fast/{name}.seg"
    assert (await call("PUT", path, credentials.writer, data=b"x", headers=WRITER))[0] == 200
    other = {WRITER_HEADER: "o" * 32}
    status, body = await call("PUT", path, credentials.writer, data=b"x", headers=other)
    assert (status, body["error"]) == (409, "JournalLocked")
    status, body = await call("DELETE", "/runs/run-1/writer", credentials.writer, headers=other)
    assert (status, body["error"]) == (409, "JournalLocked")
    monkeypatch.setattr(desk, "LEASE_SECONDS", 0.0)
    async with asyncio.timeout(20):
        while (journal_root / path[1:]).exists():
            await asyncio.sleep(0.02)
    assert (await call("POST", "/runs/run-1/writer", credentials.writer, headers=other))[0] == 200


async def test_retention_is_applied(journal_root: Path, credentials: Credentials, byte_trainer: Any) -> None:
    from sparrowrl.transport.client import HubSink

    async with listening(journal_root, credentials, port=0, retention=Retention(2)) as url:

        def publish() -> None:
            sink = HubSink(url, credentials)
            trainer = byte_trainer(sink, credentials.run_key)
            for kind in ("delta", "delta", "anchor", "delta", "delta", "delta"):
                trainer.publish(kind=kind)
            sink.close()

        await asyncio.to_thread(publish)
        async with HubClient(url, credentials) as client:
            async with asyncio.timeout(20):
                feed = await client.feed(None, "e", 0.0)
                while feed.newest != 6:
                    feed = await client.feed(feed.cursor, "e", 5.0)
    assert feed.anchor == 3
    assert [(span.first, span.last) for span in feed.bases] == [(3, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "--allow-remote"), ({"host": "192.0.2.1"}, "--allow-remote"),
        ({"host": "::"}, "--allow-remote"),
        ({"host": "example.org"}, "IP address"), ({"port": 70000}, "port"),
        ({"host": "192.0.2.1", "allow_remote": True}, "cannot listen"),
    ],
)  # fmt: skip
async def test_addresses_that_are_refused(
    journal_root: Path, credentials: Credentials, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with listening(journal_root, credentials, **options):
            pass


async def test_engine_credentials_do_not_make_a_hub(journal_root: Path, credentials: Credentials) -> None:
    with pytest.raises(ConfigError, match="lacks a token"):
        async with listening(journal_root, credentials.for_engines(), port=0):
            pass


def test_a_port_in_use_and_a_bad_journal_are_one_line_each(
    tmp_path: Path, credentials_file: Path, start_process: Any
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        common = ("hub", "--credentials", str(credentials_file))
        busy = start_process(*common, "--journal", str(tmp_path / "journal"), "--port", port)
        assert busy.process.wait(60) == 2
        lines = busy.log.read_text().splitlines()
        assert len(lines) == 1 and lines[0].startswith("sparrowrl: ConfigError: cannot listen on 127.0.0.1")
    (tmp_path / "file").write_text("")
    bad = start_process(*common, "--journal", str(tmp_path / "file" / "journal"), "--port", "0")
    assert bad.process.wait(60) == 2
    assert "cannot write there" in bad.log.read_text().splitlines()[-1]


async def test_a_hub_that_is_told_to_stop_lets_waiting_engines_go(hub_process: Any, credentials: Credentials) -> None:
    async with HubClient(hub_process.url, credentials) as client:
        feed = await client.feed(None, "e", 0.0)
        waiting = asyncio.create_task(client.feed(feed.cursor, "e", 30.0))
        await asyncio.sleep(0.1)  # lets the request reach the hub; the test holds without it too
        assert await asyncio.to_thread(hub_process.running.end, signal.SIGTERM) == 0
        assert await waiting == feed


def _answers(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health", timeout=5).status == 200)
    except OSError:
        return False


def test_a_hub_leaves_with_its_parent_however_that_ends(journal_root: Path, credentials_file: Path) -> None:
    hub = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--port", "0", "--until-stdin-ends"]
    hub += ["--journal", str(journal_root), "--credentials", str(credentials_file)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *hub], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        pid, address = int(output.readline()), output.readline().strip()
        assert _answers(address)
        parent.kill()
        parent.wait(20)
        try:
            wait_for(lambda: not _answers(address), 20, "the hub to leave")
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_a_hub_that_was_not_asked_to_stays_at_the_end_of_its_input(
    hub_process: Any, credentials: Credentials
) -> None:
    hub_process.running.process.stdin.close()
    async with HubClient(hub_process.url, credentials) as client:
        for _ in range(3):
            assert (await client.feed(None, "e", 0.2)).newest is None
    assert hub_process.running.process.poll() is None


async def test_requests_and_numbers_survive_a_killed_hub(hub_process: Any, credentials: Credentials) -> None:
    async with HubClient(hub_process.url, credentials) as client:
        await client.send_status("e", b"{}")
        assert [await client.ask("e", "audit"), await client.ask("e", "export")] == [1, 2]
        before = await client.feed(None, "e", 0.0)
        await asyncio.to_thread(hub_process.kill)
        await asyncio.to_thread(hub_process.start)
        assert await client.feed(None, "e", 0.0) == before
        assert await client.engines() == {}
        await client.send_status("e", b'{"answers": [{"id": 1, "kind": "audit", "ok": true}]}')
        assert [asked.id for asked in (await client.feed(None, "e", 0.0)).requests] == [2]
        assert await client.ask("e", "audit") == 3


async def test_an_old_answer_never_passes_for_one_to_a_new_request(call: Caller, credentials: Credentials) -> None:
    old = {"answers": [{"id": 7, "kind": "audit", "ok": True}]}  # from before this hub lost its disk
    assert (await call("POST", "/runs/run-1/engines/e", credentials.reader, json=old))[0] == 200
    ask = "/runs/run-1/engines/e/requests"
    assert await call("POST", ask, credentials.writer, json={"kind": "audit"}) == (200, {"id": 8})
    assert await call("POST", ask, credentials.writer, json={"kind": "audit"}) == (200, {"id": 9})
