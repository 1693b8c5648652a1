"""How sure a predicted latency is: the samples' spread where it was measured, the residual of leaving points out between.

Each measured point is predicted from its neighbours alone; the distance, in units of what noise and the bend of the curve
there lead one to expect, is a score. An interval reaches as many units as the wanted share of scores did (conformal
prediction with a local scale), so that it covers as often as it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.cells import VerifyCell

Array = NDArray[np.float64]
PRIORS = {"measured": 0.0, "published": 0.0, "composed": 0.07, "estimated": 0.0}  # composed: spread between engine versions
FLOOR = 2e-4  # relative; no clock and no curve is better known
OUTSIDE = 0.10  # relative, per doubling beyond what was measured
MIN_SCORES = 8
FALLBACK_SCORE = 2.5
MOST_LEFT_OUT = 60  # of one line
SLACK_LEVEL = 0.985


@dataclass(frozen=True, eq=False)
class KnownLine:
    """Measured points of one context: positions, seconds, relative standard errors of the medians, each (n,)."""

    sizes: Array
    seconds: Array
    noise: Array

    def scale(self, tokens: Array) -> Array:
        """The relative error to expect of linear interpolation at `tokens` (m,); the noise alone at measured sizes."""
        if self.sizes.size == 1:
            return np.hypot(self.noise[0], FLOOR) + _outside(tokens, self.sizes[0], self.sizes[0])
        right = np.clip(np.searchsorted(self.sizes, tokens, side="left"), 1, self.sizes.size - 1)
        left = right - 1
        share = np.clip((tokens - self.sizes[left]) / (self.sizes[right] - self.sizes[left]), 0.0, 1.0)
        chord = (1 - share) * self.seconds[left] + share * self.seconds[right]
        noise = np.hypot((1 - share) * self.noise[left], share * self.noise[right])
        between = (share > 0) & (share < 1)
        own = np.where(between, float(np.median(self.noise)), 0.0)  # a median measured there would be as noisy as the others
        bend = np.where(between, self._bend(tokens, left, right, chord) / chord, 0.0)
        return np.sqrt(noise**2 + own**2 + bend**2 + FLOOR**2) + _outside(tokens, self.sizes[0], self.sizes[-1])

    def reach(self, tokens: Array) -> Array:
        """How far the measured neighbours lie from the line between them, relatively: a rising curve stays within."""
        right = np.clip(np.searchsorted(self.sizes, tokens, side="left"), 0, self.sizes.size - 1)
        left = np.maximum(right - 1, 0)
        middle = np.interp(tokens, self.sizes, self.seconds)
        ends = np.abs(np.log(self.seconds[left] / middle)), np.abs(np.log(self.seconds[right] / middle))
        inside = (tokens > self.sizes[0]) & (tokens < self.sizes[-1])
        return np.where(inside, np.maximum(*ends), np.inf)

    def _bend(self, tokens: Array, left: Any, right: Any, chord: Array) -> Array:
        """How far, at most, the lines through the two points on either side lie from the chord; a third of the chord's
        own rise where there is neither."""
        rise = np.abs(self.seconds[right] - self.seconds[left])
        found = np.zeros(tokens.shape)
        for near, far, exists in ((left, left - 1, left > 0), (right, right + 1, right + 1 < self.sizes.size)):
            far = np.clip(far, 0, self.sizes.size - 1)
            run = np.where(exists, self.sizes[near] - self.sizes[far], 1.0)
            line = self.seconds[near] + (tokens - self.sizes[near]) * (self.seconds[near] - self.seconds[far]) / run
            found = np.maximum(found, np.where(exists, np.abs(line - chord), 0.0))
        neither = (left == 0) & (right == self.sizes.size - 1)
        return np.where(neither, rise / 3, np.minimum(found, np.maximum(rise, 0.02 * chord)))

    def scores(self) -> Array:
        """Of every point between two others (2, n): its distance from their chord, in units of the scale there, and by how
        much it lies beyond both of them. Of long lines every so many points are taken."""
        middle = np.arange(1, self.sizes.size - 1, 1 + self.sizes.size // MOST_LEFT_OUT)
        if not middle.size:
            return np.empty((2, 0))
        left, right, tokens = middle - 1, middle + 1, self.sizes[middle]
        share = (tokens - self.sizes[left]) / (self.sizes[right] - self.sizes[left])
        chord = (1 - share) * self.seconds[left] + share * self.seconds[right]
        noise = np.hypot((1 - share) * self.noise[left], share * self.noise[right])
        own = np.array([np.median(np.delete(self.noise, index)) for index in middle]) if self.noise.any() else 0.0
        bend = self._bend(tokens, left, right, chord) / chord
        scale = np.sqrt(noise**2 + own**2 + bend**2 + FLOOR**2)
        ends = [np.abs(np.log(self.seconds[side] / chord)) for side in (left, right)]
        distance = np.abs(np.log(self.seconds[middle] / chord))
        return np.stack([distance / scale, np.maximum(distance - np.maximum(*ends), 0.0)])


def _outside(tokens: Array, first: float, last: float) -> Array:
    """Relative error beyond what was measured: 10 % per doubling."""
    over = np.log2(np.maximum(tokens, 1.0) / last)
    under = np.log2(max(first, 1.0) / np.maximum(tokens, 1.0))
    return OUTSIDE * np.maximum(np.maximum(over, under), 0.0)


def relative_noise(cell: VerifyCell) -> float:
    """The standard error of a cell's median relative to it; 0 where it was not sampled."""
    if cell.num_samples < 2 or cell.low_seconds is None or cell.high_seconds is None:
        return 0.0
    return 1.25 * (cell.high_seconds - cell.low_seconds) / 2.56 / np.sqrt(cell.num_samples) / cell.seconds


