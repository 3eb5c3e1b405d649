"""Curves as SVG: a picture in a page that needs nothing from outside. Knows numbers and text; text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

# Okabe and Ito's colours, which colour-blind people can tell apart; these have contrast on white and on black.
COLOURS = ("#1f83c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # and once these are used up, the lines differ
MOST_POINTS = 600
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 34
TICKS = 5
LARGEST, SMALLEST = 1e300, 1e-290


class Curve(NamedTuple):
    """Points in their order. What is not finite is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def plot(
    title: str, curves: Sequence[Curve], x_label: str, width: int = 620, height: int = 240, from_zero: bool = False
) -> str:
    """One picture with all of them; says so if there is nothing to draw."""
    drawn = [few for curve in curves if (few := _few(curve)).x]
    sound = [(x, y) for curve in drawn for x, y in zip(curve.x, curve.y, strict=True) if is_sound(y)]
    if not sound:
        return f"<p>{html.escape(title)}: nothing to draw</p>"
    low_x, high_x = min(x for x, _ in sound), max(x for x, _ in sound)
    low_y, high_y = min(y for _, y in sound), max(y for _, y in sound)
    ticks_x = round_numbers(low_x, high_x)
    ticks_y = round_numbers(min(0.0, low_y) if from_zero else low_y, high_y)
    low_y, high_y = min(low_y, ticks_y[0]), max(high_y, ticks_y[-1])
    across = (width - LEFT - RIGHT) / ((high_x - low_x) or 1.0)
    up = (height - TOP - BOTTOM) / ((high_y - low_y) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - low_x) * across, height - BOTTOM - (y - low_y) * up

    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{html.escape(title)}" style="max-width:100%;height:auto" font-family="sans-serif" font-size="11">'
        f'<text x="{LEFT}" y="14" fill="currentColor" font-weight="bold">{html.escape(title)}</text>'
    ]
    for tick in ticks_y:
        _, y = place(low_x, tick)
        parts.append(
            f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" fill="currentColor" text-anchor="end">{_shown(tick)}</text>'
        )
    for tick in ticks_x:
        x, _ = place(tick, low_y)
        if LEFT - 1 <= x <= width - RIGHT + 1:
            anchor = "end" if x > width - RIGHT - 20 else "middle"
            parts.append(
                f'<text x="{x:.1f}" y="{height - BOTTOM + 15}" fill="currentColor" text-anchor="{anchor}">'
                f"{_shown(tick)}</text>"
            )
    parts.append(
        f'<text x="{width - RIGHT}" y="{height - 4}" fill="currentColor" text-anchor="end" opacity=".7">'
        f"{html.escape(x_label)}</text>"
    )
    for i, curve in enumerate(drawn):
        style = f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-dasharray="{DASHES[i // len(COLOURS) % len(DASHES)]}"'
        parts.append(f'<g fill="none" {style} stroke-width="1.6"><title>{html.escape(curve.name)}</title>')
        parts += [_line([place(x, y) for x, y in stretch]) for stretch in _stretches(curve)]
        parts.append("</g>")
    return "".join(parts) + "</svg>" + (_legend(drawn) if len(drawn) > 1 else "")


def is_sound(value: float) -> bool:
    """Can it be drawn? Differences of what is larger would not be finite."""
    return abs(value) < LARGEST


def _legend(curves: Sequence[Curve]) -> str:
    marks = (
        f'<span style="white-space:nowrap"><svg width="18" height="8"><line x1="0" x2="18" y1="4" y2="4" '
        f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="3" '
        f'stroke-dasharray="{DASHES[i // len(COLOURS) % len(DASHES)]}"/></svg> {html.escape(curve.name)}</span>'
        for i, curve in enumerate(curves)
    )
    return f'<div style="font-size:12px;display:flex;flex-wrap:wrap;gap:4px 14px">{"".join(marks)}</div>'


def _line(points: list[tuple[float, float]]) -> str:
    if len(points) == 1:
        x, y = points[0]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
    return f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _stretches(curve: Curve) -> list[list[tuple[float, float]]]:
    """Between the gaps."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if is_sound(y):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _few(curve: Curve) -> Curve:
    """Several points become their mean, where there are more than can be seen."""
    size = -(-len(curve.x) // MOST_POINTS)
    if size <= 1:
        return curve
    x, y = [], []
    for i in range(0, len(curve.x), size):
        sound = [value for value in curve.y[i : i + size] if is_sound(value)]
        x.append(sum(curve.x[i : i + size]) / len(curve.x[i : i + size]))
        y.append(sum(sound) / len(sound) if sound else math.nan)
    return Curve(curve.name, x, y)


def round_numbers(low: float, high: float) -> list[float]:
    """Round numbers from just below to just above."""
    if not high - low > max(abs(high) * 1e-12, SMALLEST):
        return [low]
    rough = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough)
    first = math.floor(low / step)
    return [i * step for i in range(first, math.ceil(high / step) + 1)]


def _shown(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.6g}"
