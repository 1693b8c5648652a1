"""Names beside points that lie close together: each goes to the nearest free place, with a line where that is not beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selector.figures.style import INK, plain

_SIZE, _CHARACTER_POINTS, _LINE_POINTS = 8, 5.0, 11.0
_DISTANCES = (9, 15, 22, 30, 40, 52, 66, 82, 100)
_ANGLES = (0, 35, -35, 60, -60, 180, 145, -145, 90, -90)


class Spot(NamedTuple):
    """A point in data coordinates, its name and the colour of the line to it."""

    x: float
    y: float
    name: str
    colour: str


def label_points(axes: Any, spots: Sequence[Spot], lines: Sequence[tuple[Sequence[float], Sequence[float]]] = ()) -> None:
    """Write the names; they keep off each other, off the points and off the curves `lines` (x, y)."""
    figure = axes.figure
    figure.draw_without_rendering()  # the layout must be final before anything is measured
    unit = figure.dpi / 72
    at = [axes.transData.transform((spot.x, spot.y)) / unit for spot in spots]
    obstacles = [*at, *(point / unit for x, y in lines for point in axes.transData.transform(_dense(x, y)))]
    box = np.array([axes.bbox.x0, axes.bbox.y0, axes.bbox.x1, axes.bbox.y1]) / unit
    placed: list[NDArray[np.float64]] = []
    for spot, point in sorted(zip(spots, at, strict=True), key=lambda pair: -pair[1][1]):
        dx, dy, rectangle = _free_place(point, _CHARACTER_POINTS * len(spot.name), np.array(obstacles), placed, box)
        placed.append(rectangle)
        near = abs(dy) <= 4 and abs(dx) <= _DISTANCES[0]
        arrow = None if near else {"arrowstyle": "-", "color": spot.colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            plain(spot.name), (spot.x, spot.y), (dx, dy), textcoords="offset points", ha="left" if dx >= 0 else "right",
            va="center", size=_SIZE, color=INK, arrowprops=arrow, zorder=5,
        )  # fmt: skip


def _dense(x: Sequence[float], y: Sequence[float]) -> NDArray[np.float64]:
    """Points along a curve, four to a segment."""
    steps = np.arange(0, max(len(x) - 1, 1) + 1e-9, 0.25)
    return np.stack([np.interp(steps, np.arange(len(x)), x), np.interp(steps, np.arange(len(y)), y)], axis=1)


def _free_place(
    point: NDArray[np.float64], width: float, obstacles: NDArray[np.float64], placed: list[NDArray[np.float64]], box: Any
) -> tuple[float, float, NDArray[np.float64]]:
    """Offsets and rectangle of the place that touches least; of equal ones the nearest."""
    best: tuple[float, float, float, NDArray[np.float64]] | None = None
    for distance in _DISTANCES:
        for angle in np.radians(_ANGLES):
            dx, dy = distance * np.cos(angle), distance * np.sin(angle)
            left = point[0] + dx - (width if dx < -1e-9 else 0)
            rectangle = np.array([left, point[1] + dy - _LINE_POINTS / 2, left + width, point[1] + dy + _LINE_POINTS / 2])
            touched = sum(bool((rectangle[:2] < other[2:]).all() and (other[:2] < rectangle[2:]).all()) for other in placed)
            inside = ((obstacles > rectangle[:2] - 2) & (obstacles < rectangle[2:] + 2)).all(axis=1).sum()
            outside = (rectangle[:2] < box[:2]).any() or (rectangle[2:] > box[2:]).any()
            penalty = 100.0 * touched + 20.0 * bool(outside) + float(min(inside, 5))
            if best is None or penalty < best[0]:
                best = penalty, float(dx), float(dy), rectangle
            if penalty == 0:
                break
        if best is not None and best[0] == 0:
            break
    assert best is not None
    return best[1:]
