"""Our flags on OpenRLHF's command line: with its own parser, in a process of its own since its imports take seconds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("openrlhf")

import openrlhf_arguments

from sparrowrl.job.options import Options
from sparrowrl.openrlhf_plugin import flags

# A command line that OpenRLHF itself takes.
STOCK = ["--reward.remote_url", "r.py", "--vllm.num_engines", "2", "--rollout.n_samples_per_prompt", "2"]
STOCK += ["--algo.advantage.estimator", "group_norm", "--ds.param_dtype", "bf16"]
OURS = [*STOCK, "--vllm.sync_backend", "sparrow"]
COMMAND_LINES: dict[str, list[str]] = {
    "defaults": OURS,
    "joined": [*STOCK, "--vllm.sync_backend=sparrow", "--sparrow.journal_dir=/data/j", "--sparrow.audit_every=3"],
    "stock": STOCK,
    "unknown backend": [*STOCK, "--vllm.sync_backend", "gloo"],
    "ours with a stock backend": [*STOCK, "--sparrow.run", "x"],
    "abbreviated": [*STOCK, "--vllm.sync_back", "sparrow"],
    "miswritten": [*STOCK, "--vllm.sync_backend", "Sparrow"],
    "help": ["--help"],
    "misspelt": [*OURS, "--sparrow.journaldir", "/data/j"],
    "wrong value": [*OURS, "--sparrow.in_flight", "abort"],
    "wrong type": [*OURS, "--sparrow.port", "any"],
    "no engines": [*STOCK, "--vllm.num_engines", "0", "--vllm.sync_backend", "sparrow"],
    "lora": [*OURS, "--ds.lora.rank", "8"],
    "4 bit": [*OURS, "--ds.load_in_4bit"],
    "multimodal": [*OURS, "--data.max_images_per_prompt", "1"],
    "zero 3 and tensor parallel": [*OURS, "--ds.zero_stage", "3", "--ds.tensor_parallel_size", "2"],
    "ray": [*OURS, "--vllm.sync_with_ray"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    said = openrlhf_arguments.ask(list(COMMAND_LINES.values()), tmp_path_factory.mktemp("answers"))
    return dict(zip(COMMAND_LINES, said, strict=True))


def ours(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("sparrow."): value for key, value in arguments.items() if key.startswith("sparrow.")}


def test_our_options_come_with_openrlhfs_arguments(answers: dict[str, dict[str, Any]]) -> None:
    defaults = Options("--sparrow.", run="openrlhf")
    expected = {name: getattr(defaults, name) for name in Options.names()}
    assert ours(answers["defaults"]["arguments"]) == expected
    given = {"journal_dir": "/data/j", "audit_every": 3}
    assert ours(answers["joined"]["arguments"]) == expected | given
    assert ours(answers["abbreviated"]["arguments"]) == expected


@pytest.mark.parametrize("name", ["stock", "unknown backend"])
def test_with_another_backend_it_is_openrlhfs_command(answers: dict[str, dict[str, Any]], name: str) -> None:
    assert ours(answers[name]["arguments"]) == {}
    assert answers[name]["arguments"]["vllm.num_engines"] == 2


def test_help_has_openrlhfs_flags_and_ours(answers: dict[str, dict[str, Any]]) -> None:
    said = answers["help"]["said"]
    assert "--train.partial_rollout_enable" in said
    for name in Options.names():
        assert f"--sparrow.{name} " in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours with a stock backend", "unrecognized arguments: --sparrow.run x"),
        ("miswritten", "ConfigError: --vllm.sync_backend: expected sparrow, got 'Sparrow'"),
        ("misspelt", "unrecognized arguments: --sparrow.journaldir"),
        ("wrong type", "argument --sparrow.port: invalid int value: 'any'"),
        ("wrong value", "ConfigError: --sparrow.in_flight: expected keep or drain, got 'abort'"),
        ("no engines", "ConfigError: --vllm.sync_backend sparrow: expected --vllm.num_engines of 1 or more, got none"),
        ("lora", "FrameworkUnsupported: --vllm.sync_backend sparrow: not supported with --ds.lora.rank 8"),
        ("4 bit", "not supported with --ds.load_in_4bit"),
        ("multimodal", "not supported with --data.max_images_per_prompt 1"),
        (
            "zero 3 and tensor parallel",
            "not supported with --ds.zero_stage 3 together with --ds.tensor_parallel_size 2",
        ),
        ("ray", "not supported with --vllm.sync_with_ray"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_started(
    answers: dict[str, dict[str, Any]], name: str, expected: str
) -> None:
    assert "arguments" not in answers[name]
    assert expected in answers[name]["said"]
    assert "SystemExit: 2" in answers[name]["said"]


@pytest.mark.parametrize(
    ("argv", "backend"),
    [
        ([], "nccl"),
        (["--vllm.sync_backend", "sparrow"], "sparrow"),
        (["--vllm.sync_backend=sparrow", "--vllm.sync_backend", "nccl"], "nccl"),
        (["--actor.adam.lr", "1e-6", "--vllm.sync_backend=sparrow"], "sparrow"),
    ],
)
def test_the_backend_is_the_last_that_was_named(argv: list[str], backend: str) -> None:
    assert flags.backend_of(argv) == backend
