"""HubSink against a real hub: what is retried, what is refused, and two trainers at once."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import assert_bits_equal, wait_for
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    JournalLocked,
    RemoteRefused,
    Unauthorized,
    VersionConflict,
    VersionNotFound,
)
from sparrowrl.transport import client as client_module
from sparrowrl.transport import desk
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.remote import Deadlines, HubClient


def test_a_publisher_s_weights_arrive_bit_exactly(sink: HubSink, journal_root: Path, credentials: Credentials) -> None:
    generator = torch.Generator().manual_seed(1)
    first = {"a": torch.randn(300, 70, generator=generator).bfloat16(), "b": torch.randn(9, generator=generator)}
    weights = {name: tensor.clone() for name, tensor in first.items()}
    publisher = Publisher(sink, weights.items(), wire_dtype=None)
    for step in range(3):
        weights["a"].view(-1)[step::11] *= 1.01
        weights["b"][step] = float("nan")
        assert publisher.publish(weights.items()).version == step + 1
    rebuilt = materialize(Journal(journal_root, "run-1", credentials.run_key), 3, first)
    for name, tensor in weights.items():
        assert_bits_equal(rebuilt[name], tensor)


def test_an_anchor_is_written_once_through_a_hub(sink: HubSink, journal_root: Path, credentials: Credentials) -> None:
    publisher = Publisher(sink, {"w": torch.ones(10)}.items())
    assert [publisher.write_anchor().changed for _ in range(2)] == [10, 0]
    assert (sink.has(0, "origin"), sink.has(0, "anchor.dense"), sink.has(1, "0.fast")) == (True, True, False)
    artifacts = Journal(journal_root, credentials.run, credentials.run_key).artifacts()
    assert [(artifact.kind, artifact.target) for artifact in artifacts] == [("anchor", 0), ("origin", 0)]


def test_a_trainer_that_comes_back_goes_on(hub: Any, credentials: Credentials) -> None:
    weights = {"w": torch.arange(64).bfloat16()}
    first = HubSink(hub.url, credentials)
    assert first.newest() is None
    Publisher(first, weights.items()).publish({"w": weights["w"] + 1}.items())
    first.close()
    second = HubSink(hub.url, credentials)
    head = second.newest()
    assert head is not None and head.version == 1
    publisher = Publisher(second, {"w": weights["w"] + 1}.items())
    assert publisher.version == 1, "the same weights: no new version"
    assert publisher.publish({"w": weights["w"] + 2}.items()).kind == "delta"
    second.close()


def test_uploads_go_on_through_a_hub_that_is_killed(
    hub_process: Any, credentials: Credentials, byte_trainer: Any, journal_root: Path
) -> None:
    sink = HubSink(hub_process.url, credentials)
    trainer = byte_trainer(sink, credentials.run_key)
    bodies = trainer.bodies(6, 50_000)
    draft = sink.open(1, "0.fast")
    refs = [draft.put(body) for body in bodies[:3]]
    draft.flush()
    hub_process.kill()
    restart = threading.Thread(target=hub_process.start)
    restart.start()
    refs += [draft.put(body) for body in bodies[3:]]
    table = [77, trainer.table[1]]
    draft.commit(trainer.manifest("delta", 1, table, refs))
    restart.join()
    journal = Journal(journal_root, "run-1", credentials.run_key)
    assert journal.newest() == 1
    manifest = journal.manifest(1, "0.fast")
    assert [journal.segment(1, "0.fast", ref) for ref in manifest.segments] == bodies
    sink.close()


def test_no_hub_is_a_typed_error_within_the_patience(
    credentials: Credentials, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_TELL_SECONDS", 0.01)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        sink = HubSink(f"http://127.0.0.1:{nobody.getsockname()[1]}", credentials, patience=0.3)
        with pytest.raises(DeadlineExceeded, match="is `sparrowrl hub` running there"):
            sink.newest()
        assert [record.message.startswith("still trying") for record in caplog.records] == [True]
        draft = sink.open(1, "0.fast")
        draft.put(b"x")
        with pytest.raises(DeadlineExceeded):
            draft.flush()
        draft.flush()  # told once
        sink.close()


def test_a_hub_that_never_answers_is_a_typed_error(credentials: Credentials) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        deadlines = Deadlines(connect=0.3, silence=0.3, request=0.5)
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        sink = HubSink(url, credentials, patience=0.5, deadlines=deadlines)
        with pytest.raises(DeadlineExceeded, match="no answer in time"):
            sink.lead()
        sink.close()


def test_wrong_tokens_and_missing_tokens(hub: Any, credentials: Credentials) -> None:
    with pytest.raises(ConfigError, match="writer token"):
        HubSink(hub.url, credentials.for_engines())
    sink = HubSink(hub.url, replace(credentials, writer="wrong"))
    with pytest.raises(Unauthorized):
        sink.lead()
    sink.close()
    sink = HubSink(hub.url, replace(credentials, writer=credentials.reader))
    with pytest.raises(Unauthorized):
        sink.lead()
    sink.close()


@pytest.mark.parametrize(
    "url", ["", "localhost:1", "ftp://x", "http://", "http://x/?a=b", "http://x/#y", "http://x:99999", "http://[::1"]
)
def test_a_bad_address_is_refused(credentials: Credentials, url: str) -> None:
    with pytest.raises(ConfigError, match="hub address"):
        HubSink(url, credentials)


def test_a_closed_sink_says_so(sink: HubSink) -> None:
    weights = {"w": torch.arange(8).bfloat16()}
    publisher = Publisher(sink, weights.items())
    sink.close()
    with pytest.raises(ConfigError, match="closed"):
        publisher.publish(weights.items())


def test_a_run_that_the_hub_does_not_serve(hub: Any, credentials: Credentials) -> None:
    with (
        HubSink(hub.url, replace(credentials, run="other")) as sink,
        pytest.raises(RemoteRefused, match="serves run run-1"),
    ):
        sink.lead()


def test_what_the_hub_refuses_is_not_repeated(sink: HubSink, trainer: Any, credentials: Credentials) -> None:
    draft = sink.open(5, "0.fast")
    ref = draft.put(b"x")
    with pytest.raises(VersionConflict):
        draft.commit(trainer.manifest("delta", 5, [5, 5], [ref]))
    draft.drop()
    draft = sink.open(1, "0.fast")
    with pytest.raises(RemoteRefused, match="segments were not put"):
        draft.commit(trainer.manifest("delta", 1, [5, trainer.table[1]], [ref]))


def test_a_second_trainer_waits_and_is_refused_while_the_first_lives(hub: Any, credentials: Credentials) -> None:
    first = HubSink(hub.url, credentials)
    first.lead()
    assert first.lead() == first.lead()
    second = HubSink(hub.url, credentials, lease_patience=0.6)
    began = time.monotonic()
    with pytest.raises(JournalLocked, match="another trainer"):
        second.lead()
    assert time.monotonic() - began >= 0.6
    draft = second.open(1, "0.fast")
    second._writer = "s" * 32  # a trainer that does not ask before it writes
    draft.put(b"x")
    with pytest.raises(JournalLocked):
        draft.flush()
    second._writer = None
    first.close()
    second.lead()
    second.close()


def test_a_trainer_that_starts_early_gets_its_place_when_the_first_leaves(hub: Any, credentials: Credentials) -> None:
    first = HubSink(hub.url, credentials)
    first.lead()
    second = HubSink(hub.url, credentials, lease_patience=20.0)
    got: list[str] = []
    waiting = threading.Thread(target=lambda: got.append(second.lead()))
    waiting.start()
    time.sleep(0.1)
    assert not got
    first.close()
    waiting.join(20)
    assert got
    second.close()


def test_a_trainer_on_the_journal_and_one_on_the_hub_exclude_each_other(
    hub: Any, credentials: Credentials, journal_root: Path
) -> None:
    local = JournalSink(journal_root, credentials)
    local.lead()
    remote = HubSink(hub.url, credentials, lease_patience=0.0)
    with pytest.raises(JournalLocked):
        remote.lead()
    local.close()
    remote.lead()
    with pytest.raises(JournalLocked):
        local.lead()
    remote.close()
    wait_for(lambda: _can_lead(local), 10, "the hub to give the journal's lock back")
    local.close()


def _can_lead(sink: JournalSink) -> bool:
    try:
        sink.lead()
    except JournalLocked:
        return False
    return True


def test_two_trainers_race_and_every_version_has_one_author(
    hub: Any, credentials: Credentials, byte_trainer: Any, journal_root: Path
) -> None:
    """Both use the lease of one id, as two trainers after a failover might: compare-and-swap alone has to hold."""
    sinks = [HubSink(hub.url, credentials) for _ in range(2)]
    token = sinks[0].lead()
    sinks[1].join(token)
    byte_trainer(sinks[0], credentials.run_key)
    won: list[dict[int, list[str]]] = [{}, {}]

    def race(number: int) -> None:
        sink = sinks[number]
        sink.lead = lambda: token  # type: ignore[method-assign]
        for attempt in range(12):
            racer = byte_trainer(sink, credentials.run_key, seed=100 * number + attempt)
            try:
                racer.publish(segments=2, size=2000)
            except (VersionConflict, RemoteRefused, VersionNotFound):
                continue
            won[number].update(racer.published)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    journal = Journal(journal_root, "run-1", credentials.run_key)
    newest = journal.newest()
    assert newest is not None and newest == len(won[0]) + len(won[1]) >= 1
    assert not won[0].keys() & won[1].keys()
    for version in range(1, newest + 1):
        manifest = journal.manifest(version, f"{version - 1}.fast")
        names = [ref.digest.hex() for ref in manifest.segments]
        assert names == (won[0] | won[1])[version]
        for ref in manifest.segments:
            journal.segment(version, f"{version - 1}.fast", ref)
    for sink in sinks:
        sink.close()


def test_ranks_on_other_hosts_join_and_put_their_own_segments(
    hub: Any, credentials: Credentials, byte_trainer: Any
) -> None:
    leader, other = HubSink(hub.url, credentials), HubSink(hub.url, credentials)
    trainer = byte_trainer(leader, credentials.run_key)
    other.join(leader.lead())
    refs = []
    for sink in (leader, other):
        draft = sink.open(1, "0.fast")
        refs += [draft.put(body) for body in trainer.bodies(5, 20_000)]
        draft.flush()
    leader.open(1, "0.fast").commit(trainer.manifest("delta", 1, [8, trainer.table[1]], refs))
    head = other.newest()
    assert head is not None and (head.version, head.fingerprints) == (1, (8, trainer.table[1]))
    stranger = HubSink(hub.url, credentials)
    with pytest.raises(JournalLocked):
        stranger.join("n" * 32)
    for sink in (stranger, other, leader):
        sink.close()


def test_a_head_that_does_not_add_up_is_refused(sink: HubSink, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.publish()
    assert sink.newest() is not None
    send = sink.send

    async def lying(method: str, path: str, **options: Any) -> bytes:
        body = await send(method, path, **options)
        return body.replace(str(trainer.table[0]).encode(), b"12345") if path.endswith("/head") else body

    monkeypatch.setattr(sink, "send", lying)
    with pytest.raises(CorruptData, match="state id"):
        sink.newest()


async def test_redirects_are_not_followed_and_no_token_leaks(credentials: Credentials) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HubClient(f"http://127.0.0.1:{port}", credentials) as client:
        with pytest.raises(RemoteRefused, match="302"):
            await client.feed(None, "e", 0.0)
    assert len(seen) == 1


_LEAD_AND_HANG = """
import sys
from sparrowrl.config import Credentials
from sparrowrl.transport import desk
from sparrowrl.transport.client import HubSink
sink = HubSink(sys.argv[1], Credentials.load(sys.argv[2]))
sink.lead()
draft = sink.open(1, "0.fast")
draft.put(b"half of a version")
draft.flush()
print("put", flush=True)
sys.stdin.read()
"""


def test_the_place_and_the_draft_of_a_killed_trainer_go_when_its_lease_ends(
    hub: Any, credentials: Credentials, credentials_file: Path, byte_trainer: Any, journal_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(desk, "LEASE_SECONDS", 5.0)  # the hub's view of it; the trainer renews every 10 s
    first = HubSink(hub.url, credentials)
    byte_trainer(first, credentials.run_key)
    first.close()
    process = subprocess.Popen(
        [sys.executable, "-c", _LEAD_AND_HANG, hub.url, str(credentials_file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"put\n"
        process.kill()
    hasty = HubSink(hub.url, credentials, lease_patience=0.0)
    with pytest.raises(JournalLocked):
        hasty.lead()
    hasty.close()
    with HubSink(hub.url, credentials, lease_patience=20.0) as successor:
        trainer = byte_trainer(successor, credentials.run_key)
        assert not Journal(journal_root, "run-1").drafts()
        assert trainer.publish() == 1
    names = [
        ref.digest.hex() for ref in Journal(journal_root, "run-1", credentials.run_key).draft_segments(1, "0.fast")
    ]
    assert sorted(names) == sorted(trainer.published[1])
