"""What the demo says on the terminal: lines, progress while one waits, and a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from sparrowrl.examples.gsm8k_grpo.report import Report, VersionRow

_QUIET_S = 20.0  # between two lines of progress where lines cannot be overwritten

COLUMNS = (
    ("step", 4), ("reward", 6), ("exact", 6), ("changed", 7), ("payload", 8), ("bits per", 8), ("times", 6),
    ("publish", 7), ("transfer", 8), ("stage", 6), ("pause", 6), ("tokens", 6), ("requests", 8), ("aborted", 7),
    ("live bits", 9),
)  # fmt: skip


class Console:
    """Lines on `out`; progress overwrites itself on a terminal and comes now and then elsewhere."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._began = self._shown = time.monotonic()
        self._pending = False

    def say(self, text: str) -> None:
        """One line."""
        self._clear()
        self._out.write(text + "\n")
        self._out.flush()
        self._shown = time.monotonic()

    def progress(self, text: str) -> None:
        """What is going on now; with the seconds since the start."""
        now = time.monotonic()
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{now - self._began:4.0f} s  {text}")
            self._out.flush()
            self._pending = True
        elif now - self._shown >= _QUIET_S:
            self.say(f"{now - self._began:4.0f} s  {text}")

    def _clear(self) -> None:
        if self._pending:
            self._out.write("\r\x1b[K")
            self._pending = False


def introduction(report: Report, url: str) -> list[str]:
    """What runs where."""
    settings, told, shape = report.settings, report.environment, report.model
    return [
        f"model    {shape['name']}: {shape['parameters'] / 1e6:.1f} M weights in {shape['tensors']} tensors, "
        f"{shape['bytes'] / 1e6:.0f} MB as {settings['dtype']}",
        f"device   {told['device']}; vLLM {told['vllm']}, torch {told['torch']}",
        f"engine   {url}; version 0 audited: its weights are the trainer's, bit for bit",
        f"run      {settings['steps']} steps of {settings['prompts']} prompts x {settings['group_size']} completions, "
        f"lr {settings['lr']:g}; logs and report in {settings['out']}",
        "",
    ]


def verdict(report: Report) -> list[str]:
    """How the run ended."""
    lines = []
    if report.requests is not None:
        counts = report.requests
        lines.append(
            f"requests {counts.stop + counts.length} finished, {counts.aborted} aborted, {counts.failed} failed; "
            f"{counts.crossed} went on while the weights changed"
        )
    if report.audit_detail:
        lines.append(f"audit    {'ok' if report.audit_ok else 'FAILED'}: {report.audit_detail}")
    if report.export is not None:
        export = report.export
        lines.append(
            f"export   {export.tensors} tensors, {export.elements:,} weights of the live engine: {export.different:,} "
            "differ from the trainer's"
        )
    out = report.settings["out"]
    lines.append(f"report   {out}/report.html, {out}/report.json")
    lines += [f"problem  {problem}" for problem in report.problems]
    lines.append("result   " + ("every version exact, nothing aborted" if report.ok else "NOT PROVED"))
    return lines


def header() -> str:
    """The names of the columns and their units."""
    units = ("", "", "", "%", "kB", "change", "less", *("ms",) * 4, "during", "in fl.", "", "")
    names = _line([name for name, _ in COLUMNS])
    return f"{names}\n{_line(units)}\n{'-' * len(names)}"


def table_line(row: VersionRow) -> str:
    """A version in the table."""
    return _line(
        [
            str(row.version),
            f"{row.reward:.3f}",
            f"{row.exact:.3f}",
            f"{100 * row.changed / row.elements:.3f}",
            f"{row.payload_bytes / 1000:,.1f}",
            f"{row.bits_per_changed:.2f}",
            f"{row.full_bytes / row.payload_bytes:.0f}" if row.payload_bytes else "-",
            f"{row.publish_ms:.0f}",
            _number(row.transfer_ms, ".0f"),
            _number(row.stage_ms, ".1f"),
            _number(row.pause_ms, ".1f"),
            _number(row.tokens_during_transfer, "d"),
            _number(row.requests_in_flight, "d"),
            _number(row.aborted, "d"),
            _live(row),
        ]
    )


def _live(row: VersionRow) -> str:
    if row.merged_into is not None:
        return f"in v{row.merged_into}"
    return {None: "-", True: "ok", False: "WRONG"}[row.fingerprint_ok]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
