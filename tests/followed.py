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

    def ask(self, kind: str) -> Any:
        """Ask for an audit or export as the trainer's side does, and let the engine answer."""
        request = urllib.request.Request(
            f"{self.url}/runs/test/engines/{ENGINE_ID}/requests",
            json.dumps({"kind": kind}).encode(),
            {"Authorization": f"Bearer {self.trainer.credentials.writer}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            number = json.load(answer)["id"]

        def answered() -> bool:
            core_of(self.llm).step_fn()
            return any(answer.id == number for answer in self.follower.status.answers)

        wait_for(answered, 60, f"an answer to {kind}")
        return next(answer for answer in self.follower.status.answers if answer.id == number)


class Runner:
    """Requests that are added and stepped by hand, with what has come out of each."""

    def __init__(self, llm: Any) -> None:
        self.engine, self.outputs, self._ids = llm.llm_engine, {}, itertools.count()

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
        name = str(next(self._ids))
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        return name

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.outputs[output.request_id.split("-")[0]] = output

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def result(self, name: str) -> tuple[list[int], list[float]]:
        one = self.outputs[name].outputs[0]
        ids = list(one.token_ids)
        return ids, [lp[t].logprob for t, lp in zip(ids, one.logprobs, strict=True)]
