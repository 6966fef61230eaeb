"""Line charts on two logarithmic axes, as SVG text: what a measured curve and its roof need, and no more. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN, LEGEND = 640, 400, 60, 170
COLORS = ("#1f6fb4", "#c2410c", "#15803d", "#7e22ce")
MIN_RANGE = 2.0  # of an axis, last value by first, so that a flat line has room


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # both positive
    color: int = 0
    is_roof: bool = False  # dashed


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions of values on `length` pixels."""

    low: float
    high: float
    length: float

    @classmethod
    def over(cls, values: Sequence[float], length: float) -> Axis:
        if not values or min(values) <= 0:
            raise ValueError("a logarithmic axis needs values above 0")
        return cls(min(values), max(max(values), min(values) * MIN_RANGE), length)

    def at(self, value: float) -> float:
        return self.length * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten within."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [
            step * 10.0**power for power in powers for step in (1, 2, 5) if self.low <= step * 10.0**power <= self.high
        ]


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    xs = Axis.over([x for line in lines for x, _ in line.points], WIDTH - MARGIN - LEGEND)
    ys = Axis.over([y for line in lines for _, y in line.points], HEIGHT - 2 * MARGIN)
    measured = sorted({x for line in lines for x, _ in line.points})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(MARGIN, 24, title, size=14),
        _text(MARGIN + xs.length / 2, HEIGHT - 16, x_name, anchor="middle"),
        _text(8, MARGIN - 12, y_name),
        *(_text(MARGIN + xs.at(x), HEIGHT - MARGIN + 18, f"{x:g}", anchor="middle") for x in measured),
    ]
    for tick in ys.ticks():
        y = HEIGHT - MARGIN - ys.at(tick)
        parts.append(f'<path d="M{MARGIN} {y:.1f}h{xs.length:.1f}" stroke="#ddd"/>')
        parts.append(_text(MARGIN - 6, y + 4, f"{tick:,g}", anchor="end"))
    for place, line in enumerate(lines):
        parts += _line(line, xs, ys, place)
    return "\n".join([*parts, "</svg>", ""])


def _line(line: Line, xs: Axis, ys: Axis, place: int) -> list[str]:
    """The curve, and its name in the legend."""
    color, dash = COLORS[line.color % len(COLORS)], ' stroke-dasharray="5 4"' if line.is_roof else ""
    style = f'fill="none" stroke="{color}" stroke-width="1.8"{dash}'
    points = [(MARGIN + xs.at(x), HEIGHT - MARGIN - ys.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [] if line.is_roof else [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in points]
    left, top = WIDTH - LEGEND + 14, MARGIN + 18 * place
    legend = [f'<path d="M{left} {top}h22" {style}/>', _text(left + 28, top + 4, line.name)]
    return [f'<polyline points="{path}" {style}/>', *dots, *legend]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
