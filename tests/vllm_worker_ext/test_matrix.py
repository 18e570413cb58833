"""Every model family at every kind of parallelism: twenty versions, each the bits of a fresh load on every rank.

With RECORD_ENGINES=1 in the environment the cells of `make matrix` run as well, and what was shown is written to
docs/engines.csv.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_records
import pytest
import torch
from engines import PROMPTS, Fetched, Trainer, forked_workers, generate, quick_starts
from zoo import FAMILIES, Tensors, make_model, save_checkpoint

from helpers import wait_for
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.transport.node import RankStatus

pytestmark = pytest.mark.vllm
Start = Callable[..., Any]
DENSITIES = (0.001, 0.01, 0.3, 1.0)
VERSIONS = 5  # in a row, of each density
RECORD = os.environ.get("RECORD_ENGINES") == "1"
# Bits of a weight that can change without an exponent that explodes; all of them in packed integers.
MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.int32: 31, torch.int8: 7}


@dataclass(frozen=True)
class Cell:
    """A model family, how its engine is spread over ranks, and the dtype or quantisation that the engine is told."""

    family: str
    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    dtype: str = ""
    quantization: str = ""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def engine(self) -> str:
        """How the engine differs from one of one rank in the checkpoint's dtype, in few words."""
        parts = [f"tp{self.tensor}"] if self.tensor > 1 else []
        parts += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        parts += ["ep"] if self.experts else []
        return "-".join(parts + [what for what in (self.dtype, self.quantization) if what])

    @property
    def name(self) -> str:
        return "-".join([self.family, self.engine] if self.engine else [self.family])

    @property
    def generates(self) -> bool:
        """vLLM's CPU build dies of a segmentation fault in its kernel at the first request of expert parallelism."""
        return not self.experts

    @property
    def arguments(self) -> dict[str, Any]:
        spread = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        experts = {"enable_expert_parallel": True} if self.experts else {}
        given = {"dtype": self.dtype, "quantization": self.quantization}
        told = {name: value for name, value in given.items() if value}
        extension = {"worker_extension_cls": "fresh.FreshExtension"}
        return {**FAMILIES[self.family].arguments, **spread, **experts, **told, **extension}

    def compares_logprobs(self, version: int) -> bool:
        """Whether to start a fresh engine on a version: the last of each density; of several ranks, the last of all."""
        last = version == len(DENSITIES) * VERSIONS
        return self.generates and (last if self.ranks > 1 else version % VERSIONS == 0)


def change(weights: Tensors, fraction: float, random: torch.Generator) -> None:
    """Give about this fraction of the weights other bits of the mantissa: each of those changes, and none explodes."""
    for name, tensor in weights.items():
        if name.endswith("_shape"):  # of a packed weight: no weight itself
            continue
        bits = tensor.view(INT_OF_WIDTH[tensor.element_size()])
        other = torch.randint(1, 1 << MANTISSA[tensor.dtype], bits.shape, generator=random, dtype=bits.dtype)
        bits ^= other * (torch.rand(bits.shape, generator=random) < fraction)