def relative_spread(cell: VerifyCell) -> float:
    """Half the distance from the 10th to the 90th percentile of single calls, relative; 0 where unknown."""
    if not cell.num_samples or cell.low_seconds is None or cell.high_seconds is None:
        return 0.0
    return (cell.high_seconds - cell.low_seconds) / 2 / cell.seconds


class IntervalModel:
    """Intervals for one batch size, in relative half-widths around the table."""

    def __init__(self, cells: Sequence[VerifyCell]) -> None:
        self.contexts = np.array(sorted({cell.context_tokens for cell in cells}), float)
        rows = [sorted((c for c in cells if c.context_tokens == at), key=lambda c: c.verify_tokens) for at in self.contexts]
        self.lines = [
            KnownLine(
                np.array([cell.verify_tokens for cell in row], float),
                np.array([cell.seconds for cell in row]),
                np.array([relative_noise(cell) for cell in row]),
            )
            for row in rows
        ]
        self.spread = float(np.median([relative_spread(cell) for cell in cells]))
        left_out = np.concatenate([line.scores() for line in self.lines], axis=1)
        self._scores = left_out[0]
        self._slack = 0.03 if left_out.shape[1] < MIN_SCORES else float(np.quantile(left_out[1], SLACK_LEVEL))

    @cached_property
    def _context_scores(self) -> Array:
        """Scores of leaving contexts out; only asked for between measured contexts, and not cheap."""
        return np.concatenate([line.scores()[0] for line in self._columns_by_size.values()] or [np.empty(0)])

    @cached_property
    def _columns_by_size(self) -> dict[float, KnownLine]:
        """Lines over contexts at the sizes measured at three contexts or more; contexts count from 1."""
        found: dict[float, list[tuple[float, float, float]]] = {}
        for context, line in zip(self.contexts, self.lines, strict=True):
            for size, seconds, noise in zip(line.sizes, line.seconds, line.noise, strict=True):
                found.setdefault(float(size), []).append((context + 1, seconds, noise))
        return {size: KnownLine(*np.array(column).T) for size, column in found.items() if len(column) > 2}

    def half_width(self, tokens: Array, context: float, level: float) -> Array:
        """Relative half-width of the interval for a median, at sizes (m,) and one context."""
        above = int(np.searchsorted(self.contexts, context))
        inside = 0 < above < self.contexts.size and self.contexts[above] != context
        near = [above - 1, above] if inside else [min(above, self.contexts.size - 1)]
        normal, score = NormalDist().inv_cdf((1 + level) / 2), _quantile(self._scores, level)
        parts = []
        for index in near:
            line = self.lines[index]
            measured = np.isin(tokens, line.sizes)
            scale = line.scale(tokens)
            parts.append(np.where(measured, normal * scale, np.minimum(score * scale, line.reach(tokens) + self._slack + FLOOR)))
        width = np.max(parts, axis=0)
        if inside and self._columns_by_size:
            sizes = np.array(sorted(self._columns_by_size))
            at = np.array([context + 1.0])
            scales = np.array([self._columns_by_size[size].scale(at)[0] for size in sizes])
            width = np.hypot(width, _quantile(self._context_scores, level) * np.interp(tokens, sizes, scales))
        elif context > self.contexts[-1]:
            width = width + OUTSIDE * np.log2((context + 1) / (self.contexts[-1] + 1))
        return np.asarray(width)


def _quantile(scores: Array, level: float) -> float:
    """The score that `level` of those left out stay below, with the finite-sample correction of conformal prediction."""
    if scores.size < MIN_SCORES:
        return FALLBACK_SCORE * NormalDist().inv_cdf((1 + level) / 2) / 1.645
    return float(np.quantile(scores, min(1.0, level * (scores.size + 1) / scores.size), method="higher"))
