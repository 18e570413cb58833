"""Problems, answers and rewards of the GSM8K demo."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo.tasks import (
    SAMPLE,
    Problem,
    final_number,
    load_problems,
    marked_number,
    messages,
    score,
)

WORDS = {"quarter": 4, "half": 2, "twice": 2, "three": 3, "hours": 60, "%": 100, "rectangular": 2}
ALLOWED = re.compile(r"[0-9+\-*/(). ]+")


def test_the_sample_is_sound_arithmetic() -> None:
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert len(lines) == 24 and len({line["question"] for line in lines}) == 24
    for line in lines:
        steps = re.findall(r"<<([^=<>]+)=([^<>]+)>>([\d,.]*\d)", line["answer"])
        assert steps, line
        for expression, result, repeated in steps:
            assert ALLOWED.fullmatch(expression)
            assert eval(expression) == float(result), line
            assert float(repeated.replace(",", "")) == float(result), line
        assert Decimal(steps[-1][1]) == marked_number(line["answer"]), line
        # A calculation uses numbers of the question, earlier results, and what everybody knows.
        known = {float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", line["question"])}
        known |= {float(number) for word, number in WORDS.items() if word in line["question"].lower()}
        for expression, result, _ in steps:
            used = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", expression)}
            assert used <= known, (line, used - known)
            known.add(float(result))


def test_the_sample_loads() -> None:
    problems = load_problems(SAMPLE)
    assert len(problems) == 24
    assert problems[0].answer == 29


@pytest.mark.parametrize(
    ("text", "marked", "final"),
    [
        ("6*8=48.\n#### 29", 29, 29),
        ("#### 1,234", 1234, 1234),
        ("#### -7.50", Decimal("-7.5"), Decimal("-7.5")),
        ("####$12 and 5", 12, 12),
        ("the answer is 3, or rather 4.", None, 4),
        ("#### none; 8", None, 8),
        ("first #### 1 then #### 2", 1, 1),
        ("1,2,3", None, 3),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_numbers_of_a_text(text: str, marked: Decimal | None, final: Decimal | None) -> None:
    assert marked_number(text) == marked
    assert final_number(text) == final


@pytest.mark.parametrize(
    ("text", "reward", "exact", "marked"),
    [
        ("#### 29", 1.3, True, True),
        ("#### 29.0", 1.3, True, True),
        ("it is 29", 1.1, True, False),
        ("29 or #### 30", 0.3, False, True),
        ("it is 30", 0.1, False, False),
        ("it is unclear", 0.0, False, False),
    ],
)
def test_scores(text: str, reward: float, exact: bool, marked: bool) -> None:
    got = score(text, Problem("?", Decimal(29)))
    assert got.reward == pytest.approx(reward)
    assert (got.exact, got.marked) == (exact, marked)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"question": "?", "answer": "7"}',
        '{"question": 1, "answer": "#### 7"}',
        '{"question": "?"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "?", "answer": "#### 7"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"data\.jsonl, line 3"):
        load_problems(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        load_problems(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="at least one problem"):
        load_problems(tmp_path / "empty.jsonl")


def test_a_chat_ends_with_the_question() -> None:
    chat = messages(Problem("How many?", Decimal(1)))
    assert [turn["role"] for turn in chat] == ["system", "user", "assistant", "user"]
    assert chat[-1]["content"] == "How many?"
