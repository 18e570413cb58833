"""What changing the weights of a live vLLM engine costs, beside vLLM's own two ways to do it, on the same update.

    python benchmarks/apply.py [--repeats 5] [--models dense experts] [--ranks 1 2] [--requests 0 1 8 64] [--csv FILE]

Random bf16 weights, one thread a rank; artifacts are made by the publisher. `stage` is what the stager thread works
while the engine generates: decode, map, prove beforehand; `staged_bytes` is what it holds until the activation.
`activate` is the pause: scatter, read back, prove, agree with the other ranks. `audit` is all live weights proved anew.
`reload` is the whole checkpoint through vLLM's own reload path, from memory, and `patches` vLLM's
load_checkpoint_weight_patches with the same changes; neither proves anything, and for them the pause is the whole.
`gap` is the longest time between two tokens of the requests in flight less the usual (median) time, over the steps
during which the version was staged and activated (or in which the rival's call was made between two steps).
`experts` is a mixture of experts with 18,432 expert tensors; where vLLM packs them (as its CPU build does) they are
opaque: applied to a mirror, and reloaded. vLLM's own ways have no figures there: its patches cannot be applied to
packed experts, and its reload leaves them unpacked in packed memory, which our audit reports. Medians of the repeats,
in milliseconds. Every row ends with an audit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
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
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DENSITIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
UNDER_LOAD = 1e-2
WAYS = ("activate", "patches", "reload")


def main() -> None:
    """Measure each model with each number of ranks in a process of its own; print and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=["dense", "experts"], default=["dense", "experts"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", nargs="+", type=int, default=[0, 1, 8, 64])
    parser.add_argument("--csv", type=Path, default=RESULTS / "apply.csv")
    args = parser.parse_args()
    cells = [(model, ranks) for model in args.models for ranks in args.ranks]
    if len(cells) > 1:
        rest = ["--repeats", str(args.repeats), "--csv", str(args.csv), "--requests", *map(str, args.requests)]
        for model, ranks in cells:
            command = [sys.executable, __file__, "--models", model, "--ranks", str(ranks), *rest]
            subprocess.run(command, check=True)
        return
    ((model, ranks),) = cells
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0" if ranks == 1 else "1")
    with tempfile.TemporaryDirectory() as folder:
        rows = Bench(Path(folder), model, ranks).rows(args.repeats, args.requests)
    append(args.csv, rows)


class Bench:
    """One engine, the receivers of its ranks, and its trainer."""

    def __init__(self, root: Path, model: str, ranks: int) -> None:
        from vllm import LLM

        self.root, self.name, self.ranks = root, model, ranks
        self.weights = make_model(root / "model", model)
        self.llm = LLM(
            model=str(root / "model"),
            worker_extension_cls="sparrowrl.vllm_worker_ext.WorkerExtension",
            tensor_parallel_size=ranks,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=64,
            kv_cache_memory_bytes=256 << 20,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        credentials = Credentials.new(RUN)
        credentials.save(root / "token.json")
        self.publisher = Publisher(JournalSink(root / "journal", credentials), self.weights.items())
        self.node = NodeDirectory.create(f"benchmark-{os.getpid()}", root)
        self.calls = 0
        self.steps: list[float] = []
        shutil.copytree(root / "journal/runs", self.node.root / "runs", dirs_exist_ok=True)
        self.call("attach", str(self.node.root), str(root / "token.json"))

    def call(self, method: str, *args: str) -> float:
        """Milliseconds that a call of all workers takes. Exits if it fails."""
        self.calls += 1
        began = time.perf_counter()
        replies = self.llm.collective_rpc(f"sparrow_{method}", args=(self.calls, *args))
        took = 1000 * (time.perf_counter() - began)
        if any(not reply["ok"] or reply["condition"] != "exact" for reply in replies):
            raise SystemExit(f"{method}: {replies}")
        return took

    def rows(self, repeats: int, requests: list[int]) -> list[dict[str, Any]]:
        """One row for each density without requests, then one for each number of requests in flight."""
        cells = [(density, 0) for density in DENSITIES] if 0 in requests else []
        if self.ranks == 1:  # else the steps are made in another process
            cells += [(UNDER_LOAD, n) for n in requests if n]
        return [self.row(density, n, repeats) for density, n in cells]

    def row(self, density: float, requests: int, repeats: int) -> dict[str, Any]:
        """Publish and activate `repeats` versions of this density, and do the same again in vLLM's ways."""
        times: dict[str, list[float]] = {name: [] for name in ("stage", *WAYS, "audit")}
        gaps: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(repeats):
            patches = change(self.weights, density)
            done = self.publisher.publish(self.weights.items())
            self.add(requests)
            key = self.offer(done.version)
            status = self.staged(key)
            times["stage"].append(status.stage_ms)
            for way in WAYS:
                took = self.apply(way, key, patches)
                if took is None:
                    continue
                times[way].append(took)
                self.step(4)
                gaps[way] += [self.gap()] if requests else []
            self.end()
            times["audit"].append(self.call("audit"))
        row = {
            "model": self.name,
            "ranks": self.ranks,
            "tensors": len(self.weights),
            "weights": done.elements,
            "changed": done.changed,
            "density": density,
            "requests": requests,
            "payload_bytes": done.payload_bytes,
            "staged_bytes": status.staged_bytes,
        }
        for name, some in [*times.items(), *((f"{way}_gap", some) for way, some in gaps.items())]:
            row |= {f"{name}_ms": round(statistics.median(some), 2) if some else ""}
            row |= {f"{name}_ms_min": round(min(some), 2) if some else ""}
            row |= {f"{name}_ms_max": round(max(some), 2) if some else ""}
        print({name: value for name, value in row.items() if "_ms_" not in name}, flush=True)
        return {**row, "repeats": repeats, **context("torch", "vllm")}

    def apply(self, way: str, key: str, patches: list[Any]) -> float | None:
        """Milliseconds of one way to make the update; None where vLLM's way cannot be taken."""
        if way == "activate":
            return self.call("activate", key)
        if self.ranks > 1 or self.name == "experts":
            return None
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        if way == "reload":
            return timed(lambda: worker.reload_weights(weights_iterator=iter(self.weights.items())))
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        return timed(lambda: load_checkpoint_weight_patches(worker.get_model(), patches))

    # Requests in flight, stepped in this thread; the stager works beside it.

    def add(self, requests: int) -> None:
        """Begin requests that last for all ways, and let them settle."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True, detokenize=False)
        for n in range(requests):
            self.llm.llm_engine.add_request(
                f"{time.monotonic_ns()}-{n}", TokensPrompt(prompt_token_ids=[n + 2] * 8), sampling
            )
        self.step(8)
        self.steps.clear()

    def step(self, times: int) -> None:
        """Make steps, if there is something to generate, and note when each ended."""
        for _ in range(times):
            if self.llm.llm_engine.has_unfinished_requests():
                self.llm.llm_engine.step()
                self.steps.append(time.perf_counter())

    def gap(self) -> float:
        """The longest time between two steps less the median, in milliseconds; begins a new series."""
        between = [1000 * (b - a) for a, b in zip(self.steps, self.steps[1:], strict=False)]
        self.steps = self.steps[-1:]
        self.step(8)
        return max(between) - statistics.median(between)

    def end(self) -> None:
        """Let the requests go."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states))
        self.step(1)

    def offer(self, target: int) -> str:
        """Put a delta into the node directory, as the agent would."""
        key = f"runs/{RUN}/v/{target}/{target - 1}.fast"
        shutil.copytree(self.root / "journal" / key, self.node.root / key)
        names = tuple(path.stem for path in (self.node.root / key).glob("*.seg"))
        self.node.next.write(NextArtifact(key, "delta", target - 1, target, names, True))
        return key

    def staged(self, key: str) -> Any:
        """Generate, or wait, until all ranks have staged it, a minute at most; the status of the slowest."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            ranks = list(self.node.ranks().values())
            if len(ranks) == self.ranks and all(rank.staged == key for rank in ranks):
                return max(ranks, key=lambda rank: rank.stage_ms)
            if self.llm.llm_engine.has_unfinished_requests():
                self.step(1)
            else:
                time.sleep(0.002)
        raise SystemExit(f"{key} was not staged: {ranks}")


def make_model(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write a random checkpoint: 48 million dense weights, or 18,432 expert tensors of 38 million weights in all."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common = {"max_position_embeddings": 1024, "head_dim": 64, "num_key_value_heads": 4}
    if kind == "dense":
        sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
        config = Qwen3Config(**common, **sizes, num_attention_heads=8, tie_word_embeddings=True)
    else:
        sizes = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 48}
        experts = {"num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        config = Qwen3MoeConfig(**common, **sizes, **experts, num_attention_heads=4, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


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