class Followed:
    """An engine of some ranks, its trainer, and what an agent would have fetched; driven by collective RPCs."""

    def __init__(self, cell: Cell, llm: Any, folder: Path, weights: Tensors, root: Path) -> None:
        self.cell, self.llm, self.folder, self.root = cell, llm, folder, root
        self.trainer = Trainer.begin(root / "trainer", weights, wire_dtype=FAMILIES[cell.family].wire_dtype)
        self.fetched = Fetched(root / "node", self.trainer)
        self._random = torch.Generator().manual_seed(2)
        self._calls = 0

    def ask(self, method: str, *args: str) -> list[Any]:
        """The ranks' replies."""
        self._calls += 1
        return list(self.llm.collective_rpc(f"sparrow_{method}", args=(self._calls, *args)))

    def call(self, method: str, *args: str) -> None:
        """Every rank must answer this call, and that it is well."""
        replies = self.ask(method, *args)
        assert [(r["rank"], r["call_id"]) for r in replies] == [(n, self._calls) for n in range(self.cell.ranks)]
        assert all(r["ok"] and r["condition"] == "exact" for r in replies), f"{replies}, {self._errors()}"

    @property
    def node_and_token(self) -> tuple[str, str]:
        return str(self.fetched.node.root), str(self.trainer.root / "token.json")

    def attach(self) -> None:
        self.call("attach", *self.node_and_token)

    def advance(self, version: int, fraction: float) -> Path:
        """Publish, stage and activate one version; returns a checkpoint of it."""
        weights = self.trainer.weights
        change(weights, fraction, self._random)
        FAMILIES[self.cell.family].keep_tied(weights)
        self.trainer.publisher.publish(weights.items())
        key = self.fetched.offer(version, f"{version - 1}.fast")
        wait_for(lambda: self._staged(key), 60, f"{key} to be staged by every rank")
        self.call("activate", key)
        return save_checkpoint(self.folder, self.root / f"v{version}", weights)

    def classes(self) -> dict[str, set[str]]:
        """Each class of checkpoint tensors, on whatever rank; direct: those that are nothing else anywhere."""
        ranks = self.llm.collective_rpc("fresh_classes")
        found = {kind: set().union(*(rank[kind] for rank in ranks)) for kind in ranks[0]}
        found["direct"] -= found["opaque"] | found["alias"]
        return found

    def _staged(self, key: str) -> bool:
        assert not self._errors(), self._errors()
        return all(status is not None and status.staged == key for status in self._statuses())

    def _statuses(self) -> list[RankStatus | None]:
        return [self.fetched.node.rank(rank).read() for rank in range(self.cell.ranks)]

    def _errors(self) -> list[str]:
        found = [status.error for status in self._statuses() if status is not None]
        return [error.message for error in found if error is not None]

    def assert_fresh(self, path: Path) -> None:
        """Every runtime tensor of every rank has the bits that vLLM's own loader makes of the checkpoint."""
        assert self.llm.collective_rpc("fresh_differences", args=(str(path),)) == [{}] * self.cell.ranks


def _make_head(model: Any) -> None:
    model.heads = [model.lm_head.weight.float()]


def _use_head(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return (hidden_states.float() @ model.heads[0].T)[..., : model.config.vocab_size]


@pytest.fixture
def float_head(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """float_head(): Llama models of this process compute logits with a float32 copy of their output head."""

    def patch() -> None:
        from vllm.model_executor.models.llama import LlamaForCausalLM

        monkeypatch.setattr(LlamaForCausalLM, "process_weights_after_loading", _make_head, raising=False)
        monkeypatch.setattr(LlamaForCausalLM, "compute_logits", _use_head)

    return patch


@pytest.fixture
def spread(
    engine: Start, float_head: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Cell, Path], Any]]:
    """spread(cell, folder) -> an engine of the cell."""

    def start(cell: Cell, folder: Path) -> Any:
        monkeypatch.setenv("SPARROWRL_UNUSED", FAMILIES[cell.family].unused)
        if cell.family == "llama-head":
            float_head()
        with forked_workers():
            llm = engine(folder, **cell.arguments)
        if cell.pipeline > 1:
            llm.collective_rpc("fresh_warm_up")
        return llm

    with quick_starts():
        yield start


def _stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


FAST = [Cell("qwen3-both"), Cell("qwen3-moe"), Cell("qwen3", tensor=2)]
SLOW = [
    *(Cell(f) for f in ("llama-head", "gpt2", "phi3", "gemma2", "gpt-oss", "deepseek-v2", "mamba2", "qwen3-next")),
    *(Cell(f, tensor=2) for f in ("qwen3-tied", "llama-470", "qwen3-moe", "deepseek-v2")),
    Cell("qwen3", tensor=4),
    Cell("qwen3", pipeline=2),
    Cell("llama", tensor=2, pipeline=2),
    Cell("qwen3-moe", tensor=2, experts=True),
    Cell("qwen3", dtype="float32"),
    Cell("qwen3-wire32", dtype="bfloat16"),
    Cell("qwen3", quantization="fp8_per_channel"),
    Cell("qwen3-w4"),
]
MATRIX = [
    *(
        Cell(f)
        for f in (
            "qwen3",
            "qwen3-tied",
            "qwen3-equal",
            "llama",
            "llama-tied",
            "llama-unused",
            "llama-470",
            "qwen2",
            "gemma3",
        )
    ),
    *(Cell(f) for f in ("qwen3-moe-stacked", "mixtral", "llama4", "deepseek-v3")),
    *(Cell(f) for f in ("lfm2", "falcon-h1", "granite-moe-hybrid")),
    *(Cell(f, tensor=2) for f in ("gpt2", "phi3")),
    *(Cell(f, tensor=4) for f in ("qwen3-tied", "mixtral")),
    Cell("qwen3-tied", pipeline=2),
    Cell("qwen3-moe-stacked", tensor=4, experts=True),
    Cell("qwen3", dtype="float16"),
    Cell("qwen3-moe", dtype="float32"),
    Cell("qwen3-f32", dtype="bfloat16"),
    Cell("qwen3-wire32", dtype="float32"),
    Cell("qwen3-tied", quantization="fp8_per_channel"),
    Cell("qwen3", tensor=2, quantization="fp8_per_channel"),
    Cell("qwen3-w4", tensor=2),
    Cell("qwen3-wire32", tensor=2, dtype="bfloat16"),
]
ONLY_RECORDED = pytest.mark.skipif(not RECORD, reason="a cell of `make matrix`")
CELLS = [
    *(pytest.param(cell, id=cell.name) for cell in FAST),
    *(pytest.param(cell, id=cell.name, marks=pytest.mark.slow) for cell in SLOW),
    *(pytest.param(cell, id=cell.name, marks=[pytest.mark.slow, ONLY_RECORDED]) for cell in MATRIX),
]


