"""What is refused before anything is started, from verl's own configuration."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module

from sparrowrl.errors import ConfigError, FrameworkUnsupported
from sparrowrl.verl_plugin import support

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend=sparrow"
SEPARATE = ["actor_rollout_ref.hybrid_engine=True", "trainer.v1.trainer_mode=separate_async"]
OFF_POLICY = ["actor_rollout_ref.hybrid_engine=False"]


def configuration(*overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@pytest.mark.parametrize("mode", [SEPARATE, OFF_POLICY])
def test_what_works_passes(mode: list[str]) -> None:
    support.check_configuration(configuration(BACKEND, *mode))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.v1.trainer_mode=sync"], "separate_async"),
        (["trainer.v1.trainer_mode=colocate_async"], "separate_async"),
        (["trainer.use_v1=False"], "separate_async"),
        ([*OFF_POLICY, f"{ROLLOUT}.name=sglang"], r"rollout\.name=sglang"),
        ([*OFF_POLICY, f"{ROLLOUT}.data_parallel_size=2"], "data_parallel_size=2"),
        ([*OFF_POLICY, f"{ROLLOUT}.quantization=fp8"], "quantization=fp8"),
        ([*OFF_POLICY, "actor_rollout_ref.model.lora_rank=8"], "lora.merge=True"),
        ([*OFF_POLICY, "actor_rollout_ref.model.lora.rank=8"], "lora.merge=True"),
    ],
)
def test_what_does_not_work_is_named(overrides: list[str], reason: str) -> None:
    with pytest.raises(FrameworkUnsupported, match=reason):
        support.check_configuration(configuration(BACKEND, *overrides))
    overrides = [override for override in overrides if "trainer_mode" not in override]
    support.check_configuration(configuration(*overrides))  # none of our business with another backend


def test_merged_adapters_are_fine() -> None:
    lora = ["actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=True"]
    support.check_configuration(configuration(BACKEND, *OFF_POLICY, *lora))


def test_a_wrong_option_is_named() -> None:
    option = f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.sparrow.prot=8590"
    with pytest.raises(ConfigError, match="port"):
        support.check_configuration(configuration(BACKEND, *OFF_POLICY, option))


def test_verl_calls_the_check_itself() -> None:
    from verl.utils.config import validate_config

    with pytest.raises(FrameworkUnsupported, match="separate_async"):
        validate_config(configuration(BACKEND), False, False)


def test_a_server_of_several_nodes_or_with_another_backend_is_refused() -> None:
    rollout = configuration().actor_rollout_ref.rollout
    with pytest.raises(FrameworkUnsupported, match="over 2 nodes"):
        support.check_server(rollout, {}, 2)
    with pytest.raises(FrameworkUnsupported, match="weight_transfer_config"):
        support.check_server(rollout, {"weight_transfer_config": {"backend": "nccl"}}, 1)
    support.check_server(rollout, {}, 1)
