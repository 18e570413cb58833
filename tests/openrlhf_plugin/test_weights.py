"""What a rank gives of OpenRLHF's actor: DeepSpeed engines on 1, 2 and 3 Gloo ranks, against what OpenRLHF saves."""

from __future__ import annotations

import json
import math
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
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("openrlhf")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zoo import FAMILIES, make_model

from helpers import assert_bits_equal
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.errors import FrameworkUnsupported, LayoutError
from sparrowrl.openrlhf_plugin.checkpoint_names import Saved, saved_as
from sparrowrl.openrlhf_plugin.weights import ActorWeights

SCRIPT = Path(__file__).with_name("weights_rank.py")
TESTS = Path(__file__).parents[1]
EMBEDDING = "model.embed_tokens.weight"
RUN_KEY = bytes(range(32))

IN_PLACE = {
    1: ["zero2-moe", "zero3"],
    2: [
        *("zero1", "zero2", "zero2-fp16", "zero2-sleep"),
        *("zero3-moe", "zero3-persistent", "zero3-hpz", "zero3-sleep"),
    ],
    3: ["zero2-moe", "zero3"],
}
TENSOR_PARALLEL = {
    2: ["tensor-parallel", "tensor-parallel-tied", "tensor-parallel-drifting"],
    4: ["tensor-parallel", "tensor-parallel-drifting"],
}
MORE = {1: ["lora"]}


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
        scenarios = [each for some in (IN_PLACE, TENSOR_PARALLEL, MORE) for each in some.get(world, [])]
        return start(tmp_path_factory.mktemp(f"ranks-{world}"), world, scenarios)

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


def cases(scenarios: dict[int, list[str]]) -> pytest.MarkDecorator:
    """Scenarios with their number of ranks; more than two of these share the test machines' two cores."""
    return pytest.mark.parametrize(
        ("world", "scenario"),
        [
            pytest.param(world, each, marks=[pytest.mark.slow] if world > 2 else [])
            for world, some in scenarios.items()
            for each in some
        ],
    )


@cases(IN_PLACE)
def test_shards_are_read_in_place_and_make_up_what_openrlhf_saves(
    ranks: Callable[[int], Path], world: int, scenario: str
) -> None:
    weights = check_bits(ranks(world), scenario)
    every = seen(ranks(world), scenario, world)
    assert all(sum(held) == weights for held in zip(*(each["held"] for each in every), strict=True))
    assert all(each["collectives"] == [0, 0, 0] for each in every)
    most, least = max(each["held"][0] for each in every), min(each["held"][0] for each in every)
    assert most - least < weights // 10  # nobody has much more to do than others


@cases(TENSOR_PARALLEL)
def test_a_tensor_parallel_trainer_is_gathered_and_each_rank_keeps_its_range(
    ranks: Callable[[int], Path], world: int, scenario: str
) -> None:
    weights = check_bits(ranks(world), scenario)
    every = seen(ranks(world), scenario, world)
    assert all(sum(held) == weights for held in zip(*(each["held"] for each in every), strict=True))
    assert all(count > 0 for each in every for count in each["collectives"])


def test_adapters_are_refused(ranks: Callable[[int], Path]) -> None:
    (only,) = seen(ranks(1), "lora", 1)
    assert only["error"].startswith("FrameworkUnsupported: expected no adapters")


# Without DeepSpeed's engines.

FAMILIES_HERE = [
    *("llama", "gemma3", "gpt2", "phi3", "qwen3-tied", "qwen3-moe", "qwen3-moe-stacked", "qwen3-next", "mixtral"),
    *("gpt-oss", "deepseek-v2", "deepseek-v3", "granite-moe-hybrid", "lfm2", "mamba2"),
]


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_parameters_are_given_as_they_are_saved(family: str, tmp_path: Path) -> None:
    make_model(tmp_path / "made", family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=FAMILIES[family].dtype)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, parameter in model.named_parameters():
        for piece in saved_as(model, name, tuple(parameter.shape)):
            elements = parameter.detach().reshape(-1)[piece.begin : piece.begin + math.prod(piece.shape)]
            assert_bits_equal(elements.reshape(piece.shape), saved.pop(piece.name))
    buffers = [saved_as(model, name, tuple(buffer.shape))[0].name for name, buffer in model.named_buffers()]
    assert saved.keys() <= set(buffers)


def actor(module: Any, **attributes: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(module=module), **attributes)


