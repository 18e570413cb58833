"""Small SVG charts as text. Colours are CSS classes of the page, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 34

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Frame:
    """Axes of one chart: the ranges of x and y, and the size in SVG units."""

    x_range: Point
    y_range: Point
    width: int = 420
    height: int = 220
    log: bool = False

    def x(self, value: float) -> float:
        """SVG x of a value."""
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """SVG y of a value."""
        low, high = (math.log10(bound) if self.log else bound for bound in self.y_range)
        place = math.log10(value) if self.log else value
        return self.height - BOTTOM - (place - low) / ((high - low) or 1) * (self.height - TOP - BOTTOM)

    @property
    def floor(self) -> float:
        """SVG y of the x axis."""
        return self.height - BOTTOM

    def svg(self, label: str, x_title: str, x_ticks: Sequence[float], y_title: str | None, body: Sequence[str]) -> str:
        """The chart; `label` is read out to those who cannot see it. Without a `y_title` it has no y axis."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}">'
            + "".join([] if y_title is None else self._y_axis(y_title))
            + "".join(self._x_axis(x_title, x_ticks))
            + "".join(body)
            + "</svg>"
        )

    def _y_axis(self, title: str) -> list[str]:
        ticks = decades(*self.y_range) if self.log else nice_ticks(*self.y_range)
        parts = [f'<text class="axis" x="4" y="{TOP - 2}">{escape(title)}</text>']
        for tick in ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
        return parts

    def _x_axis(self, title: str, ticks: Sequence[float]) -> list[str]:
        middle = (LEFT + self.width - RIGHT) / 2
        parts = [f'<text class="axis" x="{middle}" y="{self.height - 4}" text-anchor="middle">{escape(title)}</text>']
        for tick in ticks:
            x, y = f"{self.x(tick):.1f}", self.floor + 15
            parts.append(f'<text class="axis" x="{x}" y="{y}" text-anchor="middle">{short(tick)}</text>')
        return parts


def line(frame: Frame, points: Sequence[Point], css: str, unit: str) -> str:
    """A line with a dot at each point that tells its value."""
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    dots = "".join(
        f'<circle class="{css}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5">'
        f"<title>{short(x)}: {short(y)} {unit}</title></circle>"
        for x, y in points
    )
    return f'<polyline class="{css} line" points="{path}"/>{dots}'


def columns(frame: Frame, points: Sequence[Point], css: str, unit: str) -> str:
    """A column from the x axis up to each point."""
    width = 0.6 * (frame.x(1) - frame.x(0))
    return "".join(
        f'<rect class="{css}" x="{frame.x(x) - width / 2:.1f}" y="{frame.y(y):.1f}" width="{width:.1f}" rx="2" '
        f'height="{max(frame.floor - frame.y(y), 0):.1f}"><title>{short(x)}: {short(y)} {unit}</title></rect>'
        for x, y in points
    )


def area(frame: Frame, points: Sequence[Point], css: str) -> str:
    """A filled area under steps: each y holds until the next x."""
    corners = []
    for (x, y), (following, _) in zip(points, [*points[1:], (points[-1][0] + 1, 0.0)], strict=True):
        corners += [f"{frame.x(x):.1f},{frame.y(y):.1f}", f"{frame.x(following):.1f},{frame.y(y):.1f}"]
    first, last = frame.x(points[0][0]), frame.x(points[-1][0] + 1)
    return f'<polygon class="{css}" points="{first:.1f},{frame.floor} {" ".join(corners)} {last:.1f},{frame.floor}"/>'


def mark(frame: Frame, x: float, css: str, title: str) -> str:
    """A vertical line."""
    at = f"{frame.x(x):.1f}"
    told = f"<title>{escape(title)}</title>"
    return f'<line class="{css}" x1="{at}" x2="{at}" y1="{TOP}" y2="{frame.floor}">{told}</line>'


def rule(frame: Frame, y: float, text: str) -> str:
    """A dashed horizontal line with a text above it."""
    at = frame.y(y)
    return (
        f'<line class="rule" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="axis" x="{frame.width - RIGHT}" y="{at - 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def band(frame: Frame, begin: float, end: float, y: float, css: str, title: str) -> str:
    """A thin horizontal bar from x `begin` to x `end`, at SVG y."""
    width = max(frame.x(end) - frame.x(begin), 1.5)
    return (
        f'<rect class="{css}" x="{frame.x(begin):.1f}" y="{y}" width="{width:.1f}" height="9" rx="2">'
        f"<title>{escape(title)}</title></rect>"
    )


def stacked(frame: Frame, at: float, thickness: float, parts: Sequence[tuple[float, str, str]]) -> str:
    """A horizontal stack of (length, class, title), from x = 0, at SVG y."""
    drawn, begin = [], 0.0
    for length, css, title in parts:
        width = max(frame.x(begin + length) - frame.x(begin), 0.8 if length else 0)
        drawn.append(
            f'<rect class="{css}" x="{frame.x(begin):.1f}" y="{at:.1f}" width="{width:.1f}" height="{thickness:.1f}">'
            f"<title>{escape(title)}</title></rect>"
        )
        begin += length
    return "".join(drawn)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """The powers of ten from `low` to `high`."""
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def short(value: float) -> str:
    """A number in a few characters: 1234567 is 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
