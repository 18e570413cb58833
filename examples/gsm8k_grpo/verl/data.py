"""Problems as verl reads them: a parquet file with a row a problem.

python -m sparrowrl.examples.gsm8k_grpo.verl.data train.jsonl ~/data/gsm8k/train.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.tasks import APPENDED_INSTRUCTION, Problem, load_problems

GSM8K = "openai/gsm8k"  # the name by which verl knows how to reward it
ARITHMETIC = "sparrowrl/arithmetic"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert GSM8K's own JSON lines. Returns the exit status: 0, or 2 if the file is not what it should be."""
    parser = argparse.ArgumentParser(description="Make the parquet file that verl reads of GSM8K's JSON lines.")
    parser.add_argument("problems", type=Path, help='GSM8K\'s train.jsonl: {"question": ..., "answer": "... #### 7"}')
    parser.add_argument("out", type=Path, help="the parquet file to write")
    arguments = parser.parse_args(argv)
    try:
        problems = load_problems(arguments.problems)
    except ConfigError as error:
        sys.stderr.write(f"data: {error}\n")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, problems, GSM8K, APPENDED_INSTRUCTION)
    sys.stdout.write(f"{len(problems)} problems in {arguments.out}\n")
    return 0


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
