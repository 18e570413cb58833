"""What ranks of verl's real FSDP engines publish, against the whole tensors that verl itself would send."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("verl")

from safetensors import safe_open
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from helpers import assert_bits_equal
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.shard import FlatShard
from sparrowrl.errors import FrameworkUnsupported, LayoutError
from sparrowrl.verl_plugin import weights
from sparrowrl.verl_plugin.weights import named_shards

SCRIPT = Path(__file__).with_name("weights_rank.py")
TESTS = Path(__file__).parents[1]
CREDENTIALS = Credentials("run", bytes(range(32)), "reader", "writer")

IN_PLACE = [
    *("1:fsdp2", "1:fsdp1-moe"),
    *("2:fsdp2", "2:fsdp2-offload", "2:fsdp2-names", "2:fsdp1", "2:fsdp1-offload", "2:fsdp1-orig", "2:fsdp1-names"),
    *("3:fsdp2-moe", "3:fsdp1-moe"),
]
MERGED = ["2:fsdp2-merged", "2:fsdp1-merged"]
ADAPTERS = ["2:fsdp2-adapters", "2:fsdp1-adapters"]
REPLICAS = ["4:fsdp2-hybrid", "4:fsdp1-hybrid", "2:fsdp2-replicas"]


def start(folder: Path, scenarios: list[str]) -> Path:
    """Run as many ranks as the scenarios need through them, to their end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "sparrowrl.examples.gsm8k_grpo.verl.cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    command = [sys.executable, str(SCRIPT), str(folder), *scenarios]
    ranks = range(max(int(scenario.split(":")[0]) for scenario in scenarios))
    logs = [(folder / f"{rank}.log").open("w") for rank in ranks]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=logs[rank], stderr=logs[rank])
        for rank in ranks
    ]
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    assert codes == [0 for _ in ranks], "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in ranks)
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("ranks"), [*IN_PLACE, *MERGED, *ADAPTERS])


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("four_ranks"), REPLICAS)


def seen(folder: Path, scenario: str) -> list[dict[str, Any]]:
    return [
        json.loads((folder / scenario / f"rank-{rank}.json").read_text()) for rank in range(int(scenario.split(":")[0]))
    ]


def check_bits(folder: Path, scenario: str) -> dict[str, torch.Tensor]:
    """Every version has exactly the tensors that verl would have sent then; the newest of them."""
    history = torch.load(folder / scenario / "history.pt")
    journal = Journal(folder / scenario / "journal", "run", CREDENTIALS.run_key)
    assert journal.versions() == [0, 1, 2]
    assert [spec.name for spec in journal.layout().tensors] == sorted(history[0])
    for version, base in ((0, history[0]), (1, history[0]), (2, None)):  # by fingerprints, by the delta, by the anchor
        got = materialize(journal, version, base)
        for name, expected in history[version].items():
            assert_bits_equal(got[name], expected)
    for before, after in pairwise(history):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    return history[-1]


def names_in_checkpoint(folder: Path, model: str) -> list[str]:
    with safe_open(folder / model / "model.safetensors", "pt") as file:
        return sorted(file.keys())


@pytest.mark.parametrize("scenario", IN_PLACE)
def test_shards_are_read_in_place_and_make_up_what_verl_would_send(ranks, scenario):
    whole = check_bits(ranks, scenario)
    every = seen(ranks, scenario)
    assert [rank["collectives"] for rank in every] == [[0, 0, 0]] * len(every)
    assert len(every) == 1 or every[0]["of_the_stream"] > len(every)  # what counts them sees verl's own
    if "names" in scenario:
        return
    assert sorted(whole) == names_in_checkpoint(ranks, "tied" if scenario.endswith(("fsdp1", "fsdp2")) else "moe")
    assert sum(rank["elements"] for rank in every) == sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize("scenario", ["2:fsdp2-names", "2:fsdp1-names"])
def test_names_and_buffers_are_those_of_a_saved_checkpoint(ranks, scenario):
    whole = check_bits(ranks, scenario)
    assert whole["decoder.counts"].tolist() == [0, 1, 2, 3, 4]
    assert all(name.startswith("decoder.") for name in whole)
    assert not any("cache" in name or "inv_freq" in name for name in whole)


@pytest.mark.parametrize("scenario", MERGED)
def test_of_merged_adapters_each_rank_keeps_its_slices(ranks, scenario):
    whole = check_bits(ranks, scenario)
    assert sorted(whole) == names_in_checkpoint(ranks, "tied" if scenario == MERGED[0] else "moe")
    held = [rank["elements"] for rank in seen(ranks, scenario)]
    assert sum(held) == sum(tensor.numel() for tensor in whole.values())
    assert max(held) - min(held) <= len(whole)


