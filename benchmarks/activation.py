"""What an activation costs on a vLLM worker, by how much changed, beside vLLM's own two ways to change weights.

    python benchmarks/activation.py [--repeats 5] [--layers 8] [--csv FILE]

A Qwen3 of random bf16 weights in an engine in this process, on one thread; artifacts are made by the publisher. `stage`
is what the stager thread works while the engine generates: decode, map, prove beforehand. `activate` is the pause:
scatter, read back, prove. `audit` is all live weights proved anew. `reload` is the whole checkpoint through the model's
load_weights, from memory, and `patches` vLLM's load_checkpoint_weight_patches with the same changes; neither proves
anything, and for them the pause is the whole. Medians of the repeats, in milliseconds. Every row ends with an audit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, append, context

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.sink import JournalSink
from sparrowrl.transport.node import NextArtifact, NodeDirectory

RUN = "benchmark"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--csv", type=Path, default=RESULTS / "activation.csv")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        rows = Bench(Path(folder), args.layers).rows(args.repeats)
    append(args.csv, rows)


class Bench:
    """One engine, its receiver and its trainer."""

    def __init__(self, root: Path, layers: int) -> None:
        from vllm import LLM

        self.root = root
        self.weights = make_model(root / "model", layers)
        self.llm = LLM(
            model=str(root / "model"),
            worker_extension_cls="sparrowrl.vllm_worker_ext.WorkerExtension",
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            skip_tokenizer_init=True,
        )
        self.model: Any = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        credentials = Credentials.new(RUN)
        credentials.save(root / "token.json")
        self.publisher = Publisher(JournalSink(root / "journal", credentials), self.weights.items())
        self.node = NodeDirectory.create(f"benchmark-{os.getpid()}", root)
        self.calls = 0
        shutil.copytree(root / "journal/runs", self.node.root / "runs", dirs_exist_ok=True)
        self.call("attach", str(self.node.root), str(root / "token.json"))

    def call(self, method: str, *args: str) -> float:
        """Milliseconds that a call of the worker takes. Exits if it fails."""
        self.calls += 1
        began = time.perf_counter()
        (reply,) = self.llm.collective_rpc(f"sparrow_{method}", args=(self.calls, *args))
        took = 1000 * (time.perf_counter() - began)
        if not reply["ok"] or reply["condition"] != "exact":
            raise SystemExit(f"{method}: {reply}")
        return took

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        """One row for each density."""
        return [self.row(density, repeats) for density in (1e-4, 1e-3, 1e-2, 1e-1)]

    def row(self, density: float, repeats: int) -> dict[str, Any]:
        """Publish and activate `repeats` versions of this density, and do the same again in vLLM's ways."""
        times: dict[str, list[float]] = {name: [] for name in ("stage", "activate", "audit", "reload", "patches")}
        for _ in range(repeats):
            patches = change(self.weights, density)
            done = self.publisher.publish(self.weights.items())
            key = self.offer(done.version)
            status = self.staged(key)
            times["stage"].append(status.stage_ms)
            times["activate"].append(self.call("activate", key))
            times["patches"].append(timed(lambda patches=patches: self.patch(patches)))  # type: ignore[misc]
            times["reload"].append(timed(lambda: self.model.load_weights(self.weights.items())))
            times["audit"].append(self.call("audit"))
        row = {
            "weights": done.elements,
            "changed": done.changed,
            "density": density,
            "payload_bytes": done.payload_bytes,
        }
        for name, some in times.items():
            row |= {f"{name}_ms": round(statistics.median(some), 2)}
            row |= {f"{name}_ms_min": round(min(some), 2), f"{name}_ms_max": round(max(some), 2)}
        print(row)
        return {**row, "repeats": repeats, **context("torch", "vllm")}

    def patch(self, patches: list[Any]) -> None:
        """vLLM's own sparse update."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        load_checkpoint_weight_patches(self.model, patches)

    def offer(self, target: int) -> str:
        """Put a delta into the node directory, as the agent would."""
        key = f"runs/{RUN}/v/{target}/{target - 1}.fast"
        shutil.copytree(self.root / "journal" / key, self.node.root / key)
        names = tuple(path.stem for path in (self.node.root / key).glob("*.seg"))
        self.node.next.write(NextArtifact(key, "delta", target - 1, target, names, True))
        return key

    def staged(self, key: str) -> Any:
        """Wait until it is staged, a minute at most."""
        for _ in range(6000):
            status = self.node.rank(0).read()
            if status is not None and status.staged == key:
                return status
            time.sleep(0.01)
        raise SystemExit(f"{key} was not staged: {status}")


def make_model(folder: Path, layers: int) -> dict[str, torch.Tensor]:
    """Write a random checkpoint; 48 million weights with 8 layers."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def change(weights: dict[str, torch.Tensor], density: float) -> list[Any]:
    """Move a share of the weights by one bf16 step, as a trainer does; returns vLLM's patches for the same."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    patches = []
    for name, tensor in weights.items():
        flat = tensor.view(-1)
        indices = ((torch.rand(flat.numel()) < density) & (flat != 0)).nonzero().view(-1)  # a step below 0 is a NaN
        flat.view(torch.int16)[indices] += torch.randint(0, 2, (indices.numel(),), dtype=torch.int16) * 2 - 1
        if indices.numel():
            patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, flat[indices], indices))
    return patches


def timed(action: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
