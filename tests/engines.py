"""What tests of engines share: tiny models, a trainer with a journal, a node directory, engines in this process."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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

Tensors = dict[str, torch.Tensor]


def make_model(folder: Path, kind: str) -> Tensors:
    """Write a random bf16 checkpoint that vLLM can load (it pads the vocabulary to 512); returns its tensors."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    cls = Qwen3Config if kind.startswith("qwen3") else LlamaConfig
    config = cls(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=kind.endswith("tied"),
        bos_token_id=0,
        eos_token_id=1,
    )
    config.architectures = ["Qwen3ForCausalLM" if cls is Qwen3Config else "LlamaForCausalLM"]
    names = AutoModelForCausalLM.from_config(config).named_parameters()
    random = torch.Generator().manual_seed(1)
    tensors = {name: (torch.randn(p.shape, generator=random) * 0.2).bfloat16() for name, p in names}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def save_checkpoint(source: Path, folder: Path, tensors: Tensors) -> Path:
    """A checkpoint with the configuration of `source` and other weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


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
        cls, root: Path, weights: Tensors, anchor_every: int = 0, credentials: Credentials | None = None
    ) -> Trainer:
        credentials = credentials or Credentials.new(RUN)
        root.mkdir(exist_ok=True)
        credentials.save(root / "token.json")
        sink = JournalSink(root / "journal", credentials)
        own = {name: t.clone() for name, t in weights.items()}
        return cls(root, credentials, own, Publisher(sink, own.items(), anchor_every=anchor_every), sink)

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
        self.node.next.write(
            NextArtifact(key, manifest.kind, manifest.base, target, tuple(names[:segments]), segments is None)  # type: ignore[arg-type]
        )
        return key


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
