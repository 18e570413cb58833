"""The demo's client of vLLM, against a scripted server that speaks its token-in, token-out route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web

from sparrowrl.errors import TransportError
from sparrowrl.examples.gsm8k_grpo.rollouts import Prompt, Rollouts
from sparrowrl.examples.gsm8k_grpo.tasks import Problem

PROMPTS = [Prompt(Problem("one?", Decimal(1)), (1, 2)), Prompt(Problem("two?", Decimal(2)), (3, 4))]


class Digits:
    """A tokenizer whose tokens are their own decimal text."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "#### " + "".join(str(token) for token in tokens)


class ScriptedServer:
    """Answers with as many tokens as `length`, stamped with `version`; `aborts` of its answers are aborted."""

    def __init__(self) -> None:
        self.version, self.aborts, self.requests, self.status = 0, 0, 0, 200
        self.running = self.most = 0
        self.spans: list[dict[str, Any]] | None = None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True and body["sampling_params"]["logprobs"] == 0
        if self.status != 200:
            return web.Response(status=self.status, text="engine is broken")
        self.requests += 1
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.01)
        reason = "abort" if self.aborts else "stop"
        self.aborts -= reason == "abort"
        token = self.requests % 3
        spans = self.spans or [{"version": str(self.version), "start": 0, "end": 2}]
        await response.write(self._piece([token], None, None))
        await response.write(self._piece([0], reason, spans))
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response

    def _piece(self, tokens: list[int], reason: str | None, spans: list[dict[str, Any]] | None) -> bytes:
        content = [{"token_id": token, "logprob": -0.5} for token in tokens]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": spans,
        }
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def sampling(server: ScriptedServer, in_flight: int = 4) -> AsyncIterator[Rollouts]:
    async with serving(server) as url:
        rollouts = Rollouts(url, PROMPTS, Digits(), group_size=3, in_flight=in_flight, max_tokens=2)
        task = asyncio.create_task(rollouts.run())
        try:
            yield rollouts
        finally:
            rollouts.close()
            await task


async def test_groups_are_whole_and_requests_stay_in_flight() -> None:
    server = ScriptedServer()
    async with asyncio.timeout(30), sampling(server) as rollouts:
        groups = await rollouts.take(2, oldest=0)
    assert server.most == 4
    for group in groups:
        assert len(group.completions) == 3
        assert group.oldest == 0
        assert group.teaches == (len({done.score.reward for done in group.completions}) > 1)
        for done in group.completions:
            assert len(done.tokens) == len(done.logprobs) == 2
            assert done.score.exact == (Decimal(done.text[5:]) == group.prompt.problem.answer)
    assert sum(tokens for _, tokens, _ in rollouts.pieces) == 2 * rollouts.finished["stop"]
    assert set(rollouts.finished) == {"stop"}


async def test_old_groups_are_dropped_and_counted() -> None:
    server = ScriptedServer()
    async with asyncio.timeout(30), sampling(server) as rollouts:
        await rollouts.take(1, oldest=0)
        server.version = 5
        groups = await rollouts.take(2, oldest=5)
        assert all(done.oldest == 5 for group in groups for done in group.completions)
        assert rollouts.stale >= 1


async def test_a_completion_that_two_versions_made_counts_as_the_older() -> None:
    server = ScriptedServer()
    server.spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    async with asyncio.timeout(30), sampling(server) as rollouts:
        (group,) = await rollouts.take(1, oldest=3)
    assert group.oldest == 3
    assert group.completions[0].newest == 4
    assert rollouts.crossed == rollouts.finished["stop"]


async def test_an_aborted_request_is_counted_and_made_again() -> None:
    server = ScriptedServer()
    server.aborts = 2
    async with asyncio.timeout(30), sampling(server) as rollouts:
        groups = await rollouts.take(1, oldest=0)
    assert all(len(done.tokens) == 2 for done in groups[0].completions)
    assert rollouts.finished["abort"] == 2


async def test_a_server_that_refuses_ends_the_sampling() -> None:
    server = ScriptedServer()
    server.status = 500
    async with serving(server) as url:
        rollouts = Rollouts(url, PROMPTS, Digits(), group_size=3, in_flight=2, max_tokens=2)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(rollouts.run(), 30)
    assert caught.group_contains(TransportError, match="expected HTTP 200, got 500: engine is broken")


@pytest.mark.parametrize(
    "spans", [[{"version": "default", "start": 0, "end": 2}], [{"version": "1", "start": 0, "end": 1}]]
)
async def test_tokens_without_a_version_are_refused(spans: list[dict[str, Any]]) -> None:
    server = ScriptedServer()
    server.spans = spans
    async with serving(server) as url:
        rollouts = Rollouts(url, PROMPTS, Digits(), group_size=3, in_flight=1, max_tokens=2)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(rollouts.run(), 30)
    assert caught.group_contains(TransportError)