@pytest.mark.parametrize(
    ("given", "zero_stage", "tensor_parallel_size", "message"),
    [
        (actor(SimpleNamespace(is_quantized=True)), 2, 1, r"got a quantized model \(--ds\.load_in_4bit"),
        (actor(SimpleNamespace(), is_vlm=True), 2, 1, "expected a text model, got a multimodal one"),
        (actor(SimpleNamespace()), 3, 2, r"--ds\.zero_stage 1 or 2 with --ds\.tensor_parallel_size 2, got 3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    given: Any, zero_stage: int, tensor_parallel_size: int, message: str
) -> None:
    with pytest.raises(FrameworkUnsupported, match=message):
        ActorWeights(given, zero_stage, tensor_parallel_size)


def partition(elements: int, of: int, device: str = "cpu") -> Any:
    """A ZeRO-3 partition of that many elements, of which so many are in memory."""
    tensor: Any = torch.zeros(elements, device=device)
    tensor.ds_numel = of
    return tensor


@pytest.mark.parametrize(
    ("held", "got"),
    [
        (None, "a parameter without one"),
        (partition(1, of=6), "1 of 6 elements on cpu"),  # as of a partition that is on a disk
        (partition(6, of=6, device="meta"), "6 of 6 elements on meta"),
    ],
)
def test_a_partition_that_is_elsewhere_is_refused_by_name(held: Any, got: str) -> None:
    module: Any = torch.nn.Linear(2, 3, bias=False)
    module.weight.ds_tensor = held
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with pytest.raises(LayoutError, match=f"weight: expected a ZeRO-3 partition in memory, got {got}"):
            list(ActorWeights(actor(module), 3, 1).shards())
    finally:
        dist.destroy_process_group()


Tensors = dict[str, torch.Tensor]


@pytest.fixture
def save_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, torch.Tensor], Tensors]], None]:
    """Has transformers save each parameter as what a function makes of it."""
    import transformers.core_model_loading

    def install(convert: Callable[[str, torch.Tensor], Tensors]) -> None:
        def revert(model: Any, weights: Tensors) -> Tensors:
            ((name, tensor),) = weights.items()
            return convert(name, tensor)

        monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", revert)

    return install


NO_RANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda w: w[:, ::2],
    "another order of rows": lambda w: w.flip(1),
    "transposed": lambda w: w.transpose(1, 2).contiguous(),
    "another order in rows": lambda w: torch.cat([w[..., 1::2], w[..., ::2]], -1),
    "interleaved in rows": lambda w: w.reshape(*w.shape[:-1], 2, -1).transpose(-1, -2).reshape(w.shape),
    "a part of each row": lambda w: w[..., : w.shape[-1] // 2],
    "other values": lambda w: w + 1,
    "a shape of its own": lambda w: w.reshape(2, 4, 2, 3),
}


@pytest.mark.parametrize("kind", NO_RANGES)
def test_a_parameter_that_is_saved_as_no_range_is_refused_by_name(
    save_as: Callable[[Callable[[str, torch.Tensor], Tensors]], None], kind: str
) -> None:
    save_as(lambda name, tensor: {f"{name}.made": NO_RANGES[kind](tensor)})
    with pytest.raises(LayoutError, match=r"^w.*: expected"):
        saved_as(SimpleNamespace(), "w", (2, 4, 6))


def test_ranges_of_whole_rows_are_found(save_as: Callable[[Callable[[str, torch.Tensor], Tensors]], None]) -> None:
    save_as(lambda name, tensor: {f"{name}.even": tensor[::2], f"{name}.odd": tensor[1::2]})
    with pytest.raises(LayoutError, match=r"w\.even: expected a range of the elements of w \(4, 3\), got others"):
        saved_as(SimpleNamespace(), "w", (4, 3))
    assert saved_as(SimpleNamespace(), "w", (2, 9)) == [Saved("w.even", 0, (1, 9)), Saved("w.odd", 9, (1, 9))]
    save_as(lambda name, tensor: dict(zip("ab", tensor.chunk(2), strict=True)))
    assert saved_as(SimpleNamespace(), "bias", (6,)) == [Saved("a", 0, (3,)), Saved("b", 3, (3,))]


def test_a_tensor_that_is_saved_of_two_parameters_is_refused_by_name(
    save_as: Callable[[Callable[[str, torch.Tensor], Tensors]], None],
) -> None:
    save_as(lambda name, tensor: {"qkv": tensor.clone()})
    module = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False) for name in "qk"})
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with pytest.raises(LayoutError, match=r"qkv: expected it to be saved of one .*, got q.weight and k.weight"):
            list(ActorWeights(actor(module), 2, 1).shards())
    finally:
        dist.destroy_process_group()
