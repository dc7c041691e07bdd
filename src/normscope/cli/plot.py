"""Line charts in a terminal, with 2 × 4 braille dots per character."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row, then column of a character


@dataclass(frozen=True)
class Line:
    """Points (x, y) that a line joins, and its colour in rich's names."""

    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True)
class Axes:
    """Ranges of x and y that the plot shows; points outside are left out."""

    left: float
    right: float
    low: float
    high: float


def plot(
    lines: Sequence[Line], axes: Axes, width: int, height: int, ticks: Sequence[tuple[float, str, str]] = ()
) -> list[Text]:
    """Draw the lines as `height` rows of `width` characters.

    Args:
        ticks: (y, label in the margin, colour of a dotted line at y or "" for none).
    """
    margin = max((len(words) for _, words, _ in ticks), default=0)
    across = max(1, width - margin - 2)
    cells: dict[tuple[int, int], int] = {}
    colours: dict[tuple[int, int], str] = {}

    def dot(x: int, y: int, colour: str) -> None:
        if 0 <= x < 2 * across and 0 <= y < 4 * height:
            cell = y // 4, x // 2
            cells[cell] = cells.get(cell, 0) | _DOTS[y % 4][x % 2]
            colours[cell] = colour

    def place(x: float, y: float) -> tuple[float, float]:
        share = (axes.high - y) / (axes.high - axes.low)
        return (x - axes.left) / (axes.right - axes.left) * (2 * across - 1), share * (4 * height - 1)

    for y, _, colour in ticks:
        for x in range(0, 2 * across, 4) if colour else ():
            dot(x, round(place(0, y)[1]), colour)
    for line in lines:
        for x, y in _joined([place(*point) for point in line.points]):
            dot(x, y, line.colour)
    beside = {min(height - 1, max(0, round(place(0, y)[1]) // 4)): words for y, words, _ in reversed(ticks)}
    rows = []
    for row in range(height):
        text = Text(no_wrap=True)
        text.append(f"{beside.get(row, ''):>{margin}} │", style="dim")
        for column in range(across):
            text.append(chr(_BLANK + cells.get((row, column), 0)), style=colours.get((row, column), ""))
        rows.append(text)
    return rows


def _joined(points: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    """Dots of the straight lines between the points; a point that is not finite breaks the line."""
    dots: list[tuple[int, int]] = []
    for i, (x, y) in enumerate(points):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        dots.append((round(x), round(y)))
        if i and all(map(math.isfinite, points[i - 1])):
            x0, y0 = points[i - 1]
            steps = max(1, math.ceil(max(abs(x - x0), abs(y - y0))))
            dots += [
                (round(x0 + (x - x0) * k / steps), round(y0 + (y - y0) * k / steps)) for k in range(1, steps)
            ]
    return dots