@pytest.mark.parametrize("cell", CELLS)
def test_twenty_versions_are_each_a_fresh_load(
    cell: Cell, spread: Callable[[Cell, Path], Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "model"
    weights = make_model(folder, cell.family)
    llm = spread(cell, folder)
    followed = Followed(cell, llm, folder, weights, tmp_path)
    followed.attach()
    followed.assert_fresh(folder)
    classes, runtime = followed.classes(), llm.collective_rpc("fresh_names")
    outputs: dict[Path, Any] = {}
    for version in range(1, len(DENSITIES) * VERSIONS + 1):
        path = followed.advance(version, DENSITIES[(version - 1) // VERSIONS])
        followed.assert_fresh(path)
        if cell.compares_logprobs(version):
            llm.reset_prefix_cache()  # left to the caller of the RPCs
            outputs[path] = generate(llm, PROMPTS)
    followed.call("audit")
    _stop(llm)
    followed.fetched.node.remove()
    for path, output in outputs.items():
        fresh = spread(cell, path)
        assert generate(fresh, PROMPTS) == output
        _stop(fresh)
    assert len({str(output) for output in outputs.values()}) == len(outputs)
    if RECORD:
        counts = {kind: len(names) for kind, names in classes.items()}
        record(cell, {**counts, "runtime": sum(map(len, runtime)), "logprobs": len(outputs)}, request.node.nodeid)


def record(cell: Cell, counts: dict[str, int], test: str) -> None:
    import vllm

    engine_records.write(
        {
            "vllm": str(vllm.__version__).split("+")[0],
            "cell": cell.name,
            "family": cell.family,
            "engine": cell.engine,
            "ranks": str(cell.ranks),
            **{name: str(count) for name, count in counts.items()},
            "densities": " ".join(map(str, DENSITIES)),
            "versions": str(len(DENSITIES) * VERSIONS),
            "command": f"RECORD_ENGINES=1 pytest '{test}'",
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        pytest.param(
            Cell("qwen3-w8"),
            "handler_tensor",  # vLLM's CPU build packs 8-bit integers into memory that no tensor shows
            marks=pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX it packs them into tensors"),
        ),
        (Cell("qwen3-f32", dtype="float32"), "got others"),  # bf16 cannot say what this engine holds
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else "",
)
def test_what_cannot_be_kept_exact_is_refused(
    cell: Cell, words: str, spread: Callable[[Cell, Path], Any], tmp_path: Path
) -> None:
    weights = make_model(tmp_path / "model", cell.family)
    followed = Followed(cell, spread(cell, tmp_path / "model"), tmp_path / "model", weights, tmp_path)
    (reply,) = followed.ask("attach", *followed.node_and_token)
    assert not reply["ok"] and reply["condition"] == "unknown"
    assert reply["error"]["error"] == "PlacementError" and words in reply["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [Cell("deepseek-v2"), Cell("qwen3", tensor=2)], ids=lambda cell: cell.name)
def test_one_flipped_bit_anywhere_is_named(cell: Cell, spread: Callable[[Cell, Path], Any], tmp_path: Path) -> None:
    """The comparison that the matrix rests on sees every runtime tensor."""
    make_model(tmp_path, cell.family)
    llm = spread(cell, tmp_path)
    for name in llm.collective_rpc("fresh_names")[0]:
        llm.collective_rpc("fresh_flip", args=(name, 0))
        assert all(name in found for found in llm.collective_rpc("fresh_differences", args=(str(tmp_path),)))
        llm.collective_rpc("fresh_flip", args=(name, 0))
    assert llm.collective_rpc("fresh_differences", args=(str(tmp_path),)) == [{}] * cell.ranks
