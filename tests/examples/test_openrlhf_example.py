"""The OpenRLHF example without a run: every flag of its command lines is one that OpenRLHF 0.11.2 has, and data and
reward are as its own loader and executor want them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf")

import openrlhf_arguments

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.openrlhf import cpu_job, data
from sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_job import Job
from sparrowrl.examples.gsm8k_grpo.openrlhf.progress import Progress
from sparrowrl.examples.gsm8k_grpo.tasks import sums

FOLDER = Path(cpu_job.__file__).parent
SCRIPT = FOLDER / "async.sh"
REWARD = FOLDER / "reward.py"


def command_of_script(folder: Path) -> list[str]:
    """What the script would start, with a flag of ours: `python3` only says with what it was called."""
    fake = folder / "python3"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "MODEL": "some/model"}
    script = [str(SCRIPT), "--train.num_episodes", "7"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split("\0")[:-1]


def job(folder: Path, mode: str = "sync", **others: Any) -> Job:
    known = {"steps": 6, "zero_stage": 3, "trainer_ranks": 2, "engines": 2, "tensor_parallel_size": 1}
    return Job(mode=mode, out=folder, **{**known, "backend": "sparrow", "deadline_s": 60, "flags": (), **others})


def flags_of(asked: Job) -> list[str]:
    """OpenRLHF's part of the job's command line."""
    return asked.command(Path("/tmp/x"))[5:]  # after python -m cpu_start FOLDER GPUS


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """OpenRLHF's answers, of one process, since its imports take seconds."""
    folder = tmp_path_factory.mktemp("parsed")
    script = command_of_script(folder)[2:]
    asked = {
        "script": script,
        "misspelt": [*script, "--train.num_episodess", "1"],
        "sync": flags_of(job(folder)),
        "async": flags_of(job(folder, "async", flags=("--actor.adam.lr", "1e-3"))),
    }
    return dict(zip(asked, openrlhf_arguments.ask(list(asked.values()), folder), strict=True))


def test_the_gpu_script_is_bash_that_can_be_executed(tmp_path: Path) -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=20)
    assert command_of_script(tmp_path)[:2] == ["-m", "sparrowrl.openrlhf_plugin.train_ppo_ray"]


def test_what_the_gpu_script_asks_for_is_what_openrlhf_knows(parsed: dict[str, dict[str, Any]]) -> None:
    asked = parsed["script"]["arguments"]
    assert asked["vllm.sync_backend"] == "sparrow"
    assert asked["actor.model_name_or_path"] == "some/model"
    assert asked["train.num_episodes"] == 7  # the caller's word is the last
    assert asked["train.async_enable"] and asked["train.partial_rollout_enable"] and asked["ds.zero_stage"] == 3
    assert Path(asked["reward.remote_url"][0]).samefile(REWARD)
    assert Path(asked["sparrow.journal_dir"]).is_absolute()
    # Whole optimizer steps, whole micro-batches on each rank.
    completions = asked["rollout.batch_size"] * asked["rollout.n_samples_per_prompt"]
    assert completions % asked["train.batch_size"] == 0
    assert asked["train.batch_size"] % (asked["actor.num_gpus_per_node"] * asked["train.micro_batch_size"]) == 0
    assert asked["rollout.max_new_tokens"] < asked["data.max_len"]


def test_a_misspelt_flag_fails(parsed: dict[str, dict[str, Any]]) -> None:
    assert "arguments" not in parsed["misspelt"]
    assert "unrecognized arguments: --train.num_episodess" in parsed["misspelt"]["said"]


def test_what_the_cpu_jobs_ask_for_is_what_openrlhf_knows(parsed: dict[str, dict[str, Any]]) -> None:
    asked = parsed["sync"]["arguments"]
    assert (asked["vllm.num_engines"], asked["actor.num_gpus_per_node"], asked["ds.zero_stage"]) == (2, 2, 3)
    assert not asked["train.async_enable"]
    asked = parsed["async"]["arguments"]
    assert asked["train.async_enable"] and asked["train.partial_rollout_enable"]
    assert asked["actor.adam.lr"] == 1e-3  # the caller's flags win


def test_a_job_has_a_made_up_gpu_for_every_rank(tmp_path: Path) -> None:
    command = job(tmp_path, trainer_ranks=2, engines=3, tensor_parallel_size=2).command(Path("/tmp/x"))
    assert command[3:5] == ["/tmp/x/ray", "8"]


