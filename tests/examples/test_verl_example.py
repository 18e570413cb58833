"""The verl example without a run: every key of its command lines is one that verl 0.9.1 has, and passes its checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.verl import cpu_job, data, reward
from sparrowrl.examples.gsm8k_grpo.verl.cpu_job import Job
from sparrowrl.examples.gsm8k_grpo.verl.progress import Progress
from sparrowrl.verl_plugin import support

FOLDER = Path(cpu_job.__file__).parent
CONFIGS = {
    "verl.experimental.one_step_off_policy.main_ppo": (
        "experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
    "verl.trainer.main_ppo": ("trainer/config", "ppo_trainer"),
}
MODES = ["one_step_off", "fully_async", "separate_async"]


def command_of_script(mode: str, folder: Path) -> list[str]:
    """What the script would start, with an override of ours: `python3` only says with what it was called."""
    fake = folder / "python3"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MODEL": "some/model"}
    script = [str(FOLDER / f"{mode}.sh"), "trainer.total_epochs=7"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split("\0")[:-1]


def composed(command: list[str]) -> Any:
    """The configuration that verl would train with. Hydra raises for a key that verl does not have."""
    assert command[0] == "-m"
    folder, name = CONFIGS[command[1]]
    overrides = [each for each in command[2:] if not each.startswith("hydra.run.dir")]
    OverridesParser.create().parse_overrides(overrides)
    with initialize_config_dir(str(Path(verl.__file__).parent / folder), version_base=None):
        return compose(name, overrides=overrides)


def check(config: Any) -> None:
    """Ours and verl's own checks."""
    from verl.utils.config import validate_config

    support.check_configuration(config)
    if config.data.train_batch_size:  # fully_async has none, and does not check
        validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_gpu_script_asks_for_is_what_verl_knows(mode: str, tmp_path: Path) -> None:
    command = command_of_script(mode, tmp_path)
    config = composed(command)
    check(config)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.checkpoint_engine.backend == "sparrow"
    assert rollout.load_format == "auto"
    assert config.actor_rollout_ref.model.path == "some/model"
    assert config.trainer.total_epochs == 7  # the caller's word is the last
    if mode == "separate_async":
        step = config.trainer.v1.separate_async.parameter_sync_step
        assert config.data.train_batch_size == step * config.actor_rollout_ref.actor.ppo_mini_batch_size


def job(mode: str, folder: Path, **others: Any) -> Job:
    known = {"steps": 6, "trainer_ranks": 2, "replicas": 1, "tensor_parallel_size": 1, "backend": "sparrow"}
    return Job(mode=mode, out=folder, deadline_s=60, overrides=(), **{**known, **others})


@pytest.mark.parametrize("mode", MODES)
def test_what_the_cpu_job_asks_for_is_what_verl_knows(mode: str, tmp_path: Path) -> None:
    config = composed(cpu_job.command(job(mode, tmp_path, replicas=2), Path("/tmp/x"))[1:])
    check(config)
    engines = config.actor_rollout_ref.rollout if mode == "separate_async" else config.rollout
    assert engines.n_gpus_per_node == 2
    assert config.ray_kwargs.ray_init.num_gpus == 4


@pytest.mark.parametrize("name", ["steps", "trainer_ranks", "replicas", "tensor_parallel_size"])
def test_a_job_of_nothing_is_refused_by_its_flag(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: expected 1 or more, got 0"):
        job("one_step_off", tmp_path, **{name: 0})


def test_problems_become_what_verl_reads(tmp_path: Path) -> None:
    import pandas

    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps({"question": "2 and 3?", "answer": "2 + 3 = 5\n#### 5"}) + "\n")
    assert data.main([str(source), str(tmp_path / "data" / "train.parquet")]) == 0
    (row,) = pandas.read_parquet(tmp_path / "data" / "train.parquet").to_dict("records")
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"ground_truth": "5", "style": "rule"}
    assert row["prompt"][0]["content"].startswith("2 and 3?")
    assert data.main([str(tmp_path / "none"), str(tmp_path / "x")]) == 2


def test_a_right_answer_earns_more_than_a_wrong_one_or_none() -> None:
    right, wrong, none = (reward.compute_score("", text, "5") for text in ("#### 5", "#### 6", "five"))
    assert right > wrong > none == 0


def test_progress_counts_steps_and_those_that_were_not_proved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path)
    assert progress.news() == []
    steps = [{"training/global_step": n, "sparrow/fingerprints_ok": float(n != 2)} for n in (1, 2, 3)]
    path.write_text("".join(json.dumps({"step": n + 1, "data": step}) + "\n" for n, step in enumerate(steps)))
    lines = progress.news()
    assert [line.split()[-1] for line in lines] == ["ok", "WRONG", "ok"]
    assert (progress.trained, progress.wrong) == (3, 1)
    assert progress.news() == []
