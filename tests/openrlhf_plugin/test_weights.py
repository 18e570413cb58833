"""What a rank gives of OpenRLHF's actor: DeepSpeed engines on 1, 2 and 3 Gloo ranks, against what OpenRLHF saves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf")

from safetensors.torch import load_file

from helpers import assert_bits_equal
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.errors import LayoutError
from sparrowrl.openrlhf_plugin.checkpoint_names import Saved, saved_as

SCRIPT = Path(__file__).with_name("weights_rank.py")
TESTS = Path(__file__).parents[1]
EMBEDDING = "model.embed_tokens.weight"
RUN_KEY = bytes(range(32))

IN_PLACE = {
    1: ["zero2-moe", "zero3"],
    2: ["zero1", "zero2", "zero2-fp16", "zero3-moe", "zero3-persistent"],
    3: ["zero2-moe", "zero3"],
}
MORE = {1: ["lora"], 2: ["tensor-parallel"], 3: []}


def start(folder: Path, world: int, scenarios: list[str]) -> Path:
    """Run the ranks through the scenarios, to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": "0",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    command = [sys.executable, str(SCRIPT), str(folder), *scenarios]
    logs = [(folder / f"{rank}.log").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=logs[rank], stderr=logs[rank])
        for rank in range(world)
    ]
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()
    assert codes == [0] * world, "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(world))
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of so many ranks, which have run when it is asked for first."""

    @cache
    def run(world: int) -> Path:
        return start(tmp_path_factory.mktemp(f"ranks-{world}"), world, [*IN_PLACE[world], *MORE[world]])

    return run


def seen(folder: Path, scenario: str, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / scenario / f"rank-{rank}.json").read_text()) for rank in range(world)]


def check_bits(folder: Path, scenario: str) -> int:
    """Every version has the tensors, names and bits, that OpenRLHF saved then; the number of weights."""
    saved = [load_file(folder / scenario / f"saved-{step}" / "model.safetensors") for step in range(3)]
    if json.loads((folder / scenario / "saved-0" / "config.json").read_text())["tie_word_embeddings"]:
        for weights in saved:  # OpenRLHF saves a tied head where it gathers nothing; once is enough
            assert_bits_equal(weights.pop("lm_head.weight", weights[EMBEDDING]), weights[EMBEDDING])
    journal = Journal(folder / scenario / "journal", "run", RUN_KEY)
    assert journal.versions() == [0, 1, 2]
    assert [spec.name for spec in journal.layout().tensors] == sorted(saved[0])
    for version, base in ((0, saved[0]), (1, saved[0]), (2, None)):  # by fingerprints, by the delta, by the anchor
        got = materialize(journal, version, base)
        assert got.keys() == saved[version].keys()
        for name, expected in saved[version].items():
            assert_bits_equal(got[name], expected)
    assert any(not torch.equal(saved[1][name], saved[2][name]) for name in saved[0])
    return sum(tensor.numel() for tensor in saved[0].values())


@pytest.mark.parametrize(
    ("world", "scenario"),
    [
        pytest.param(world, each, marks=[pytest.mark.slow] if world == 3 else [])
        for world, some in IN_PLACE.items()
        for each in some
    ],
)
def test_shards_are_read_in_place_and_make_up_what_openrlhf_saves(
    ranks: Callable[[int], Path], world: int, scenario: str
) -> None:
    weights = check_bits(ranks(world), scenario)
    every = seen(ranks(world), scenario, world)
    assert all(sum(held) == weights for held in zip(*(each["held"] for each in every), strict=True))
    assert all(each["collectives"] == [0, 0, 0] for each in every)
    most, least = max(each["held"][0] for each in every), min(each["held"][0] for each in every)
    assert most - least < weights // 10  # nobody has much more to do than others


def test_a_tensor_parallel_trainer_is_gathered_and_each_rank_keeps_its_range(ranks: Callable[[int], Path]) -> None:
    weights = check_bits(ranks(2), "tensor-parallel")
    every = seen(ranks(2), "tensor-parallel", 2)
    assert sum(each["held"][0] for each in every) == weights
    assert all(count > 0 for each in every for count in each["collectives"])


def test_adapters_are_refused(ranks: Callable[[int], Path]) -> None:
    (only,) = seen(ranks(1), "lora", 1)
    assert only["error"].startswith("FrameworkUnsupported: expected no adapters")


def test_a_parameter_that_is_saved_as_no_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def revert(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ((name, tensor),) = weights.items()
        return {f"{name}.even": tensor[::2], f"{name}.odd": tensor[1::2]}

    import transformers.core_model_loading

    monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", revert)
    with pytest.raises(LayoutError, match=r"w\.even: expected a range of the elements of w \(4, 3\), got others"):
        saved_as(SimpleNamespace(), "w", (4, 3))
    assert saved_as(SimpleNamespace(), "w", (2, 3)) == [Saved("w.even", 0, (1, 3)), Saved("w.odd", 3, (1, 3))]
