"""What tests of engines share: tiny models, a trainer with a journal, a node directory, engines in this process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from zoo import Tensors as Tensors
from zoo import make_model as make_model
from zoo import save_checkpoint as save_checkpoint

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.sink import JournalSink
from sparrowrl.transport.node import NextArtifact, NodeDirectory

# Read by vLLM when it is imported or when an engine starts.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # else every engine in a process of vLLM 0.24 gives all of them a new root for block hashes
}
ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "seed": 0,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
EXTENSION = "sparrowrl.vllm_worker_ext.WorkerExtension"
MODELS = ["qwen3", "qwen3-tied", "llama", "llama-tied"]
RUN = "test"


@dataclass
class Trainer:
    """A real publisher with a journal of its own, and the weights that it published last."""

    root: Path
    credentials: Credentials
    weights: Tensors
    publisher: Publisher
    sink: JournalSink
    seed: int = 0

    @classmethod
    def begin(
        cls,
        root: Path,
        weights: Tensors,
        anchor_every: int = 0,
        credentials: Credentials | None = None,
        wire_dtype: torch.dtype | None = torch.bfloat16,
    ) -> Trainer:
        credentials = credentials or Credentials.new(RUN)
        root.mkdir(exist_ok=True)
        credentials.save(root / "token.json")
        sink = JournalSink(root / "journal", credentials)
        own = {name: t.clone() for name, t in weights.items()}
        publisher = Publisher(sink, own.items(), wire_dtype=wire_dtype, anchor_every=anchor_every)
        return cls(root, credentials, own, publisher, sink)

    def step(self, fraction: float = 0.02) -> Tensors:
        """Change some weights, publish them; returns a copy of them all."""
        self.seed += 1
        random = torch.Generator().manual_seed(self.seed)
        for t in self.weights.values():
            mask = torch.rand(t.shape, generator=random) < fraction
            t[mask] += (torch.randn(t.shape, generator=random) * 0.1).bfloat16()[mask]
        self.publisher.publish(self.weights.items())
        return {name: t.clone() for name, t in self.weights.items()}

    @property
    def journal(self) -> Journal:
        return Journal(self.root / "journal", RUN, self.credentials.run_key)


class Fetched:
    """A node directory filled by hand from a journal, as an agent would fill it."""

    def __init__(self, root: Path, trainer: Trainer) -> None:
        root.mkdir()
        self.node = NodeDirectory.create(f"e{os.getpid()}", root)
        self.trainer = trainer
        self._offers = 0
        source = trainer.root / "journal" / "runs" / RUN
        shutil.copytree(source / "layout", self.node.root / "runs" / RUN / "layout")
        self.copy(0, "origin")

    def copy(self, target: int, name: str) -> Path:
        """Fetch one artifact; returns its folder."""
        folder = f"runs/{RUN}/v/{target}/{name}"
        shutil.copytree(self.trainer.root / "journal" / folder, self.node.root / folder, dirs_exist_ok=True)
        return self.node.root / folder

    def offer(self, target: int, name: str, segments: int | None = None) -> str:
        """Fetch an artifact (or a draft's first `segments`) and say so in next.json; returns its key."""
        self.copy(target, name)
        manifest = self.trainer.journal.manifest(target, name)
        names = [ref.digest.hex() for ref in manifest.segments]
        key = f"runs/{RUN}/v/{target}/{name}"
        self._offers += 1
        known = (key, manifest.kind, manifest.base, target, tuple(names[:segments]), segments is None)
        self.node.next.write(NextArtifact(*known, fetch_ms=float(self._offers)))  # type: ignore[arg-type]
        return key


_contexts: list[Any] = []


def _lasting_context() -> Any:
    """A ZeroMQ context that is not collected: together with sockets that vLLM 0.29 leaves open, it may wait forever."""
    import zmq

    _contexts.append(zmq.Context())
    return _contexts[-1]


@contextmanager
def forked_workers() -> Iterator[None]:
    """Engines of several ranks start in seconds: vLLM forks their workers off one process that has imported it already.

    On the CPU it would spawn them, and each would import everything anew. The workers have the environment of the first
    engine that was started like this, and the engine's core stays in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0).
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor"])
    workers = mock.patch.object(multiproc_executor, "get_mp_context", lambda: context)
    with workers, mock.patch.object(shm_broadcast, "Context", _lasting_context):
        yield


@contextmanager
def quick_starts() -> Iterator[None]:
    """Engines of this process start sooner: no full collections, no other process that looks at the model's class."""
    from vllm.model_executor.models import registry

    here = mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect())
    with here, mock.patch.object(gc, "collect"):
        yield


def core_of(llm: Any) -> Any:
    """The engine core of an LLM in this process."""
    return llm.llm_engine.engine_core.engine_core


def worker_of(llm: Any) -> Any:
    """The worker of an LLM in this process."""
    return core_of(llm).model_executor.driver_worker.worker


def generate(llm: Any, prompts: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their logprobs."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    return [
        (
            list(o.outputs[0].token_ids),
            [lp[t].logprob for t, lp in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)],
        )
        for o in outputs
    ]


PROMPTS = [[2 + (7 * i * j) % 400 for j in range(40)] for i in (1, 2, 3)]
