"""Engines that start without a trainer, and follow when they are told to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ENGINE_ARGS, PROMPTS, Tensors, core_of, generate, worker_of
from followed import BACKEND, ENGINE_ID, Runner, Site
from masking import BANNED, mask
from safetensors.torch import load_file

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.errors import EngineUnsupported, StateError
from sparrowrl.transport.node import EngineStatus, NodeDirectory

pytestmark = pytest.mark.vllm
SAMPLING = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def late(site: Callable[..., Site], tmp_path: Path) -> Callable[..., Site]:
    """late(kind, ...) -> a site whose engines wait to be told."""
    (tmp_path / "exports").mkdir()

    def start(kind: str = "qwen3-tied", anchor_every: int = 0) -> Site:
        return site(kind, anchor_every, SPARROWRL_HUB="later", SPARROWRL_EXPORT_DIR=str(tmp_path / "exports"))

    return start


@pytest.fixture
def another() -> Iterator[Callable[..., Site]]:
    """another(site, weights, ...) -> one more run, on a hub of its own, for the engine of `site`."""
    made: list[Site] = []

    def start(site: Site, weights: Tensors, anchor_every: int = 0) -> Site:
        root = site.root / f"another-{len(made)}"
        root.mkdir()
        made.append(Site(site.folder, weights, root, site._start, anchor_every))
        if hasattr(site, "llm"):
            made[-1].llm = site.llm
        return made[-1]

    yield start
    for one in made:
        one.hub.terminate()
        one.hub.wait(20)


def settings(site: Site, **others: Any) -> dict[str, Any]:
    """What an engine is told, for it to follow the trainer of `site`."""
    known = {"hub": site.url, "credentials": as_told(site.trainer.credentials), "engine_id": ENGINE_ID}
    return {**known, "start_timeout": 60, **others}


def as_told(credentials: Credentials) -> dict[str, str]:
    return {"run": credentials.run, "run_key": credentials.run_key.hex(), "reader": credentials.reader}


def tell(site: Site, **others: Any) -> Any:
    """Tell the engine in this process."""
    return core_of(site.llm).sparrow_follow(settings(site, **others))


def other_weights(site: Site) -> Tensors:
    return {n: t + 1 if n.endswith("norm.weight") else t.clone() for n, t in site.trainer.weights.items()}


def node_directories() -> list[str]:
    """Those of engines in this process; other runs of these tests may have theirs."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"sparrowrl-{ENGINE_ID}-{os.getpid()}")]


# Engines in this process.


def test_an_engine_serves_nothing_before_it_is_told_and_then_the_newest(late: Callable[..., Site]) -> None:
    s = late()
    llm = s.engine()
    run = Runner(llm)
    name = run.add(PROMPTS[0], 12)
    with pytest.raises(StateError, match="sparrow_follow"):
        run.step()
    for _ in range(3):
        weights = s.trainer.step(0.3)
    answer = tell(s)
    assert answer == {"node_dir": str(s.follower._node.root), "version": 0, "condition": "exact", "error": None}
    run.finish()
    assert s.follower.status.version == 3 and [(a.base, a.version) for a in s.follower.status.activations] == [(0, 3)]
    fresh = Runner(s.fresh(weights))
    other = fresh.add(PROMPTS[0], 12)
    fresh.finish()
    assert run.result(name) == fresh.result(other)
    weights = s.trainer.step()
    s.reach(4)
    assert generate(llm, PROMPTS) == generate(s.fresh(weights, "next"), PROMPTS)
    assert s.ask("audit").ok
    llm.llm_engine.engine_core.shutdown()
    assert not node_directories()


def test_an_engine_without_weights_is_unknown_and_takes_an_anchor(late: Callable[..., Site], tmp_path: Path) -> None:
    s = late("qwen3", anchor_every=2)
    llm = s.engine(load_format="dummy")
    answer = tell(s)
    assert (answer["condition"], answer["error"]) == ("unknown", None)
    status = s.follower._node.engine.read()
    assert status is not None and status.condition == "unknown"
    assert status.error is not None and status.error.error == "FingerprintMismatch"
    s.trainer.step()
    weights = s.trainer.step()
    assert generate(llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)
    assert [(a.base, a.version, a.kind) for a in s.follower.status.activations] == [(None, 2, "anchor")]
    assert s.ask("export").ok
    exported = load_file(tmp_path / "exports" / f"{ENGINE_ID}-v2.safetensors")
    for name, tensor in weights.items():
        assert_bits_equal(exported[name], tensor)


