"""What verl has logged so far, and a line a step of it for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Metrics = Mapping[str, float]
Cell = Callable[[Metrics], str]

_STEP = "training/global_step"
_PROVED = "sparrow/fingerprints_ok"
_MISSING = "-"
# Ray colours what it puts before a line, in a file too.
_RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)*\([^)]*pid=\d+[^)]*\)(?:\x1b\[\d+m)* ?|\x1b\[\d+m")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Unsupported|Exceeded|Mismatch|Died): .+")
_CAUSES = 3
_LAST_LINES = 6


def _number(key: str, form: str, factor: float = 1.0) -> Cell:
    return lambda metrics: format(metrics[key] * factor, form) if key in metrics else _MISSING


def _live_bits(metrics: Metrics) -> str:
    return {None: _MISSING, 1.0: "ok"}.get(metrics.get(_PROVED), "WRONG")


# Name, unit, content. The README explains them.
_COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("step", "", _number(_STEP, ".0f")),
    ("reward", "", _number("critic/rewards/mean", ".3f")),
    ("version", "", _number("sparrow/version", ".0f")),
    ("changed", "%", _number("sparrow/density", ".2f", 100)),
    ("payload", "kB", _number("sparrow/payload_bytes", ",.1f", 1e-3)),
    ("sync", "ms", _number("sparrow/sync_s", ".0f", 1e3)),
    ("pause", "ms", _number("sparrow/pause_ms", ".1f")),
    ("in flight", "", _number("sparrow/requests_in_flight", ".0f")),
    ("aborted", "", _number("sparrow/requests_aborted", ".0f")),
    ("live bits", "", _live_bits),
)
_WIDTHS = [max(len(name), 7) for name, _, _ in _COLUMNS]


class Progress:
    """Follows the file of verl's "file" logger."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._read = 0
        self.trained = 0  # steps
        self.wrong = 0  # of them with live weights that were not proved

    def news(self) -> list[str]:
        """A line for each step that verl has logged since the last call."""
        lines = []
        for entry in self._entries():
            self.trained = max(self.trained, int(entry["step"]))
            metrics: Metrics = entry["data"]
            self.wrong += metrics.get(_PROVED, 1.0) != 1.0
            if _STEP in metrics:
                lines.append(_line([cell(metrics) for _, _, cell in _COLUMNS]))
        return lines

    def _entries(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]


def header() -> list[str]:
    """The names of the columns and their units."""
    return [_line([name for name, _, _ in _COLUMNS]), _line([unit for _, unit, _ in _COLUMNS])]


def last_words(log: Path) -> list[str]:
    """The last exceptions that verl's processes have logged, and the last lines of all."""
    lines = [_RAY_PREFIX.sub("", line) for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    causes = list(dict.fromkeys(line for line in lines if _EXCEPTION.match(line)))[-_CAUSES:]
    shown = [f"{log} says:", *causes] if causes else []
    return [line[:300] for line in [*shown, f"{log} ends with:", *lines[-_LAST_LINES:]]]


def _line(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
