"""`sparrowrl demo` itself: bad settings, and whole runs with a real vLLM engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import wait_for
from sparrowrl.cli.main import main

COMMAND = [sys.executable, "-m", "sparrowrl.cli.main", "demo", "--model", "tiny"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--group-size", "1"], "--group-size: expected 2 or more, got 1"),
        (["--lr", "nan"], "--lr: expected a number between 0 and 1"),
        (["--port", "70000"], "--port: expected 1 to 65535, got 70000"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: expected 1 or more, got 0"),
        (["--data", "/no/such/file"], "--data /no/such/file"),
    ],
)
def test_bad_settings_are_one_line(
    flags: list[str], said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["demo", "--model", "tiny", "--out", str(tmp_path / "out"), *flags]) == 2
    error = capfd.readouterr().err
    assert error.startswith("sparrowrl: ConfigError: ") and error.count("\n") == 1
    assert said in error


def test_a_folder_of_something_else_is_left_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("of an earlier run")
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--model", "tiny", "--out", str(tmp_path)]) == 2
    assert "thesis.txt" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "thesis.txt"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_is_proved_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = [
        "--steps",
        "3",
        "--max-tokens",
        "32",
        "--lr",
        "1e-4",
        "--out",
        str(out),
        "--cache",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every version exact, nothing aborted" in done.stdout
    assert_nothing_left(out)
    told = json.loads((out / "report.json").read_text())
    assert told["ok"] and told["audit_ok"] and told["problems"] == []
    assert told["origin"] == {"version": 0, "audit_ok": True}
    assert [row["version"] for row in told["versions"]] == [1, 2, 3]
    for row in told["versions"]:
        assert row["fingerprint_ok"] is True or row["merged_into"] is not None
        assert row["elements"] == told["model"]["parameters"]
        assert 0 < row["changed"] < row["elements"]
        assert row["aborted"] in (0, None)
        assert row["version"] - 2 <= row["oldest_sampled"] < row["version"]
        # On policy but for one version and rounding: the engine's log-probabilities are the trainer's.
        assert 0 <= row["kl"] < 0.05
    assert told["versions"][-1]["requests_in_flight"] > 0
    assert told["export"]["different"] == 0 and told["export"]["elements"] == told["model"]["parameters"]
    assert told["requests"]["aborted"] == told["requests"]["failed"] == 0
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.vllm
@pytest.mark.slow
def test_an_interrupted_run_stops_its_children(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--steps", "1000", "--out", str(out), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        said = ""
        while not re.search(r"^ +2 .* ok$", said, re.MULTILINE):
            line = run.stdout.readline()
            assert line, said
            said += line
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        assert run.wait(120) == 130
    assert_nothing_left(out)
    told = json.loads((out / "report.json").read_text())
    assert not told["ok"] and len(told["versions"]) >= 2


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--steps", "1000", "--out", str(out), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        said = ""
        while not re.search(r"^ +1 .* ok$", said, re.MULTILINE):
            line = run.stdout.readline()
            assert line, said
            said += line
        for pid in processes_with("vllm.entrypoints.openai.api_server", str(out)):
            os.kill(pid, signal.SIGKILL)
        said, error = run.communicate(timeout=120)
    assert run.returncode == 4
    assert re.search(
        r"^sparrowrl: TransportError: the engine ended with exit status -9; see .*engine.log$", error, re.M
    )
    assert "engine.log ends with:" in said
    assert_nothing_left(out)


def assert_nothing_left(out: Path) -> None:
    left: Callable[[], list[int]] = lambda: processes_with(str(out))  # noqa: E731
    wait_for(lambda: not left(), 10, f"the end of {left()}")


def processes_with(*words: str) -> list[int]:
    """Processes in whose command line or environment all these words are; the test's own process has none of them."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if all(word.encode() in text for word in words):
            found.append(int(folder.name))
    return found
