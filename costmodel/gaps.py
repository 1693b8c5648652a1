"""How little is known between measured points: the chord above, the neighbours' extensions below.

For a convex, rising curve the value between two measured points lies below their chord and above the lines through the
two points on either side. Where a point lies above the chord of its neighbours by more than the noise the curve is not
convex there (a cliff, a concave stretch), and only monotonicity bounds what lies beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SIGMAS = 2.0
LEAST_BREAK = 0.005  # of the value; smaller bumps cost nothing


@dataclass(frozen=True)
class Gap:
    """The stretch between two neighbouring measured points: `relative` is the widest bound, as a share of the chord,
    beyond the noise; `at` is where it is widest; `broken` says that an end lies in a break of convexity."""

    left: float
    right: float
    relative: float
    at: float
    broken: bool


def find_breaks(positions: Array, seconds: Array, errors: Array) -> Array:
    """Boolean (n,): points above the chord of their neighbours by more than SIGMAS standard errors and 0.5 %."""
    found = np.zeros(positions.size, dtype=bool)
    if positions.size < 3:
        return found
    share = (positions[1:-1] - positions[:-2]) / (positions[2:] - positions[:-2])
    chord = (1 - share) * seconds[:-2] + share * seconds[2:]
    noise = np.sqrt(errors[1:-1] ** 2 + ((1 - share) * errors[:-2]) ** 2 + (share * errors[2:]) ** 2)
    found[1:-1] = seconds[1:-1] - chord > np.maximum(SIGMAS * noise, LEAST_BREAK * chord)
    return found


def find_gaps(positions: Array, seconds: Array, errors: Array, stepped: bool = False) -> list[Gap]:
    """The gaps of one line of points, ascending in position; `errors` are standard errors of the seconds, (n,) each.

    `stepped` says that nothing is interpolated between the points (captured sizes not yet known), so that only
    monotonicity bounds a gap.
    """
    broken = find_breaks(positions, seconds, errors)
    gaps = []
    for index in range(positions.size - 1):
        if stepped or broken[index] or broken[index + 1]:
            gaps.append(_monotone_gap(positions, seconds, errors, index))
        else:
            gaps.append(_convex_gap(positions, seconds, errors, index))
    return gaps


def _monotone_gap(positions: Array, seconds: Array, errors: Array, index: int) -> Gap:
    left, right = float(positions[index]), float(positions[index + 1])
    jump = float(seconds[index + 1] - seconds[index])
    noise = SIGMAS * float(np.hypot(errors[index], errors[index + 1]))
    relative = max(jump - noise, 0.0) / 2 / float(max(seconds[index], seconds[index + 1]))
    return Gap(left, right, relative, (left + right) / 2, True)


def _convex_gap(positions: Array, seconds: Array, errors: Array, index: int) -> Gap:
    x, y = positions, seconds
    left, right = float(x[index]), float(x[index + 1])
    at = np.linspace(left, right, 33)[1:-1]
    share = (at - left) / (right - left)
    chord = (1 - share) * y[index] + share * y[index + 1]
    below, noise = np.full(at.shape, y[index]), np.full(at.shape, errors[index])
    if index > 0:
        below, noise = _higher(below, noise, *_extend(x, y, errors, index, index - 1, at))
    if index + 2 < x.size:
        below, noise = _higher(below, noise, *_extend(x, y, errors, index + 1, index + 2, at))
    chord_noise = np.hypot((1 - share) * errors[index], share * errors[index + 1])
    width = (chord - below - SIGMAS * np.hypot(noise, chord_noise)) / chord
    best = int(width.argmax())
    if index + 2 >= x.size:  # nothing to the right bounds it, so the widest place would be the end itself
        best = int(np.abs(at - np.sqrt(max(left, 1.0) * right)).argmin())
    return Gap(left, right, max(float(width[best]), 0.0), float(at[best]), False)


def _extend(x: Array, y: Array, errors: Array, near: int, far: int, at: Array) -> tuple[Array, Array]:
    """The line through two points, and its standard error, at `at`."""
    reach = (at - x[near]) / (x[near] - x[far])
    return y[near] + reach * (y[near] - y[far]), np.hypot((1 + reach) * errors[near], reach * errors[far])


def _higher(first: Array, first_noise: Array, second: Array, second_noise: Array) -> tuple[Array, Array]:
    above = second > first
    return np.where(above, second, first), np.where(above, second_noise, first_noise)
