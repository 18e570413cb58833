from __future__ import annotations

from pathlib import Path

import pytest
from engine_records import DOCUMENT, FIELDS, read, tables, with_tables, write


def test_the_document_has_the_tables_of_the_records() -> None:
    text = DOCUMENT.read_text()
    assert text == with_tables(text, read()), "run `python tests/engine_records.py`"


def test_a_record_takes_the_place_of_its_cell(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    first = dict.fromkeys(FIELDS, "1")
    for change in ({}, {"cell": "b", "family": "b"}, {"cell": "a"}, {"cell": "b", "ranks": "2"}):
        write({**first, **change}, path)
    assert [(record["cell"], record["ranks"]) for record in read(path)] == [("1", "1"), ("a", "1"), ("b", "2")]
    assert tables(read(path)).count("\n| 1 |") == 3


def test_a_record_with_other_fields_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="more"):
        write({**dict.fromkeys(FIELDS, "1"), "more": ""}, tmp_path / "records.csv")
