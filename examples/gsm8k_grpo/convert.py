"""GSM8K's own JSON lines made into what a framework reads: the command of each framework's data.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.tasks import Problem, load_problems


def main(argv: Sequence[str] | None, framework: str, write: Callable[[Path, Sequence[Problem]], None]) -> int:
    """Have `write` make the file. Returns the exit status: 0, or 2 if GSM8K's is not what it should be."""
    parser = argparse.ArgumentParser(description=f"Make the file that {framework} reads of GSM8K's JSON lines.")
    parser.add_argument("problems", type=Path, help='GSM8K\'s train.jsonl: {"question": ..., "answer": "... #### 7"}')
    parser.add_argument("out", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    try:
        problems = load_problems(arguments.problems)
    except ConfigError as error:
        sys.stderr.write(f"data: {error}\n")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, problems)
    sys.stdout.write(f"{len(problems)} problems in {arguments.out}\n")
    return 0
