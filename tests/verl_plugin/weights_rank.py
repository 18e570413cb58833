"""One rank of a trainer with verl's real FSDP engines on a CPU; test_weights.py starts several.

    weights_rank.py FOLDER RANKS:SCENARIO...

Publishes what `named_shards` gives, at the start and after each of two training steps, and writes what it saw as JSON
into FOLDER/RANKS:SCENARIO; rank 0 also the whole tensors that verl itself would have sent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.engine_workers  # noqa: F401 - as in verl's own processes: engines are registered
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from sparrowrl.config import Credentials
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.ranks import SingleProcess, TorchRanks
from sparrowrl.delta.shard import local_shard
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import SparrowError
from sparrowrl.verl_plugin.weights import named_shards

CREDENTIALS = Credentials("run", bytes(range(32)), "reader", "writer")
STEPS = 2


@dataclass(frozen=True)
class Scenario:
    """A model of ours, how verl is to train it, and what is done to the module afterwards."""

    model: str
    strategy: str
    engine: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Any], None] = lambda module: None


def add_buffers_and_rename(module: Any) -> None:
    """A persistent buffer, one that is not, and other names in the checkpoint than in the model."""
    inner = module.get_decoder()
    inner.register_buffer("counts", torch.arange(5))
    inner.register_buffer("cache", torch.ones(3), persistent=False)
    module._checkpoint_conversion_mapping = {"^decoder": "model"}


ADAPTERS = {"lora_rank": 4, "target_modules": ["q_proj", "o_proj"]}
MERGED = {**ADAPTERS, "lora": {"merge": True}}
SCENARIOS = {
    "fsdp2": Scenario("tied", "fsdp2"),
    "fsdp2-moe": Scenario("moe", "fsdp2"),
    "fsdp2-offload": Scenario("moe", "fsdp2", {"param_offload": True}),
    "fsdp2-replicas": Scenario("moe", "fsdp2", {"fsdp_size": 1}),
    "fsdp2-hybrid": Scenario("moe", "fsdp2", {"fsdp_size": 2}),
    "fsdp2-names": Scenario("tied", "fsdp2", after=add_buffers_and_rename),
    "fsdp1": Scenario("tied", "fsdp"),
    "fsdp1-moe": Scenario("moe", "fsdp"),
    "fsdp1-offload": Scenario("moe", "fsdp", {"param_offload": True}),
    "fsdp1-hybrid": Scenario("moe", "fsdp", {"fsdp_size": 2}),
    "fsdp1-orig": Scenario("moe", "fsdp", {"use_orig_params": True, "reshard_after_forward": False}),
    "fsdp1-names": Scenario("tied", "fsdp", after=add_buffers_and_rename),
    "fsdp2-merged": Scenario("tied", "fsdp2", lora=MERGED),
    "fsdp1-merged": Scenario("moe", "fsdp", lora=MERGED),
    "fsdp2-adapters": Scenario("tied", "fsdp2", lora=ADAPTERS),
    "fsdp1-adapters": Scenario("tied", "fsdp", lora=ADAPTERS),
}


def make_models(folder: Path) -> None:
    """Checkpoints with sizes that do not divide among ranks."""
    small: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "max_position_embeddings": 32,
    }
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    configs = {
        "tied": Qwen3Config(**small, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**small, **experts, tie_word_embeddings=False),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def build(folder: Path, scenario: Scenario) -> Any:
    """verl's engine, made as verl's workers make it."""
    model = HFModelConfig(
        path=str(folder / scenario.model),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
        **scenario.lora,
    )
    config = FSDPEngineConfig(strategy=scenario.strategy, use_torch_compile=False, **scenario.engine)
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=scenario.strategy,
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    scenario.after(unwrapped(engine.module))
    return engine


def unwrapped(module: torch.nn.Module) -> Any:
    return getattr(module, "_fsdp_wrapped_module", module)


def train(engine: Any, seed: int) -> None:
    """A real step, each rank with other tokens; then a forward, after which FSDP may keep weights gathered."""
    tokens = torch.randint(31, (2, 6), generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))
    mixed = torch.autocast("cpu", torch.bfloat16)
    with engine.train_mode(), mixed:
        engine.optimizer_zero_grad()
        engine.module(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        engine.optimizer_step()
    with engine.eval_mode(), mixed, torch.no_grad():
        engine.module(input_ids=tokens, use_cache=False)


def whole_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """What verl would send, in the wire's dtype; the second of two tied tensors left out, all experts apart."""
    stream, _ = engine.get_per_tensor_param()
    whole = {name: cast(tensor).clone() for name, tensor in unfuse_moe_params(stream)}
    if engine.model_config.hf_config.tie_word_embeddings:
        del whole["lm_head.weight"]
    return whole


def cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()


class Collectives:
    """Counts them while `named_shards` is iterated, and sees what this rank gives."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.elements = 0

    def __call__(self, engine: Any) -> Iterator[tuple[str, Any]]:
        with CommDebugMode() as mode:
            held = list(named_shards(engine))
        self.counts.append(mode.get_total_counts())
        self.elements = sum(local_shard(*shard, None, dist.get_rank()).box.elements for shard in held)
        yield from held


def publish(engine: Any, folder: Path) -> dict[str, Any]:
    ranks = SingleProcess() if dist.get_world_size() == 1 else TorchRanks(timeout=timedelta(seconds=60))
    sink, shards = JournalSink(folder / "journal", CREDENTIALS), Collectives()
    publisher = Publisher(sink, shards(engine), anchor_every=STEPS, ranks=ranks)
    history = [whole_tensors(engine)]
    for seed in range(STEPS):
        train(engine, seed)
        published = publisher.publish(shards(engine))
        history.append(whole_tensors(engine))
        assert published.version == seed + 1
    sink.close()
    with CommDebugMode() as mode:
        whole_tensors(engine)
    if dist.get_rank() == 0:
        torch.save(history, folder / "history.pt")
    return {"collectives": shards.counts, "of_the_stream": mode.get_total_counts(), "elements": shards.elements}


def run(folder: Path, scenario: str, out: Path) -> dict[str, Any]:
    try:
        return publish(build(folder, SCENARIOS[scenario]), out)
    except SparrowError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    scenarios = [tuple(argument.split(":")) for argument in sys.argv[2:]]
    torch.set_num_threads(1)
    # verl has FSDP1 send rank 0's weights to the others, which works on a CPU as well, but would be refused.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    for world in sorted({int(ranks) for ranks, _ in scenarios}, reverse=True):
        if rank >= world:
            break
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        if rank == 0 and not (folder / "moe").exists():
            make_models(folder)
        dist.barrier()
        for scenario in (name for ranks, name in scenarios if int(ranks) == world):
            out = folder / f"{world}:{scenario}"
            out.mkdir(exist_ok=True)
            (out / f"rank-{rank}.json").write_text(json.dumps(run(folder, scenario, out)))
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
