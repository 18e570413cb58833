"""What was shown of which engine: docs/engines.csv, written by the tests, and its tables in docs/engines.md.

`python tests/engine_records.py` writes the tables anew.
"""

from __future__ import annotations

import csv
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDS = DOCS / "engines.csv"
DOCUMENT = DOCS / "engines.md"
COUNTS = ("direct", "opaque", "alias", "unused", "derived", "runtime")
FIELDS = ("vllm", "cell", "family", "engine", "ranks", *COUNTS, "densities", "versions", "logprobs", "command")
Record = dict[str, str]
_BEGIN, _END = "<!-- begin: from engines.csv -->\n", "<!-- end: from engines.csv -->\n"
_LEFT = ("family", "engine")
_SHOWN = (*_LEFT, "ranks", *COUNTS, "versions", "logprobs")


def read(path: Path = RECORDS) -> list[Record]:
    """All records, sorted; none if there is no file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return sorted(csv.DictReader(file), key=_order)


def write(record: Record, path: Path = RECORDS) -> None:
    """Put a record in the place of the one for the same cell and vLLM."""
    assert record.keys() == set(FIELDS), record.keys() ^ set(FIELDS)
    kept = [known for known in read(path) if any(known[name] != record[name] for name in ("vllm", "cell"))]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, record], key=_order))


def _order(record: Record) -> tuple[str, ...]:
    return tuple(record[name] for name in ("vllm", "family", "ranks", "engine"))


def tables(records: list[Record]) -> str:
    """A table for each vLLM, the newest first."""
    parts = []
    for version in sorted({record["vllm"] for record in records}, reverse=True):
        rows = [[record[name] for name in _SHOWN] for record in records if record["vllm"] == version]
        lines = [list(_SHOWN), ["---" if name in _LEFT else "--:" for name in _SHOWN], *rows]
        parts.append(f"\n### vLLM {version}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "".join(parts) + "\n"


def with_tables(text: str, records: list[Record]) -> str:
    """The document with the records' tables between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, f"{DOCUMENT}: expected the marks of the tables"
    return before + _BEGIN + tables(records) + _END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), read()))
