"""Word problems in GSM8K's format, the prompt made of them, and the reward of a completion."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from sparrowrl.errors import ConfigError

SAMPLE = Path(__file__).with_name("sample.jsonl")

REWARD_EXACT = 1.0
REWARD_MARKED = 0.2
REWARD_NUMBER = 0.1

INSTRUCTION = "Solve the problem in one or two short steps. End with #### and the number."
# For trainers whose prompts are one message each.
APPENDED_INSTRUCTION = 'Think step by step and write the final answer after "####".'
SHOWN_QUESTION = "A jar holds 12 cookies. Ann eats 3 and her brother eats 2. How many cookies are left?"
SHOWN_ANSWER = "They eat 3+2=5 cookies. 12-5=7 are left.\n#### 7"

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_MARKED = re.compile(rf"####\s*\$?\s*({_NUMBER.pattern})")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the number that answers it."""

    question: str
    answer: Decimal


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion earned; `exact` and `marked` say for what."""

    reward: float
    exact: bool
    marked: bool


def load_problems(path: Path) -> list[Problem]:
    """Read a file of GSM8K's form: a JSON object a line, "question" and an "answer" that ends with #### and a number.

    Raises ConfigError that names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: {error}") from error
    problems = [_problem(line, f"--data {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise ConfigError(f"--data {path}: expected at least one problem, got an empty file")
    return problems


def _problem(line: str, where: str) -> Problem:
    try:
        raw = json.loads(line)
        question, answer = raw["question"], marked_number(raw["answer"])
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"question": "...", "answer": "... #### 7"}'
        raise ConfigError(f"{where}: expected {expected}, got {line[:60]!r}") from error
    if not isinstance(question, str) or answer is None:
        raise ConfigError(f"{where}: expected an answer that ends with '#### <number>', got {raw['answer'][-60:]!r}")
    return Problem(question, answer)


def sums(count: int, seed: int) -> list[Problem]:
    """Problems for a model that knows nothing: sums of two digits."""
    digits = random.Random(seed)
    pairs = [(digits.randint(1, 4), digits.randint(1, 4)) for _ in range(count)]
    return [Problem(f"{left} + {right} = ?", Decimal(left + right)) for left, right in pairs]


def messages(problem: Problem) -> list[dict[str, str]]:
    """The chat that asks a problem, with one solved example."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": SHOWN_QUESTION},
        {"role": "assistant", "content": SHOWN_ANSWER},
        {"role": "user", "content": problem.question},
    ]


def marked_number(text: str) -> Decimal | None:
    """The number after the first ####, as GSM8K marks its answers."""
    found = _MARKED.search(text)
    return Decimal(found[1].replace(",", "")) if found else None


def final_number(text: str) -> Decimal | None:
    """The marked number, or without one the last number of the text."""
    marked = marked_number(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def score(text: str, problem: Problem) -> Score:
    """1.0 if the final number is the answer; to help a small model begin, 0.2 for one marked with ####, 0.1 for any."""
    number, marked = final_number(text), marked_number(text) is not None
    exact = number == problem.answer
    reward = REWARD_EXACT * exact + REWARD_MARKED * marked + REWARD_NUMBER * (number is not None)
    return Score(reward, exact, marked)
