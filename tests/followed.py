"""An engine in this process that follows a trainer through a real hub and a real agent."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import Tensors, Trainer, core_of, save_checkpoint

from helpers import wait_for
from sparrowrl.vllm_worker_ext.follower import Follower

Start = Callable[..., Any]
BACKEND = {"backend": "sparrow"}
ENGINE_ID = "tested"


class Site:
    """A trainer with a hub over its journal, and an engine in this process that follows it."""

    def __init__(self, folder: Path, weights: Tensors, root: Path, start: Start, anchor_every: int = 0) -> None:
        self.folder, self.root, self._start = folder, root, start
        self.trainer = Trainer.begin(root / "trainer", weights, anchor_every)
        command = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--port", "0"]
        command += ["--journal", str(root / "trainer/journal"), "--credentials", str(root / "trainer/token.json")]
        self.hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.hub.stdout is not None
        self.url = self.hub.stdout.readline().strip()

    def engine(self, folder: Path | None = None, **arguments: Any) -> Any:
        self.arguments = arguments
        self.llm = self._start(folder or self.folder, weight_transfer_config=BACKEND, **arguments)
        return self.llm

    def fresh(self, weights: Tensors, name: str = "fresh", **arguments: Any) -> Any:
        return self._start(save_checkpoint(self.folder, self.root / name, weights), **arguments)

    @property
    def follower(self) -> Follower:
        follower = core_of(self.llm).sparrow
        assert isinstance(follower, Follower)
        return follower

    def reach(self, version: int) -> None:
        """Let an idle engine in this process take its steps until it has the version."""

        def there() -> bool:
            core_of(self.llm).step_fn()
            return self.follower.status.version == version

        wait_for(there, 60, f"version {version}")

    def ready(self) -> None:
        """Wait until an activation is due, without letting the engine step."""
        wait_for(lambda: bool(self.follower._jobs), 60, "an activation to be due")

    def request(self, kind: str) -> int:
        """Ask for an audit or export as the trainer's side does; returns the number of the request."""
        request = urllib.request.Request(
            f"{self.url}/runs/test/engines/{ENGINE_ID}/requests",
            json.dumps({"kind": kind}).encode(),
            {"Authorization": f"Bearer {self.trainer.credentials.writer}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(json.load(answer)["id"])

    def ask(self, kind: str) -> Any:
        """Ask for an audit or export, and let the engine answer."""
        number = self.request(kind)

        def answered() -> bool:
            core_of(self.llm).step_fn()
            return any(answer.id == number for answer in self.follower.status.answers)

        wait_for(answered, 60, f"an answer to {kind}")
        return next(answer for answer in self.follower.status.answers if answer.id == number)


class Runner:
    """Requests that are added and stepped by hand, with what has come out of each."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.engine, self._ids = llm, llm.llm_engine, itertools.count()
        self.outputs: dict[str, Any] = {}
        self.steps = 0
        self.samples: dict[tuple[str, int], Any] = {}  # a request's output has only those that got a token last

    def add(self, prompt: list[int], tokens: int, salt: str | None = None, adapter: Any = None, **sampling: Any) -> str:
        """Add a request, greedy unless `sampling` says otherwise; returns its name."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        usual = {"temperature": 0.0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        name = str(next(self._ids))
        inputs = TokensPrompt(prompt_token_ids=prompt)
        if salt is not None:
            inputs["cache_salt"] = salt
        self.engine.add_request(name, inputs, SamplingParams(**{**usual, **sampling}), lora_request=adapter)
        return name

    def alone(self, prompt: list[int], tokens: int, **request: Any) -> tuple[list[int], list[float], int]:
        """Tokens, logprobs and number of cached tokens of a request that nothing else runs beside."""
        assert not self.engine.has_unfinished_requests()
        name = self.add(prompt, tokens, **request)
        self.finish()
        return *self.result(name), self.outputs[name].num_cached_tokens

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps += 1
            for output in self.engine.step():
                name = output.request_id.split("-")[0]
                self.outputs[name] = output
                self.samples.update({(name, one.index): one for one in output.outputs})

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def result(self, name: str, sample: int = 0) -> tuple[list[int], list[float]]:
        one = self.samples[name, sample]
        ids = list(one.token_ids)
        return ids, [lp[t].logprob for t, lp in zip(ids, one.logprobs, strict=True)]
