"""What OpenRLHF makes of command lines, by its own parser, in a process of its own: `python openrlhf_arguments.py`.

Reads a JSON list of command lines from its standard input. Writes as many objects: `arguments`, by flag, or what was
`said` when the command line was refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_job import Job


def ask(command_lines: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """Parse them, in the environment of the example's jobs."""
    job = Job("sync", 1, 2, 1, 1, 1, "sparrow", folder, 60, ())
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(command_lines),
        env=job.environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


class _Parsed(BaseException):
    """OpenRLHF has parsed and checked, and would start to train."""


def _answer(command_line: list[str]) -> dict[str, Any]:
    from sparrowrl.openrlhf_plugin import train_ppo_ray

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return {"status": train_ppo_ray.main(command_line), "said": said.getvalue()}
        except _Parsed as parsed:
            return {"arguments": _flat(parsed.args[0]), "said": said.getvalue()}
        except (SystemExit, AssertionError) as refused:
            return {"said": f"{said.getvalue()}{type(refused).__name__}: {refused}"}


def _flat(arguments: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        found |= _flat(value, f"{prefix}{name}.") if hasattr(value, "__dict__") else {prefix + name: value}
    return found


def _main() -> None:
    import openrlhf.utils
    import ray

    def get_strategy(arguments: Any) -> Any:
        raise _Parsed(arguments)

    ray.is_initialized = lambda: True
    openrlhf.utils.get_strategy = get_strategy
    print(json.dumps([_answer(command_line) for command_line in json.load(sys.stdin)]))


if __name__ == "__main__":
    _main()
