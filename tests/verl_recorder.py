"""Imported by verl's processes in test runs (`VERL_USE_EXTERNAL_MODULES`): writes down what goes on, as JSON lines.

In the folder SPARROWRL_TEST_RECORDS: `trainer.jsonl` has a line a sync with the hash of every full tensor as verl's own
export gathers it, `replica-<n>.jsonl` what each engine reported (server.Report), `samples.jsonl` each completion. With
SPARROWRL_TEST_SEEDS each request gets a seed of its own, so that a run can be repeated.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import wrapt
from blake3 import blake3

FOLDER = Path(os.environ["SPARROWRL_TEST_RECORDS"])
SEEDED = "SPARROWRL_TEST_SEEDS" in os.environ


def _write(name: str, record: dict[str, Any]) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(record) + "\n")


@wrapt.when_imported("verl.experimental.separation.engine_workers")  # type: ignore[untyped-decorator]
def _record_trainer(module: ModuleType) -> None:
    """The worker class of all trainers with separate engines; it inherits `update_weights`."""
    worker_class = module.DetachActorWorker  # type: ignore[attr-defined]
    inherited = worker_class.update_weights

    @functools.wraps(inherited)  # with what verl's @register has attached
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        hashes = {name: _hash(weight) for name, weight in self.actor.engine.get_per_tensor_param()[0]}
        if self.rank == 0:
            _write("trainer.jsonl", {"global_steps": global_steps, "tensors": hashes})
        return await super(worker_class, self).update_weights(global_steps=global_steps, mode=mode)

    worker_class.update_weights = update_weights


def _hash(weight: torch.Tensor) -> str:
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    return blake3(bits.numpy().tobytes()).hexdigest()


@wrapt.when_imported("sparrowrl.verl_plugin.server")  # type: ignore[untyped-decorator]
def _record_reports(module: ModuleType) -> None:
    original = module.reach  # type: ignore[attr-defined]

    async def reach(server: Any, *arguments: Any) -> Any:
        report = await original(server, *arguments)
        _write(f"replica-{server.replica_rank}.jsonl", report)
        return report

    module.reach = reach  # type: ignore[attr-defined]


@wrapt.when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server")  # type: ignore[untyped-decorator]
def _record_samples(module: ModuleType) -> None:
    server_class = module.vLLMHttpServer  # type: ignore[attr-defined]
    original = server_class.generate

    @functools.wraps(original)
    async def generate(
        self: Any, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> Any:
        if SEEDED:
            told = json.dumps([list(map(int, prompt_ids)), int(others.get("priority", 0))])
            sampling_params = {**sampling_params, "seed": int.from_bytes(blake3(told.encode()).digest(length=6))}
        output = await original(self, prompt_ids, sampling_params, request_id, **others)
        sampled = {"prompt": list(map(int, prompt_ids)), "tokens": list(map(int, output.token_ids))}
        _write("samples.jsonl", {**sampled, "stop": output.stop_reason, "log_probs": output.log_probs})
        return output

    server_class.generate = generate
