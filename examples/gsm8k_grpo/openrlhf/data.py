"""Problems as OpenRLHF reads them: a JSON object a line, whose label is the number alone.

GSM8K's own labels are whole solutions, which no reward function that compares answers can use.

python -m sparrowrl.examples.gsm8k_grpo.openrlhf.data train.jsonl ~/data/gsm8k/openrlhf.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sparrowrl.examples.gsm8k_grpo import convert
from sparrowrl.examples.gsm8k_grpo.tasks import APPENDED_INSTRUCTION, Problem


def main(argv: Sequence[str] | None = None) -> int:
    """Convert GSM8K's own JSON lines; the exit status (convert.main)."""
    return convert.main(argv, "OpenRLHF", lambda path, problems: write_chats(path, problems, APPENDED_INSTRUCTION))


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
