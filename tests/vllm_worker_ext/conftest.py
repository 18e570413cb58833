"""Models and engines for the tests of this floor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Bench
from engines import ENGINE_ARGS, ENVIRONMENT, EXTENSION, Tensors, make_model
from followed import ENGINE_ID, Site, Start

from helpers import skip_before

Checkpoint = Callable[[str], tuple[Path, Tensors]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors]]:
    """checkpoint(kind) -> the folder of a tiny model and its weights; made once."""
    made: dict[str, tuple[Path, Tensors]] = {}

    def get(kind: str) -> tuple[Path, Tensors]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, make_model(folder, kind))
        return made[kind]

    return get


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """engine(folder, **arguments) -> a vllm.LLM in this process, shut down after the test.

    Unless it `packs`, it multiplies as one that follows: vLLM's CPU build has other kernels for others, which round in
    another way on CPUs with AMX.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    made: list[Any] = []

    def start(folder: Path, packs: bool = False, **arguments: Any) -> Any:
        from vllm import LLM

        if "quantization" in arguments:
            skip_before("0.29", "quantises at loading")
        if not packs:
            monkeypatch.setattr(_dispatcher(), "dispatch_cpu_unquantized_gemm", _as_if_it_followed)
        made.append(LLM(model=str(folder), **{**ENGINE_ARGS, **arguments}))
        return made[-1]

    yield start
    while made:
        made.pop().llm_engine.engine_core.shutdown()
    torch.set_default_dtype(torch.float32)  # which vLLM before 0.32 leaves changed if an engine fails to start
    _take_extensions_off()
    gc.collect()


def _dispatcher() -> Any:
    """vLLM's module, with our own wrapper in it, which stays when a test's is taken out."""
    from vllm.model_executor.layers import utils
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return utils


def _as_if_it_followed(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _take_extensions_off() -> None:
    """vLLM adds an extension to its worker class for good, and then no engine in this process can have another."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from sparrowrl.vllm_worker_ext.worker_extension import WorkerExtension

    CPUWorker.__bases__ = tuple(base for base in CPUWorker.__bases__ if not issubclass(base, WorkerExtension))


@pytest.fixture
def site(
    engine: Start, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def start(kind: str = "qwen3-tied", anchor_every: int = 0, **environment: str) -> Site:
        made.append(Site(*checkpoint(kind), tmp_path, engine, anchor_every))
        known = {
            "SPARROWRL_HUB": made[-1].url,
            "SPARROWRL_TOKEN_FILE": str(tmp_path / "trainer/token.json"),
            "SPARROWRL_ENGINE_ID": ENGINE_ID,
            "SPARROWRL_START_TIMEOUT": "60",
        }
        for name, value in {**known, **environment}.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield start
    for one in made:
        one.hub.terminate()
        one.hub.wait(20)


@pytest.fixture
def bench(
    engine: Start, checkpoint: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def start(kind: str = "qwen3-tied", anchor_every: int = 0) -> Bench:
        folder, weights = checkpoint(kind)
        llm = engine(folder, worker_extension_cls=EXTENSION)
        made.append(Bench(llm, folder, weights, tmp_path, anchor_every))
        return made[-1]

    yield start
    for one in made:
        one.receiver.close()
        one.fetched.node.remove()
