"""One rank of OpenRLHF's actor, trained by DeepSpeed on a CPU; test_weights.py starts several.

    weights_rank.py FOLDER SCENARIO...

Publishes what ActorWeights gives, at the start and after each of two training steps, and writes what it saw as JSON
into FOLDER/SCENARIO; rank 0 also has OpenRLHF save the model each time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_platform  # noqa: F401 - before what it is for

# isort: split
import torch
import torch.distributed as dist
from deepspeed.ops.adam import fused_adam
from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.deepspeed import deepspeed as strategy_module
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.ranks import SingleProcess, TorchRanks
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import SparrowError
from sparrowrl.openrlhf_plugin.weights import ActorWeights

CREDENTIALS = Credentials("run", bytes(range(32)), "reader", "writer")
STEPS = 2


@dataclass(frozen=True)
class Scenario:
    """A model of ours, and how OpenRLHF is to train it.

    `persistent`: ZeRO-3 keeps small parameters whole as well. `zpg`: ranks that hold secondary partitions together.
    `sleep`: what DeepSpeed need not have at hand is away while weights are read, as with --ds.enable_sleep. `drifting`:
    tensor-parallel ranks end up with other bits in parameters that they all have whole.
    """

    model: str
    zero_stage: int
    tensor_parallel_size: int = 1
    persistent: bool = False
    zpg: int = 1
    sleep: bool = False
    drifting: bool = False
    param_dtype: str = "bf16"
    lora_rank: int = 0


SCENARIOS = {
    "zero1": Scenario("untied", 1),
    "zero2": Scenario("tied", 2),
    "zero2-moe": Scenario("moe", 2),
    "zero2-fp16": Scenario("tied", 2, param_dtype="fp16"),
    "zero3": Scenario("tied", 3),
    "zero3-moe": Scenario("moe", 3),
    "zero3-persistent": Scenario("untied", 3, persistent=True),
    "zero3-hpz": Scenario("tied", 3, zpg=2),  # one of these a process: DeepSpeed makes its groups once
    "zero2-sleep": Scenario("tied", 2, sleep=True),
    "zero3-sleep": Scenario("tied", 3, sleep=True),
    "tensor-parallel": Scenario("untied", 2, tensor_parallel_size=2),
    "tensor-parallel-tied": Scenario("tied", 2, tensor_parallel_size=2),
    "tensor-parallel-drifting": Scenario("untied", 1, tensor_parallel_size=2, drifting=True),
    "lora": Scenario("tied", 2, lora_rank=4),
}


def make_models(folder: Path) -> None:
    """Checkpoints with sizes that do not divide among ranks."""
    small: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 32,
    }
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    configs = {
        "tied": Qwen3Config(**small, tie_word_embeddings=True),
        "untied": Qwen3Config(**small, tie_word_embeddings=False),
        "moe": Qwen3MoeConfig(**small, **experts, tie_word_embeddings=False),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / name)


def build(folder: Path, scenario: Scenario) -> tuple[Any, Any]:
    """OpenRLHF's actor and its strategy, made as its Ray actor makes them."""
    settings = SimpleNamespace(
        param_dtype=scenario.param_dtype,
        tensor_parallel_size=scenario.tensor_parallel_size,
        zero_stage=scenario.zero_stage,
        zpg=scenario.zpg,
    )
    args = SimpleNamespace(ds=settings, train=SimpleNamespace(dynamic_batch_enable=False), local_rank=-1)
    dp = dist.get_world_size() // scenario.tensor_parallel_size if dist.is_initialized() else 1
    strategy = DeepspeedStrategy(
        max_norm=1.0, micro_train_batch_size=1, train_batch_size=dp, zero_stage=scenario.zero_stage, args=args
    )
    strategy.setup_distributed()
    actor = Actor(
        str(folder / scenario.model),
        attn_implementation="eager",
        param_dtype=scenario.param_dtype,
        ds_config=strategy.get_ds_train_config(),
        lora_rank=scenario.lora_rank,
        target_modules=["q_proj", "o_proj"],
    )
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    config = {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": 9}
    actor, _, _ = strategy.prepare((actor, config))
    return actor, strategy


def without_persistent_parameters(original: Any) -> Any:
    """DeepSpeed keeps parameters whole that are as small as all of these are."""

    def get_train_ds_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    return get_train_ds_config


def train(actor: Any, step: int, tensor_parallel_size: int) -> None:
    """A step; ranks that do not share a model's layers have other data."""
    rng = torch.Generator().manual_seed(step * 100 + dist.get_rank() // tensor_parallel_size)
    tokens = torch.randint(0, 31, (1, 12), generator=rng)
    loss = actor.model(tokens, use_cache=False).logits.float().square().mean()
    actor.model.backward(loss)
    actor.model.step()


def drift(actor: Any, tensor_parallel_size: int) -> None:
    """As sums in another order do, on all ranks but the first of those that share the layers."""
    if dist.get_rank() % tensor_parallel_size:
        for name, parameter in actor.model.module.named_parameters():
            if "norm" in name or "embed" in name:
                parameter.data.mul_(1.5)


@contextmanager
def asleep(actor: Any) -> Iterator[None]:
    """As OpenRLHF's actor is outside of training with --ds.enable_sleep.

    DeepSpeed only moves the states of its own Adam, which a CPU would have to compile first: it takes torch's for it.
    """
    fused_adam.FusedAdam = type(actor.model.optimizer.optimizer)
    offload_deepspeed_states(actor.model)
    assert actor.model.optimizer.offloaded_states
    yield
    reload_deepspeed_states(actor.model)
    assert not actor.model.optimizer.offloaded_states


def run(folder: Path, name: str) -> None:
    scenario, mine = SCENARIOS[name], folder / name
    rank, world = dist.get_rank(), dist.get_world_size()
    stock = strategy_module.get_train_ds_config
    if not scenario.persistent:
        strategy_module.get_train_ds_config = without_persistent_parameters(stock)
    actor, strategy = build(folder, scenario)
    strategy_module.get_train_ds_config = stock
    tokenizer = SimpleNamespace(save_pretrained=lambda where: None)
    seen: dict[str, Any] = {"held": [], "collectives": [], "error": None}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[scenario.param_dtype]
    ranks = SingleProcess() if world == 1 else TorchRanks()
    sink, publisher = JournalSink(str(mine / "journal"), CREDENTIALS), None
    try:
        weights = ActorWeights(actor, scenario.zero_stage, scenario.tensor_parallel_size)
        for step in range(STEPS + 1):
            if step:
                train(actor, step, scenario.tensor_parallel_size)
            if scenario.drifting:
                drift(actor, scenario.tensor_parallel_size)
            strategy.save_model(actor, tokenizer, str(mine / f"saved-{step}"))
            with asleep(actor) if scenario.sleep else nullcontext():
                with CommDebugMode() as counted:
                    seen["held"].append(sum(shard.local.numel() for _, shard in weights.shards()))
                seen["collectives"].append(counted.get_total_counts())
                if publisher is None:
                    publisher = Publisher(sink, weights.shards(), wire_dtype=dtype, ranks=ranks)
                else:
                    publisher.publish(weights.shards())
        assert publisher is not None
        publisher.write_anchor()
    except SparrowError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    sink.close()
    (mine / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        make_models(folder)
        for name in scenarios:
            (folder / name).mkdir()
    dist.barrier()
    for name in scenarios:
        run(folder, name)


if __name__ == "__main__":
    assert "RANK" in os.environ
    main()