@pytest.mark.parametrize("scenario", ADAPTERS)
def test_adapters_that_are_not_merged_are_refused(ranks, scenario):
    for rank in seen(ranks, scenario):
        assert rank["error"].startswith("FrameworkUnsupported: ") and "model.lora.merge=True" in rank["error"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", REPLICAS)
def test_replicas_hold_the_same_and_the_first_publishes(four_ranks, scenario):
    whole = check_bits(four_ranks, scenario)
    every = seen(four_ranks, scenario)
    assert sum(rank["elements"] for rank in every) == 2 * sum(tensor.numel() for tensor in whole.values())
    assert [rank["collectives"] for rank in every] == [[0, 0, 0]] * len(every)


# Without verl's workers.


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_config(model_type: str = "qwen3_moe", tied: bool = False) -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type, tie_word_embeddings=tied))


def fsdp_engine(model_type: str = "qwen3_moe") -> Any:
    return SimpleNamespace(module=torch.nn.Module(), model_config=model_config(model_type))


@given(
    kind=st.sampled_from(["gate_up_proj", "down_proj"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    model_type=st.sampled_from(["qwen3_moe", "gpt_oss"]),
)
def test_ranges_of_all_experts_become_ranges_of_each(kind, shape, cuts, model_type):
    experts, rows, columns = shape
    whole = torch.arange(experts * 2 * rows * columns).reshape(experts, 2 * rows, columns)
    name = f"model.layers.0.mlp.experts.{kind}"
    expected = {piece: torch.full(tensor.shape, -1) for piece, tensor in unfuse_moe_params([(name, whole)], model_type)}
    ends = [0, *sorted(int(cut * whole.numel()) for cut in cuts), whole.numel()]
    for start, end in pairwise(ends):
        held = {name: FlatShard(tuple(whole.shape), start, whole.reshape(-1)[start:end])}
        given = dict(weights._in_checkpoint(held, fsdp_engine(model_type)))
        assert list(given) == list(expected)
        for piece, shard in given.items():
            assert shard.shape == tuple(expected[piece].shape)
            filled = expected[piece].reshape(-1)[shard.start : shard.start + shard.local.numel()]
            assert len(filled) == shard.local.numel() and bool((filled == -1).all())
            filled.copy_(shard.local)
    for piece, tensor in unfuse_moe_params([(name, whole)], model_type):
        assert_bits_equal(expected[piece], tensor)


def test_experts_that_are_cut_across_are_refused_by_name():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(3, 2, 4)
        fused = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(3, 4, 4), stride=(16, 4, 1))
        held = {"model.layers.0.mlp.experts.down_proj": fused}
        with pytest.raises(LayoutError, match=r"layers.0.mlp.experts.down_proj: expected shards along its first dim"):
            list(weights._in_checkpoint(held, fsdp_engine()))


class StreamingEngine:
    """An engine that gathers as it exports, one tensor at a time into the same memory."""

    def __init__(self, whole: dict[str, torch.Tensor], tied: bool, adapters: Any = None) -> None:
        self.model_config = model_config("qwen3", tied)
        self._whole, self._adapters = whole, adapters

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        return self._stream(), self._adapters

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._whole.items():
            memory = tensor.clone()
            yield name, memory
            memory.fill_(-1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_of_a_stream_of_whole_tensors_each_rank_keeps_its_slices(world, tied):
    shapes = {"model.embed_tokens.weight": (5, 7), "model.norm.weight": (2,), "scale": (), "lm_head.weight": (5, 7)}
    whole = {name: torch.rand(shape) for name, shape in shapes.items()}
    rebuilt = {name: torch.zeros(math.prod(shape)) for name, shape in shapes.items()}
    for rank in range(world):
        with as_rank(rank, world):
            held = dict(named_shards(StreamingEngine(whole, tied)))
        assert list(held) == [name for name in whole if not (tied and name == "lm_head.weight")]
        for name, shard in held.items():
            assert shard.shape == shapes[name] and shard.local.untyped_storage().nbytes() == shard.local.nbytes
            assert shard.local.numel() <= math.ceil(whole[name].numel() / world)
            rebuilt[name][shard.start : shard.start + shard.local.numel()] += shard.local
    for name in held:
        assert_bits_equal(rebuilt[name].reshape(shapes[name]), whole[name])


def test_a_stream_without_the_adapters_is_refused():
    with pytest.raises(FrameworkUnsupported, match=r"set actor_rollout_ref.model.lora.merge=True"):
        list(named_shards(StreamingEngine({"w": torch.zeros(2)}, False, adapters={"r": 4})))
