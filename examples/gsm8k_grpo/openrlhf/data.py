"""Problems as OpenRLHF reads them: a JSON object a line, whose label is the number alone.

GSM8K's own labels are whole solutions, which no reward function that compares answers can use.

python -m sparrowrl.examples.gsm8k_grpo.openrlhf.data train.jsonl ~/data/gsm8k/openrlhf.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.tasks import APPENDED_INSTRUCTION, Problem, load_problems


def main(argv: Sequence[str] | None = None) -> int:
    """Convert GSM8K's own JSON lines. Returns the exit status: 0, or 2 if the file is not what it should be."""
    parser = argparse.ArgumentParser(description="Make the file that OpenRLHF reads of GSM8K's JSON lines.")
    parser.add_argument("problems", type=Path, help='GSM8K\'s train.jsonl: {"question": ..., "answer": "... #### 7"}')
    parser.add_argument("out", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    try:
        problems = load_problems(arguments.problems)
    except ConfigError as error:
        sys.stderr.write(f"data: {error}\n")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_chats(arguments.out, problems, APPENDED_INSTRUCTION)
    sys.stdout.write(f"{len(problems)} problems in {arguments.out}\n")
    return 0


def write_chats(path: Path, problems: Sequence[Problem], instruction: str) -> None:
    """For `--data.apply_chat_template`: each prompt is a chat of one message."""
    rows = [[{"role": "user", "content": f"{problem.question} {instruction}"}] for problem in problems]
    _write(path, rows, problems)


def write_texts(path: Path, problems: Sequence[Problem]) -> None:
    """For models without a chat template."""
    _write(path, [problem.question for problem in problems], problems)


def _write(path: Path, prompts: Sequence[object], problems: Sequence[Problem]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt, problem in zip(prompts, problems, strict=True):
            file.write(json.dumps({"input": prompt, "label": str(problem.answer)}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
