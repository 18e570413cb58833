"""A line a training step, of what the framework's logger was told (docs/jobs.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Metrics = Mapping[str, float]
Cell = Callable[[Metrics], str]

_PROVED = "sparrow/fingerprints_ok"
_MISSING = "-"


def _number(key: str, form: str, factor: float = 1.0) -> Cell:
    return lambda metrics: format(metrics[key] * factor, form) if key in metrics else _MISSING


def _live_bits(metrics: Metrics) -> str:
    return {None: _MISSING, 1.0: "ok"}.get(metrics.get(_PROVED), "WRONG")


# Name, unit, content. The examples' READMEs explain them.
_COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("step", "", _number("step", ".0f")),
    ("reward", "", _number("reward", ".3f")),
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


def header() -> list[str]:
    """The names of the columns and their units."""
    return [_line([name for name, _, _ in _COLUMNS]), _line([unit for _, unit, _ in _COLUMNS])]


def row(metrics: Metrics) -> str:
    """One step: our metrics, and "step" and "reward"; what is missing is a dash."""
    return _line([cell(metrics) for _, _, cell in _COLUMNS])


def is_wrong(metrics: Metrics, must_be_proved: bool = False) -> bool:
    """Whether some engine was found not to hold the trainer's weights, or nothing says so where it must be proved."""
    return metrics.get(_PROVED, 0.0 if must_be_proved else 1.0) != 1.0


def _line(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