def test_the_credentials_are_for_the_agent_and_nobody_else(
    late: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    s = late()
    s.engine()
    own = s.trainer.credentials
    assert tell(s, credentials={**as_told(own), "writer": own.writer})["error"] is None
    file = s.follower._node.root / "token.json"
    assert file.stat().st_mode & 0o777 == 0o600 and Credentials.load(file) == own.for_engines()
    process = Path(f"/proc/{s.follower._agent._process.pid}")
    known = (process / "cmdline").read_text() + (process / "environ").read_text() + caplog.text
    assert not [secret for secret in (own.reader, own.run_key.hex(), own.writer) if str(secret) in known]


def test_wrong_settings_are_answered_and_change_nothing(late: Callable[..., Site]) -> None:
    s = late()
    s.engine()
    assert tell(s)["error"] is None
    follower = s.follower
    wrong: list[dict[str, Any]] = [
        {"hub": "127.0.0.1:1"},
        {"hub": None},
        {"credentials": None},
        {"credentials": {"run": "test"}},
        {"in_flight": "stop"},
        {"engine_id": "a/b"},
        {"connections": 0},
        {"start_timeout": 1.5},
        {"audit_every": True},
        {"speed": 3},
    ]
    for change in wrong:
        answer = tell(s, **change)
        assert answer["error"]["error"] == "ConfigError" and next(iter(change)) in answer["error"]["message"]
        assert (answer["node_dir"], answer["version"], answer["condition"]) == ("", None, "unknown")
    assert core_of(s.llm).sparrow_follow("a hub")["error"]["error"] == "ConfigError"
    s.trainer.step()
    s.reach(1)
    assert s.follower is follower


def test_what_goes_wrong_is_answered_and_the_engine_can_be_told_again(
    late: Callable[..., Site], another: Callable[..., Site]
) -> None:
    s = late()
    s.engine()
    extra = another(s, {**s.trainer.weights, "model.extra": torch.ones(3, dtype=torch.bfloat16)})
    answer = tell(extra)
    assert answer["error"]["error"] == "PlacementError" and "model.extra" in answer["error"]["message"]
    answer = tell(s, hub=NOBODY, start_timeout=2)
    assert answer["error"]["error"] == "DeadlineExceeded" and NOBODY in answer["error"]["message"]
    began = time.monotonic()
    answer = tell(s, credentials={**as_told(s.trainer.credentials), "reader": "wrong"})
    assert answer["error"]["error"] == "Unauthorized" and time.monotonic() - began < 30
    assert not node_directories()
    assert tell(s)["error"] is None
    weights = s.trainer.step()
    s.reach(1)
    assert generate(s.llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)


@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_requests_go_on_when_the_engine_is_told_of_another_run(
    late: Callable[..., Site], another: Callable[..., Site], in_flight: str
) -> None:
    s = late("qwen3")
    s.engine()
    tell(s, in_flight=in_flight)
    weights = s.trainer.step(0.3)
    s.reach(1)
    run = Runner(s.llm)
    name = run.add(PROMPTS[0], 40)
    run.step(10)
    s.trainer.step()
    s.ready()
    if in_flight == "drain":
        run.step(2)  # the engine has begun to drain
    made = len(run.outputs[name].outputs[0].token_ids)
    goes_on = another(s, weights)
    newest = goes_on.trainer.step(0.3)
    answer = tell(goes_on, in_flight=in_flight)
    assert (answer["version"], answer["condition"], answer["error"]) == (0, "exact", None)
    later = run.add(PROMPTS[1], 12)
    run.finish()
    status = goes_on.follower.status
    assert status.version == 1 and [(a.version, a.requests_in_flight, a.aborted) for a in status.activations] == [
        (1, 1, 0)
    ]
    old = Runner(s.fresh(weights, "old"))
    before = old.add(PROMPTS[0], 40)
    old.finish()
    mine, expected = run.result(name)[1], old.result(before)[1]
    assert len(mine) == 40 and mine[:made] == expected[:made] and mine[made] != expected[made]
    alone = Runner(s.fresh(newest, "newest"))
    assert run.result(later)[0] == alone.alone(PROMPTS[1], 12)[0]


def test_an_engine_told_of_a_run_with_other_weights_waits_for_its_anchor(
    late: Callable[..., Site], another: Callable[..., Site]
) -> None:
    s = late("qwen3")
    s.engine()
    tell(s)
    run = Runner(s.llm)
    name = run.add(PROMPTS[0], 20)
    run.step(5)
    elsewhere = another(s, other_weights(s), anchor_every=1)
    answer = tell(elsewhere)
    assert (answer["condition"], answer["error"]) == ("unknown", None)
    weights = elsewhere.trainer.step()
    run.finish()
    assert [(a.version, a.kind) for a in elsewhere.follower.status.activations] == [(1, "anchor")]
    assert len(run.result(name)[0]) == 20
    assert generate(s.llm, PROMPTS) == generate(s.fresh(weights), PROMPTS)


def test_an_engine_that_is_no_good_fails_at_its_start(late: Callable[..., Site]) -> None:
    s = late()
    with pytest.raises(EngineUnsupported, match="a KV connector"):
        s.engine(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"})


def test_an_engine_without_the_backend_says_so(late: Callable[..., Site]) -> None:
    s = late()
    answer = core_of(s.fresh(s.trainer.weights)).sparrow_follow(settings(s))
    assert answer["error"]["error"] == "EngineUnsupported" and "sparrow" in answer["error"]["message"]


# An engine whose core is a process of its own.


class Served:
    """An engine with processes of its own, as verl has it, whose worker has another owner's extension."""

    def __init__(self, folder: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {**ENGINE_ARGS, "weight_transfer_config": BACKEND, "worker_extension_cls": "masking.Masking"}
        known |= {"distributed_executor_backend": "mp"}
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **known))
        self.node: NodeDirectory
        self._names = count()

    async def tell(self, site: Site, **others: Any) -> Any:
        call = self.llm.engine_core.call_utility_async("sparrow_follow", settings(site, **others))
        answer = await asyncio.wait_for(call, 120)
        if answer["node_dir"]:
            self.node = NodeDirectory.open(answer["node_dir"])
        return answer

    def ask(self, prompt: list[int], tokens: int) -> asyncio.Task[tuple[list[int], list[float]]]:
        """A request, and at its end its tokens and their logprobs."""
        return asyncio.create_task(self._answer(prompt, tokens))

    async def _answer(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inputs, sampling = TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=tokens, **SAMPLING)
        outputs = [output async for output in self.llm.generate(inputs, sampling, str(next(self._names)))]
        (one,) = outputs[-1].outputs
        ids = list(one.token_ids)
        return ids, [lp[t].logprob for t, lp in zip(ids, one.logprobs, strict=True)]

    async def turns(self) -> None:
        """Let the core take some turns of its loop."""
        for _ in range(20):
            await self.llm.engine_core.call_utility_async("is_scheduler_paused")

    async def until(self, condition: Callable[[EngineStatus], bool], what: str) -> EngineStatus:
        deadline = time.monotonic() + 60
        while not condition(status := self.node.engine.read() or EngineStatus()):
            assert time.monotonic() < deadline, f"waited 60 s for {what}: {status}"
            await asyncio.sleep(0.01)
        return status

    async def exported(self, site: Site, folder: Path, version: int) -> Tensors:
        number = site.request("export")
        status = await self.until(lambda status: any(a.id == number for a in status.answers), "the export")
        assert status.answers[-1].ok, status.answers[-1]
        return load_file(folder / f"{ENGINE_ID}-v{version}.safetensors")


async def test_a_served_engine_is_told_and_told_again(
    late: Callable[..., Site], another: Callable[..., Site], tmp_path: Path
) -> None:
    s = late()
    served = Served(s.folder)
    try:
        await served.llm.collective_rpc("mask_model")
        first = served.ask(PROMPTS[0], 12)
        # While nobody is there, the core answers other calls; and one who tells it something else is heard.
        nobody = asyncio.create_task(served.tell(s, hub=NOBODY, start_timeout=600))
        await served.turns()
        assert not first.done() and not nobody.done()
        unheard = await served.tell(s, hub=NOBODY, start_timeout=1)
        assert unheard["error"]["error"] == "DeadlineExceeded" and NOBODY in unheard["error"]["message"]
        assert (await nobody)["error"]["error"] == "StateError"
        wrong = await served.tell(s, credentials={**as_told(s.trainer.credentials), "reader": "wrong"})
        assert wrong["error"]["error"] == "Unauthorized"
        await served.turns()
        assert not first.done()

        weights = s.trainer.step(0.3)
        assert (await served.tell(s))["error"] is None
        fresh = s.fresh(weights)
        mask(worker_of(fresh).get_model())
        tokens, _ = answered = await first
        assert [answered] == generate(fresh, [PROMPTS[0]]) and not set(tokens) & set(BANNED)
        weights = s.trainer.step()
        await served.until(lambda status: status.version == 2, "version 2")
        exported = await served.exported(s, tmp_path / "exports", 2)
        for name, tensor in weights.items():
            assert_bits_equal(exported[name], tensor)

        goes_on = another(s, weights)
        running = [served.ask(prompt, 200) for prompt in PROMPTS]
        await served.turns()
        answer = await served.tell(goes_on)
        assert (answer["version"], answer["condition"]) == (0, "exact")
        goes_on.trainer.step()
        status = await served.until(lambda status: status.version == 1, "version 1 of the other run")
        assert status.activations[0].aborted == 0
        assert [len(tokens) for tokens, _ in await asyncio.gather(*running)] == [200] * len(PROMPTS)

        elsewhere = another(s, other_weights(s), anchor_every=1)
        assert (await served.tell(elsewhere))["condition"] == "unknown"
        waiting = served.ask(PROMPTS[1], 12)
        await served.turns()
        assert not waiting.done()
        weights = elsewhere.trainer.step()
        fresh = s.fresh(weights, "last")
        mask(worker_of(fresh).get_model())
        assert [await waiting] == generate(fresh, [PROMPTS[1]])
        exported = await served.exported(elsewhere, tmp_path / "exports", 1)
        for name, tensor in weights.items():
            assert_bits_equal(exported[name], tensor)
    finally:
        served.llm.shutdown()
    assert not served.node.root.exists()
