from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrowrl.cli import inspect, main
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    FingerprintMismatch,
    JournalLocked,
    LayoutError,
    Unauthorized,
    VersionNotFound,
)

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
COMMAND = [sys.executable, "-m", "sparrowrl.cli.main"]


def test_help_lists_every_command(sparrowrl):
    outcome = sparrowrl("--help")
    assert outcome.status == 0
    words = " ".join(outcome.out.split())
    assert all(f"{name} {summary}" in words for name, summary in main.COMMANDS.items())


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_a_module(name):
    assert importlib.util.find_spec(f"sparrowrl.cli.{name}") is not None


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["inspect"], ["inspect", "--nonsense"], ["init"]])
def test_wrong_usage_is_status_2(sparrowrl, arguments):
    outcome = sparrowrl(*arguments)
    assert outcome.status == 2 and "usage: sparrowrl" in outcome.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (CorruptData("x"), 3),
        (FingerprintMismatch("x"), 3),
        (Unauthorized("x"), 4),
        (DeadlineExceeded("x"), 4),
        (LayoutError("x"), 1),
        (VersionNotFound("x"), 1),
        (JournalLocked("two\nlines"), 1),
        (PermissionError(13, "Permission denied", "file"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_line_and_a_status(sparrowrl, monkeypatch, error, status):
    def fail(args):
        raise error

    monkeypatch.setattr(inspect, "run", fail)
    outcome = sparrowrl("inspect", "somewhere")
    assert outcome.status == status
    if status == 130:
        assert outcome.err == ""
    else:
        assert outcome.err.startswith(f"sparrowrl: {type(error).__name__}: ")
        assert outcome.err.count("\n") == 1


def test_an_error_that_nobody_meant_is_not_hidden(sparrowrl, monkeypatch):
    def fail(args):
        raise ZeroDivisionError

    monkeypatch.setattr(inspect, "run", fail)
    with pytest.raises(ZeroDivisionError):
        sparrowrl("inspect", "somewhere")


def test_a_reader_that_leaves_is_no_traceback(published):
    process = subprocess.Popen(
        [*COMMAND, "inspect", str(published.root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_the_frameworks_are_not_imported(published):
    script = (
        "import sys; from sparrowrl.cli.main import main; status = main(sys.argv[1:]); "
        "loaded = {'vllm', 'aiohttp', 'transformers', 'triton'} & set(sys.modules); "
        "assert not loaded, loaded; sys.exit(status)"
    )
    command = [sys.executable, "-c", script, "inspect", str(published.root)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_closed_standard_output(sparrowrl, published, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main(["inspect", str(published.root)]) == 0
