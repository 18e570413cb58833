"""report.json and the page made of it, from a run written down by hand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparrowrl.examples.gsm8k_grpo import charts, page, report
from sparrowrl.examples.gsm8k_grpo.console import COLUMNS, Console, header, introduction, table_line, verdict
from sparrowrl.examples.gsm8k_grpo.report import ExportCheck, Origin, Report, Requests, VersionRow
from sparrowrl.transport.node import Activation

README = Path(report.__file__).with_name("README.md")


def row(version: int, **changes: object) -> VersionRow:
    made = VersionRow(
        version=version, reward=0.3, exact=0.125, marked=0.5, loss=-0.1, gradient_norm=2.0, clipped=0.01, kl=0.002,
        train_tokens=400, oldest_sampled=version - 1, waited_s=0.5, train_s=6.0, elements=1_000_000, changed=12_000,
        payload_bytes=18_000, full_bytes=2_000_000, bits_per_changed=12.0, diff_ms=100.0, encode_ms=20.0, put_ms=5.0,
        commit_ms=2.0, train_began=10.0 * version, published_began=10.0 * version + 6, published=10.0 * version + 6.2,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def activation(version: int, base: int, ok: bool = True, aborted: int = 0) -> Activation:
    return Activation(version, base, "delta", 12_000, 18_000, 40.0, 30.0, 12.5, 8, aborted, 33, ok)


def good() -> Report:
    rows = [row(1), row(2)]
    for number, made in enumerate(rows):
        made.activated(activation(made.version, number), 17.0 + 10 * number)
        made.longest_gap_ms = 80.0
    return Report(
        schema=report.SCHEMA,
        started="2026-01-01T00:00:00+00:00",
        settings={"steps": 2, "prompts": 2, "group_size": 4, "lr": 1e-5, "dtype": "bfloat16", "out": "runs/<demo>"},
        environment={"device": "2 CPU cores", "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"},
        model={"name": "a & b", "parameters": 1_000_000, "tensors": 20, "bytes": 2_000_000},
        seconds=40.0,
        origin=Origin(0, True),
        versions=rows,
        audit_ok=True,
        audit_detail="rank 0: version 2",
        export=ExportCheck(20, 1_000_000, 0, None),
        requests=Requests(30, 10, 0, 0, 12, 3),
        usual_gap_ms=45.0,
        tokens_per_second=[0, 0, 50, 120, 90, 100],
    )


def judged(made: Report) -> Report:
    made.judge()
    return made


def test_a_good_run_is_ok() -> None:
    made = judged(good())
    assert made.ok and made.problems == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda r: setattr(r, "origin", None), "version 0"),
        (lambda r: setattr(r, "origin", Origin(0, False)), "version 0"),
        (lambda r: r.versions.pop(), "expected 2 versions, got 1"),
        (lambda r: r.versions[0].activated(activation(1, 0, ok=False), 1.0), "version 1: the live fingerprint differs"),
        (lambda r: setattr(r.versions[1], "fingerprint_ok", None), "version 2: it never became active"),
        (lambda r: r.versions[1].activated(activation(2, 1, aborted=3), 1.0), "version 2: 3 requests aborted"),
        (lambda r: setattr(r, "requests", Requests(1, 1, 1, 0, 0, 0)), "1 requests aborted"),
        (lambda r: setattr(r, "requests", Requests(1, 1, 0, 2, 0, 0)), "2 failed"),
        (lambda r: setattr(r, "audit_ok", False), "the final audit did not agree"),
        (lambda r: setattr(r, "export", None), "not exported"),
        (lambda r: setattr(r, "export", ExportCheck(20, 9, 1, "w: element 0")), "1 exported weights differ"),
    ],
)
def test_anything_wrong_is_named(spoil: object, problem: str) -> None:
    made = good()
    spoil(made)  # type: ignore[operator]
    made.judge()
    assert not made.ok
    assert any(problem in said for said in made.problems), made.problems
    assert verdict(made)[-1].endswith("NOT PROVED")
    assert "Not proved" in page.render(made)


def test_a_merged_version_is_no_failure() -> None:
    made = good()
    made.versions[0] = row(1, merged_into=2)
    made.judge()
    assert made.ok
    assert "in v2" in table_line(made.versions[0])


def test_the_json_has_what_the_readme_says() -> None:
    raw = json.loads(report.to_json(judged(good())))
    documented = re.findall(r"^\| `(\w+)` \|", README.read_text(), re.MULTILINE)
    nested = {"origin", "export", "requests"}
    held = set(raw) | set(raw["versions"][0]) | {key for name in nested for key in raw[name]}
    assert held == set(documented), held ^ set(documented)
    wanted = {"version", "elements", "changed", "payload_bytes", "bits_per_changed", "pause_ms", "requests_in_flight"}
    assert wanted | {"aborted", "fingerprint_ok", "publish_ms"} <= set(raw["versions"][0])
    assert raw["versions"][0]["publish_ms"] == pytest.approx(127.0)
    assert raw["audit_ok"] is True


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects attributes that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone() -> None:
    text = page.render(judged(good()))
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.loads == []
    assert "a &amp; b" in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        for element in ElementTree.fromstring(drawing).iter():
            for name in ("x", "y", "cx", "cy", "width", "height", "x1", "y1"):
                assert float(element.get(name, 0)) >= 0, ElementTree.tostring(element)


@pytest.mark.parametrize("versions", [[], [row(1)], [row(1, changed=0, payload_bytes=0, bits_per_changed=0.0)]])
def test_a_run_cut_short_still_has_a_page(versions: list[VersionRow]) -> None:
    made = good()
    made.versions, made.tokens_per_second, made.requests, made.export = versions, [], None, None
    text = page.render(judged(made))
    assert "Not proved" in text
    assert ("<svg" in text) == bool(versions)


def test_the_table_lines_up() -> None:
    made = good().versions[0]
    width = sum(size for _, size in COLUMNS) + len(COLUMNS) - 1
    assert {len(line) for line in (*header().splitlines(), table_line(made), table_line(row(3)))} == {width}
    assert "ok" in table_line(made)
    made.activated(activation(1, 0, ok=False), 1.0)
    assert "WRONG" in table_line(made)


def test_what_is_said_at_both_ends() -> None:
    made = judged(good())
    assert any(
        "a & b: 1.0 M weights in 20 tensors, 2 MB as bfloat16" in line for line in introduction(made, "http://x")
    )
    said = "\n".join(verdict(made))
    assert "40 finished, 0 aborted, 0 failed; 12 went on" in said and "every version exact" in said


def test_progress_stays_off_files(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.progress("waiting")
    console.say("done")
    assert capsys.readouterr().out == "done\n"


def test_gaps_and_rates() -> None:
    pieces = [(10.0, 1, 0.0), (10.1, 1, 0.1), (10.2, 2, 0.1), (10.7, 1, 0.5), (10.8, 1, 0.1)]
    assert report.longest_gap_ms(pieces, 10.5, 10.6) == pytest.approx(500)
    assert report.longest_gap_ms(pieces, 10.0, 10.15) == pytest.approx(100)
    assert report.longest_gap_ms(pieces, 11.0, 12.0) is None
    assert report.usual_gap_ms(pieces) == pytest.approx(100)
    assert report.usual_gap_ms([(1.0, 1, 0.0)]) is None
    assert report.per_second(pieces, start=9.5, seconds=2.0) == [4, 2, 0]


def test_ticks_are_round() -> None:
    assert charts.nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.nice_ticks(1, 8, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert charts.decades(5_000, 2_000_000) == [10_000, 100_000, 1_000_000]
    assert [charts.short(value) for value in (0.125, 48, 1_234, 2_500_000, 3e9)] == [
        "0.125",
        "48",
        "1.23k",
        "2.5M",
        "3G",
    ]
