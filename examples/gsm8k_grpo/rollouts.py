"""Sampling from the vLLM server, token ids in and out, with a fixed number of requests in flight at all times."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sparrowrl.errors import TransportError
from sparrowrl.examples.gsm8k_grpo.tasks import Problem, Score, messages, score

TEMPERATURE = 0.7
_TRIES = 3
_PAUSE_S = 1.0  # before another try
_SILENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem and the token ids that ask it."""

    problem: Problem
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request; the weights of versions `oldest` to `newest` sampled its tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    score: Score
    oldest: int
    newest: int


@dataclass(slots=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """The oldest version that sampled one of its tokens."""
        return min(completion.oldest for completion in self.completions)

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ: if not, all advantages are zero."""
        return len({completion.score.reward for completion in self.completions}) > 1


class Rollouts:
    """Keeps `in_flight` requests running and collects whole groups.

    `pieces` has, for every piece of every answer, its arrival (time.monotonic), the number of tokens, and the seconds
    since the piece before it (0 for the first). `finished` counts requests by finish reason, `crossed` those during
    which the weights changed, `stale` groups that nobody took in time.
    """

    def __init__(
        self, url: str, prompts: Sequence[Prompt], tokenizer: Any, group_size: int, in_flight: int, max_tokens: int
    ) -> None:
        self.pieces: list[tuple[float, int, float]] = []
        self.finished: Counter[str] = Counter()
        self.crossed = 0
        self.stale = 0
        self._url = f"{url}/inference/v1/generate"
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._in_flight = in_flight
        self._sampling = {"temperature": TEMPERATURE, "max_tokens": max_tokens, "logprobs": 0}
        self._slots = self._deal(prompts)
        self._ready: list[Group] = []
        self._changed = asyncio.Condition()
        self._closing = False

    async def run(self) -> None:
        """Sample until `close`, then finish what is in flight. Raises TransportError if the server fails for good."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as workers,
        ):
            for _ in range(self._in_flight):
                workers.create_task(self._work(session))

    def close(self) -> None:
        """Begin no more requests."""
        self._closing = True

    async def take(self, count: int, oldest: int) -> list[Group]:
        """`count` groups sampled by version `oldest` or newer.

        Groups whose rewards differ come first; only when three times as many as needed are there, others make up the
        number. Older groups are dropped and counted as stale.
        """
        async with self._changed:
            while True:
                fresh = [group for group in self._ready if group.oldest >= oldest]
                self.stale += len(self._ready) - len(fresh)
                self._ready = fresh
                fresh = sorted(fresh, key=lambda group: (group.teaches, group.oldest), reverse=True)
                enough = sum(group.teaches for group in fresh) >= count or len(fresh) >= 3 * count
                if enough:
                    self._ready = fresh[count:]
                    return fresh[:count]
                await self._changed.wait()

    def _deal(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Which group the next request belongs to: each prompt `group_size` times, round and round."""
        for prompt in itertools.cycle(prompts):
            group = Group(prompt)
            yield from itertools.repeat(group, self._group_size)

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while not self._closing:
            group = next(self._slots)
            group.completions.append(await self._completed(session, group.prompt))
            if len(group.completions) == self._group_size:
                async with self._changed:
                    self._ready.append(group)
                    self._changed.notify_all()

    async def _completed(self, session: aiohttp.ClientSession, prompt: Prompt) -> Completion:
        """One whole completion; a request that fails or is aborted is counted and made again."""
        for tries_left in reversed(range(_TRIES)):
            try:
                choices = await self._stream(session, prompt)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.finished["failed"] += 1
                if not tries_left:
                    raise TransportError(f"{self._url}: {type(error).__name__}: {error}") from error
                await asyncio.sleep(_PAUSE_S)
                continue
            reason = choices[-1]["finish_reason"] if choices else None
            self.finished[reason or "failed"] += 1
            if reason in ("stop", "length"):
                return self._completion(prompt, choices)
        raise TransportError(f"{self._url}: expected a completion, got an aborted request {_TRIES} times")

    async def _stream(self, session: aiohttp.ClientSession, prompt: Prompt) -> list[dict[str, Any]]:
        body = {"token_ids": prompt.tokens, "sampling_params": self._sampling, "stream": True}
        choices: list[dict[str, Any]] = []
        before = 0.0
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                text = " ".join((await response.text()).split())[:300]
                raise TransportError(f"{self._url}: expected HTTP 200, got {response.status}: {text}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[len(b"data: ") :])
                if "choices" not in piece:
                    raise TransportError(f"{self._url}: {str(piece)[:300]}")
                for choice in piece["choices"]:
                    now = time.monotonic()
                    self.pieces.append((now, len(choice["token_ids"]), now - before if before else 0.0))
                    before = now
                    choices.append(choice)
        return choices

    def _completion(self, prompt: Prompt, choices: list[dict[str, Any]]) -> Completion:
        tokens = [token for choice in choices for token in choice["token_ids"]]
        logprobs = [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]
        spans = choices[-1]["weight_versions"] or []
        if len(tokens) != len(logprobs) or sum(span["end"] - span["start"] for span in spans) != len(tokens):
            raise TransportError(
                f"{self._url}: expected a log-probability and a version for each of {len(tokens)} tokens, got "
                f"{len(logprobs)} and {spans}; this needs vLLM 0.32"
            )
        versions = [_version(span["version"]) for span in spans]
        self.crossed += len(spans) > 1
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(
            tuple(tokens), tuple(logprobs), text, score(text, prompt.problem), min(versions), max(versions)
        )


def _version(label: str) -> int:
    """The version behind vLLM's label for weights."""
    if not label.isdecimal():
        raise TransportError(f"the server says that weights {label!r} sampled a token: expected a version number")
    return int(label)


def prompts_of(problems: Sequence[Problem], tokenizer: Any, longest: int) -> list[Prompt]:
    """Tokenize problems through the chat template; those of more than `longest` tokens are left out."""
    made = []
    for problem in problems:
        chat = messages(problem)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) <= longest:
            made.append(Prompt(problem, tuple(ids)))
    return made