@pytest.mark.parametrize("name", ["steps", "trainer_ranks", "engines", "tensor_parallel_size"])
def test_a_job_of_nothing_is_refused_by_its_flag(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: expected 1 or more, got 0"):
        job(tmp_path, **{name: 0})


@pytest.mark.parametrize("seconds", [0, float("nan")])
def test_a_job_without_time_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--deadline: expected a number of seconds"):
        job(tmp_path, deadline_s=seconds)


def test_the_cpu_job_keeps_the_callers_modules_and_paths_and_leaves_his_ray_alone(tmp_path: Path) -> None:
    inherited = {"PROCESS_MODULES": "his.own", "PYTHONPATH": "/his", "RAY_ADDRESS": "somewhere", "HOME": "/home/his"}
    told = job(tmp_path).environment(tmp_path, inherited)
    assert told["PROCESS_MODULES"] == f"{cpu_job.PLATFORM},his.own"
    assert told["PYTHONPATH"].split(os.pathsep) == [str(FOLDER / "site"), "/his"]
    assert "RAY_ADDRESS" not in told
    assert told["HOME"] == "/home/his"


def loaded(path: Path, **others: Any) -> list[tuple[str, str]]:
    """Prompts and labels, as OpenRLHF's loader reads them. Its chat template here only joins what was said."""
    from openrlhf.datasets import PromptDataset
    from openrlhf.datasets.utils import blending_datasets

    def apply_chat_template(chat: list[dict[str, str]], **how: Any) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in chat)

    arguments = SimpleNamespace(data=SimpleNamespace(input_key="input", label_key="label", **others))
    strategy = SimpleNamespace(args=arguments, print=lambda *what: None, is_rank_0=lambda: False)
    rows = blending_datasets(str(path), None, strategy, dataset_split="train")
    dataset = PromptDataset(rows, SimpleNamespace(apply_chat_template=apply_chat_template), strategy)
    return [dataset[at][1:3] for at in range(len(dataset))]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_gsm8ks_lines_become_chats_whose_label_is_the_number_alone(tmp_path: Path, cache: None) -> None:
    source, made = tmp_path / "train.jsonl", tmp_path / "made" / "openrlhf.jsonl"
    answers = ["2 + 3 = 5\n#### 5", "#### 1,000", "#### 0.50"]
    source.write_text("".join(json.dumps({"question": "2 and 3?", "answer": text}) + "\n" for text in answers))
    assert data.main([str(source), str(made)]) == 0
    prompts, labels = zip(*loaded(made, apply_chat_template=True), strict=True)
    assert labels == ("5", "1000", "0.50")
    assert all(prompt.startswith("<user>2 and 3? ") for prompt in prompts)
    assert data.main([str(tmp_path / "none"), str(made)]) == 2


def test_sums_are_read_as_plain_prompts(tmp_path: Path, cache: None) -> None:
    problems = sums(20, seed=1)
    data.write_texts(tmp_path / "prompts.jsonl", problems)
    expected = [(problem.question, str(problem.answer)) for problem in problems]
    assert loaded(tmp_path / "prompts.jsonl") == expected


def rewarded(completion: str, prompt: str = "2 + 3 = ?") -> dict[str, Any]:
    """What OpenRLHF's executor makes of a completion whose label is 5. Tokens are characters here."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    class Tokenizer:
        def __call__(self, text: str, **how: Any) -> dict[str, Any]:
            import torch

            return {"input_ids": torch.tensor([[ord(each) for each in text]])}

        def decode(self, tokens: list[int], **how: Any) -> str:
            return "".join(map(chr, tokens))

    class Engine:
        async def generate(self, tokens: list[int], sampling: Any, **others: Any) -> Any:
            output = SimpleNamespace(token_ids=[ord(each) for each in completion], finish_reason="stop", logprobs=None)
            return SimpleNamespace(outputs=[output])

    sampling = SimpleNamespace(max_tokens=50, logprobs=None)
    executor = SingleTurnAgentExecutor([str(REWARD)])
    return dict(asyncio.run(executor.execute(prompt, "5", sampling, 100, Tokenizer(), Engine())))


def test_a_right_answer_earns_more_than_a_wrong_one_or_none() -> None:
    right, wrong, none = (rewarded(text)["reward"].item() for text in ("#### 5", "#### 6", "five"))
    assert right > wrong > none == 0


def test_numbers_in_the_prompt_earn_nothing() -> None:
    assert rewarded("who knows", prompt="2 + 5")["reward"].item() == 0


def line(step: int, **metrics: float) -> str:
    colours = "\x1b[36m(TrainingActor pid=7)\x1b[0m INFO 12-01 12:00:00 ppo_trainer.py:1]"
    return f"{colours} Global step {step}: { {'rollout/reward_mean': 0.5, **metrics} }\n"


def test_progress_counts_steps_and_those_that_were_not_proved(tmp_path: Path) -> None:
    log = tmp_path / "openrlhf.log"
    progress = Progress(log, must_be_proved=True)
    assert progress.news() == []
    with log.open("a") as file:
        file.write("noise\n")
        for step, proved in enumerate([1.0, 0.0, 1.0], 1):
            file.write(line(step, **{"sparrow/fingerprints_ok": proved, "sparrow/version": step}))
        file.write(line(4)[:40])  # half a line
    words = [row.split() for row in progress.news()]
    assert [(row[0], row[1], row[2], row[-1]) for row in words] == [
        ("1", "0.500", "1", "ok"),
        ("2", "0.500", "2", "WRONG"),
        ("3", "0.500", "3", "ok"),
    ]
    assert (progress.trained, progress.wrong) == (3, 1)
    assert progress.news() == []


def test_a_step_without_a_proof_is_wrong_where_there_must_be_one(tmp_path: Path) -> None:
    log = tmp_path / "openrlhf.log"
    log.write_text(line(1, reward=float("nan"), loss=-1e-8))
    for must_be_proved in (True, False):
        progress = Progress(log, must_be_proved)
        progress.news()
        assert (progress.trained, progress.wrong) == (1, int(must_be_proved))
