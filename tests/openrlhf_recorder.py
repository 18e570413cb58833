"""Imported by all processes of OpenRLHF test runs (PROCESS_MODULES): writes down what goes on, as JSON lines.

In the folder SPARROWRL_TEST_RECORDS: `trainer.jsonl` has a line a sync with the hash of every full tensor, as DeepSpeed
itself gathers it (and the version, where ours is the sync), `engine-<n>.jsonl` what each engine reported
(replica.Report), `samples.jsonl` each completion. With SPARROWRL_TEST_SEEDS a run can be repeated: prompts are
shuffled with a seed, each request has one of its own, and experiences do not stand in the order in which they ended.

SPARROWRL_TEST_SKIP=engine-1:3 has that engine skip the writes of version 3; SPARROWRL_TEST_HANG=engine-1:3 hang when
it is about to switch to it; its process is then in the file `hanging`.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

FOLDER = Path(os.environ["SPARROWRL_TEST_RECORDS"])
SEEDED = "SPARROWRL_TEST_SEEDS" in os.environ
SKIPPED = os.environ.get("SPARROWRL_TEST_SKIP", "")
HANGS = os.environ.get("SPARROWRL_TEST_HANG", "")


def _write(name: str, record: dict[str, Any]) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(record) + "\n")


def _hashes(trainer: Any) -> dict[str, str]:
    """Of every parameter, whole, in bfloat16. Called by all ranks."""
    import deepspeed
    import torch
    from blake3 import blake3

    found = {}
    for name, parameter in trainer.actor.model.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=trainer.args.ds.zero_stage == 3):
            bits = parameter.detach().to(torch.bfloat16).contiguous().view(torch.int16)
            found[name] = blake3(bits.numpy().tobytes()).hexdigest()
    return found


def _record_state(trainer: Any, version: int | None) -> None:
    import torch.distributed as dist

    hashes = _hashes(trainer)
    if dist.get_rank() == 0:
        _write("trainer.jsonl", {"version": version, "tensors": hashes})


@wrapt.when_imported("sparrowrl.openrlhf_plugin.trainer")  # type: ignore[untyped-decorator]
def _record_our_syncs(module: ModuleType) -> None:
    trainer_class = module.SparrowActorPPOTrainer  # type: ignore[attr-defined]
    original = trainer_class._send

    def send(self: Any) -> Any:
        sent = original(self)
        _record_state(self, sent["version"])
        return sent

    trainer_class._send = send


@wrapt.when_imported("openrlhf.trainer.ray.ppo_actor")  # type: ignore[untyped-decorator]
def _record_stock_syncs(module: ModuleType) -> None:
    trainer_class = module.ActorPPOTrainer  # type: ignore[attr-defined]
    original = trainer_class.broadcast_to_vllm

    @functools.wraps(original)
    def broadcast_to_vllm(self: Any) -> Any:
        _record_state(self, None)
        return original(self)

    trainer_class.broadcast_to_vllm = broadcast_to_vllm


@wrapt.when_imported("sparrowrl.job.replica")  # type: ignore[untyped-decorator]
def _record_reports(module: ModuleType) -> None:
    replica_class = module.Replica  # type: ignore[attr-defined]
    original = replica_class.reach

    async def reach(self: Any, *arguments: Any) -> Any:
        report = await original(self, *arguments)
        _write(f"{self.name}.jsonl", report)
        return report

    replica_class.reach = reach


@wrapt.when_imported("vllm.v1.engine.async_llm")  # type: ignore[untyped-decorator]
def _record_samples(module: ModuleType) -> None:
    llm_class = module.AsyncLLM  # type: ignore[attr-defined]
    original = llm_class.generate
    asked: Counter[tuple[int, ...]] = Counter()

    async def generate(self: Any, prompt: Any, sampling: Any, *arguments: Any, **others: Any) -> AsyncIterator[Any]:
        tokens = tuple(prompt["prompt_token_ids"])
        if SEEDED:
            from blake3 import blake3

            asked[tokens] += 1
            sampling.seed = int.from_bytes(blake3(json.dumps([tokens, asked[tokens]]).encode()).digest(length=6))
        last = None
        async for last in original(self, prompt, sampling, *arguments, **others):
            yield last
        if last is not None:
            made = last.outputs[0]
            _write("samples.jsonl", {"prompt": tokens, "tokens": list(made.token_ids), "stop": made.finish_reason})

    llm_class.generate = generate


@wrapt.when_imported("openrlhf.trainer.ppo_utils.samples_generator")  # type: ignore[untyped-decorator]
def _repeat_the_order(module: ModuleType) -> None:
    """OpenRLHF's controller shuffles prompts without a seed, and takes experiences as they come."""
    import torch

    if not SEEDED:
        return
    torch.manual_seed(0)
    generator_class = module.SamplesGenerator  # type: ignore[attr-defined]
    original = generator_class._generate_vllm

    def generate(self: Any, *arguments: Any, **others: Any) -> Any:
        experiences, *rest = original(self, *arguments, **others)
        experiences.sort(key=lambda each: each.sequences.tolist())
        return experiences, *rest

    generator_class._generate_vllm = generate


@wrapt.when_imported("sparrowrl.vllm_worker_ext.receiver")  # type: ignore[untyped-decorator]
def _skip_writes(module: ModuleType) -> None:
    if not SKIPPED:
        return
    from sparrowrl.vllm_worker_ext.changes import Write

    engine, version = SKIPPED.split(":")
    receiver_class = module.Receiver  # type: ignore[attr-defined]
    apply, do = receiver_class._apply, Write.do

    def skip(self: Any, staged: Any, event: str) -> None:
        if f"-{engine}-" in self._node.root.name and staged.manifest.target == int(version):
            Write.do = lambda write, live: None  # type: ignore[method-assign]
        try:
            apply(self, staged, event)
        finally:
            Write.do = do  # type: ignore[method-assign]

    receiver_class._apply = skip


@wrapt.when_imported("sparrowrl.vllm_worker_ext.follower")  # type: ignore[untyped-decorator]
def _hang(module: ModuleType) -> None:
    if not HANGS:
        return
    import threading

    engine, version = HANGS.split(":")
    follower_class = module.Follower  # type: ignore[attr-defined]
    original = follower_class._activate_now

    def activate(self: Any, ready: Any) -> None:
        if self._config.engine_id == engine and ready.manifest.target == int(version):
            (FOLDER / "hanging").write_text(str(os.getpid()))
            threading.Event().wait(600)
        original(self, ready)

    follower_class._activate_now = activate
