"""The verl example without a run: every key of its command lines is one that verl 0.9.1 has, and passes its checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.cpu_run import last_words
from sparrowrl.examples.gsm8k_grpo.tasks import sums
from sparrowrl.examples.gsm8k_grpo.verl import cpu_job, data, reward
from sparrowrl.examples.gsm8k_grpo.verl.cpu_job import Job
from sparrowrl.examples.gsm8k_grpo.verl.progress import Progress
from sparrowrl.verl_plugin import support

FOLDER = Path(cpu_job.__file__).parent
_DECLARED = re.compile(r'@hydra\.main\(config_path="(\w+)", config_name="(\w+)"')
MODES = ["one_step_off", "fully_async", "separate_async"]


def command_of_script(mode: str, folder: Path) -> list[str]:
    """What the script would start, with an override of ours: `python3` only says with what it was called."""
    fake = folder / "python3"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "MODEL": "some/model"}
    script = [str(FOLDER / f"{mode}.sh"), "trainer.total_epochs=7"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split("\0")[:-1]


def composed(command: list[str]) -> Any:
    """The configuration that verl would train with. Hydra raises for a key that verl does not have."""
    assert command[0] == "-m"
    spec = find_spec(command[1])
    assert spec is not None and spec.origin is not None
    main = Path(spec.origin)
    declared = _DECLARED.search(main.read_text())
    assert declared is not None
    overrides = [each for each in command[2:] if not each.startswith("hydra.run.dir")]
    with initialize_config_dir(str(main.parent / declared[1]), version_base=None):
        return compose(declared[2], overrides=overrides)


def check(config: Any) -> None:
    """Ours and verl's own checks."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    support.check_configuration(config)
    assert not config.actor_rollout_ref.hybrid_engine
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    step = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if "async_training" in config:
        # What fully_async's rollouter asserts; then the samples that it trains on at once stand for the batch.
        assert (config.data.train_batch_size, config.data.gen_batch_size) == (0, 1)
        config.data.train_batch_size = step * config.async_training.require_batches
    if config.trainer.v1.trainer_mode == "separate_async":
        assert config.data.train_batch_size == step * config.trainer.v1.separate_async.parameter_sync_step
    validate_config(config, need_reference_policy(config), need_critic(config))


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_script_is_bash_that_can_be_executed(mode: str) -> None:
    script = FOLDER / f"{mode}.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


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
    assert list(config.trainer.logger) == ["console"]  # no account needed
    if mode == "separate_async":  # verl 0.9.1 fails on a line that it logs at INFO
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL == "WARNING"


@pytest.mark.parametrize("mode", MODES)
def test_a_misspelt_key_fails(mode: str, tmp_path: Path) -> None:
    with pytest.raises(HydraException, match="parameter_sync_stepp"):
        composed([*command_of_script(mode, tmp_path), "trainer.v1.separate_async.parameter_sync_stepp=1"])


def job(mode: str, folder: Path, **others: Any) -> Job:
    known = {"steps": 6, "trainer_ranks": 2, "replicas": 1, "tensor_parallel_size": 1, "backend": "sparrow"}
    return Job(mode=mode, out=folder, **{**known, "deadline_s": 60, "overrides": (), **others})


@pytest.mark.parametrize("mode", MODES)
def test_what_the_cpu_job_asks_for_is_what_verl_knows(mode: str, tmp_path: Path) -> None:
    config = composed(job(mode, tmp_path, replicas=2).command(Path("/tmp/x"))[1:])
    check(config)
    engines = config.actor_rollout_ref.rollout if mode == "separate_async" else config.rollout
    assert engines.n_gpus_per_node == 2
    assert config.ray_kwargs.ray_init.num_gpus == 4


@pytest.mark.parametrize("name", ["steps", "trainer_ranks", "replicas", "tensor_parallel_size"])
def test_a_job_of_nothing_is_refused_by_its_flag(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: expected 1 or more, got 0"):
        job("one_step_off", tmp_path, **{name: 0})


@pytest.mark.parametrize("seconds", [0, float("nan")])
def test_a_job_without_time_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--deadline: expected a number of seconds"):
        job("one_step_off", tmp_path, deadline_s=seconds)


def test_the_callers_overrides_win_in_the_cpu_job(tmp_path: Path) -> None:
    given = job("one_step_off", tmp_path, overrides=("actor_rollout_ref.actor.optim.lr=1e-3",))
    assert composed(given.command(Path("/tmp/x"))[1:]).actor_rollout_ref.actor.optim.lr == 1e-3


def test_the_cpu_job_keeps_the_callers_modules_and_leaves_his_ray_alone(tmp_path: Path) -> None:
    inherited = {"VERL_USE_EXTERNAL_MODULES": "his.own", "RAY_ADDRESS": "somewhere", "HOME": "/home/his"}
    told = job("one_step_off", tmp_path).environment(tmp_path, inherited)
    assert told["VERL_USE_EXTERNAL_MODULES"] == f"{cpu_job.PLATFORM},his.own"
    assert "RAY_ADDRESS" not in told
    assert told["HOME"] == "/home/his"


def test_sums_are_right_and_the_same_for_a_seed() -> None:
    problems = sums(20, seed=1)
    assert problems == sums(20, seed=1) != sums(20, seed=2)
    for problem in problems:
        assert sum(int(digit) for digit in re.findall(r"\d", problem.question)) == problem.answer


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


def test_last_words_are_the_causes_and_the_end_without_a_plain_prefix(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    coloured = "\x1b[36m(Worker pid=8)\x1b[0m KeyError: another\n"
    log.write_text("(Worker pid=7) ValueError: the cause\n" + coloured + "noise\n" * 9 + "the end\n")
    words = last_words(log)
    assert words[:3] == [f"{log} says:", "ValueError: the cause", "KeyError: another"]
    assert words[-1] == "the end"
