"""The table: what the machine did, dips within the noise smoothed out, read only at shapes the runtime can execute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import FitError

Array = NDArray[np.float64]
DIP_TOLERANCE = 0.01
Slope = Callable[[float, float], float]
Shape = Callable[[object, object], Array]


@dataclass(frozen=True, eq=False)
class Row:
    """One context of the table: sizes of shape (n,), ascending, and their seconds, falling only where that was no noise."""

    context_tokens: int
    verify_tokens: Array
    seconds: Array


@dataclass(frozen=True, eq=False)
class TableCost:
    """Measured medians per context, linear between them in t (or stepping up to the next executable size) and in context.

    Below the smallest measured size the smallest is charged; beyond the largest, seconds rise with `slope(t, c)`, the
    convex form's. Contexts outside the measured range are charged as the nearest measured one.
    """

    rows: tuple[Row, ...]
    slope: Slope
    executable: Array | None = None  # ascending sizes, None where every size runs as asked
    shape: Shape | None = None  # seconds(t, c) that bends the line between two measured sizes (a mixture of experts)

    def seconds(self, verify_tokens: object, context_tokens: object = 0) -> Array:
        """Seconds for t and c that broadcast, float64."""
        tokens, contexts = np.broadcast_arrays(np.asarray(verify_tokens, float), np.asarray(context_tokens, float))
        result = np.empty(tokens.shape)
        for context in np.unique(contexts):
            chosen = contexts == context
            result[chosen] = self._at_context(tokens[chosen], float(context))
        return result

    @property
    def min_context_tokens(self) -> int:
        """The smallest measured context."""
        return self.rows[0].context_tokens

    @property
    def max_context_tokens(self) -> int:
        """The largest measured context."""
        return self.rows[-1].context_tokens

    def _at_context(self, tokens: Array, context: float) -> Array:
        context = min(max(context, self.min_context_tokens), self.max_context_tokens)
        above = next(index for index, row in enumerate(self.rows) if row.context_tokens >= context)
        upper = self.rows[above]
        if upper.context_tokens == context:
            return self._at_row(tokens, upper)
        lower = self.rows[above - 1]
        share = (context - lower.context_tokens) / (upper.context_tokens - lower.context_tokens)
        return (1 - share) * self._at_row(tokens, lower) + share * self._at_row(tokens, upper)

    def _at_row(self, tokens: Array, row: Row) -> Array:
        if self.executable is not None:
            index = np.searchsorted(self.executable, tokens)
            tokens = np.where(index < self.executable.size, self.executable[np.minimum(index, self.executable.size - 1)], tokens)
        last = row.verify_tokens[-1]
        inside = np.interp(tokens, row.verify_tokens, row.seconds)
        if self.shape is not None:
            inside = self._bent(tokens, row)
        over = np.maximum(tokens - last, 0.0)
        return inside + over * self.slope(float(last), row.context_tokens) if over.any() else inside

    def _bent(self, tokens: Array, row: Row) -> Array:
        """The shape's curve through the measured points: its distance from them is what is interpolated linearly."""
        assert self.shape is not None
        off = row.seconds - self.shape(row.verify_tokens, row.context_tokens)
        bent = self.shape(tokens, row.context_tokens) + np.interp(tokens, row.verify_tokens, off)
        right = np.clip(np.searchsorted(row.verify_tokens, tokens), 0, row.verify_tokens.size - 1)
        left = np.where(row.verify_tokens[right] <= tokens, right, np.maximum(right - 1, 0))
        ends = row.seconds[left], row.seconds[right]
        return np.clip(bent, np.minimum(*ends), np.maximum(*ends))


def fit_table(
    verify_tokens: object,
    context_tokens: object,
    seconds: object,
    slope: Slope,
    executable: Sequence[int] | None = None,
    shape: Shape | None = None,
    noise: object = 0.0,
) -> TableCost:
    """Build the table from points of shape (n,). Raises FitError if empty.

    A dip is averaged away (see `monotone`) where that moves a point by at most 1 % or twice its relative standard error,
    `noise`; a deeper one is what the machine does (other kernels for other sizes) and stays.
    """
    tokens, contexts, values = (np.asarray(item, dtype=float).ravel() for item in (verify_tokens, context_tokens, seconds))
    if not tokens.size:
        raise FitError("a table needs at least one point, got none")
    tolerances = np.broadcast_to(np.maximum(DIP_TOLERANCE, 2 * np.asarray(noise, dtype=float)), values.shape)
    rows = []
    for context in np.unique(contexts):
        chosen = contexts == context
        order = np.argsort(tokens[chosen], kind="stable")
        sizes, medians, tolerance = tokens[chosen][order], values[chosen][order], tolerances[chosen][order]
        smooth = monotone(sizes, medians)
        rows.append(Row(int(context), sizes, np.where(np.abs(smooth - medians) <= tolerance * medians, smooth, medians)))
    sizes_that_run = None if executable is None else np.asarray(sorted(set(executable)), dtype=float)
    return TableCost(tuple(rows), slope, sizes_that_run, shape)


def monotone(verify_tokens: Array, seconds: Array) -> Array:
    """Seconds made non-decreasing: isotonic regression with relative weights (pool adjacent violators).

    t = 1, where it is measured, stays exact and bounds all others from below: a plain step decides whether to speculate.
    Averaging a dip with its neighbours rather than carrying the maximum on keeps one slow sample from raising all
    that follow.
    """
    fitted = _isotonic(seconds)
    if verify_tokens[0] == 1 and fitted[0] != seconds[0]:
        fitted = np.concatenate([seconds[:1], np.maximum(_isotonic(seconds[1:]), seconds[0])])
    return fitted


def _isotonic(seconds: Array) -> Array:
    """Weighted pool-adjacent-violators, weights 1 / seconds^2."""
    blocks: list[tuple[float, float, int]] = []  # weighted mean, weight, length
    for value in seconds:
        mean, weight, length = float(value), 1.0 / float(value) ** 2, 1
        while blocks and blocks[-1][0] >= mean:
            other, other_weight, other_length = blocks.pop()
            mean = mean if other == mean else (mean * weight + other * other_weight) / (weight + other_weight)
            weight, length = weight + other_weight, length + other_length
        blocks.append((mean, weight, length))
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks]) if blocks else np.empty(0)
