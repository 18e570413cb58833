"""Problems as verl reads them: a parquet file with a row a problem.

python -m sparrowrl.examples.gsm8k_grpo.verl.data train.jsonl ~/data/gsm8k/train.parquet
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrowrl.examples.gsm8k_grpo import convert
from sparrowrl.examples.gsm8k_grpo.tasks import APPENDED_INSTRUCTION, Problem

GSM8K = "openai/gsm8k"  # the name by which verl knows how to reward it
ARITHMETIC = "sparrowrl/arithmetic"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert GSM8K's own JSON lines; the exit status (convert.main)."""
    return convert.main(argv, "verl", lambda path, problems: write(path, problems, GSM8K, APPENDED_INSTRUCTION))


def write(path: Path, problems: Sequence[Problem], source: str, instruction: str = "") -> None:
    """Write the file. verl picks the reward by `source`, unless it is given a function of one's own."""
    import pandas  # type: ignore[import-untyped]

    rows = [_row(number, problem, source, instruction) for number, problem in enumerate(problems)]
    pandas.DataFrame(rows).to_parquet(path)


def _row(number: int, problem: Problem, source: str, instruction: str) -> dict[str, Any]:
    question = f"{problem.question} {instruction}".strip()
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": number},
    }


if __name__ == "__main__":
    sys.exit(main())
