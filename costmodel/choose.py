"""From samples to the next points: rows over verify tokens, columns over contexts and batches, their widest gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.gaps import Gap, find_gaps
from costmodel.partial import Sample
from costmodel.plan import Shape

Array = NDArray[np.float64]
Rows = dict[tuple[int, int], tuple[Array, Array, Array]]  # (context, requests) -> sizes, medians, standard errors
SIZES_PER_STEP = 8  # chosen before any of them is measured, so that visits are shared
CONTEXT_MULTIPLE = 16


class Range(Protocol):
    """What is needed of a plan here."""

    @property
    def error(self) -> float:
        """Relative error wanted."""

    @property
    def num_requests(self) -> tuple[int, ...]:
        """Batches that may be measured."""

    @property
    def allowed_contexts(self) -> tuple[int, ...] | None:
        """Contexts that may be measured; None for every multiple of 16."""


class Points:
    """The samples so far, by shape asked for."""

    _pooled: float | None = None

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._seconds: dict[Shape, list[float]] = {}
        self._executed: dict[Shape, int] = {}
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Take in one sample; those of the reference point are for drift alone."""
        self._pooled = None
        if sample.role == "grid":
            self._seconds.setdefault(sample.shape, []).append(sample.seconds)
            self._executed[sample.shape] = sample.executed

    def count(self, shape: Shape) -> int:
        """Samples of one shape."""
        return len(self._seconds.get(shape, ()))

    def shapes(self, stage: str | None = None) -> list[Shape]:
        """The shapes sampled at least once."""
        return [shape for shape in self._seconds if stage in (None, shape.stage)]

    def padded(self, num_requests: int) -> list[tuple[int, int]]:
        """Pairs (asked, executed) of verify calls of one batch that were padded."""
        calls = ((s.size, e) for s, e in self._executed.items() if s.stage == "verify" and s.num_requests == num_requests)
        return sorted({(asked, executed) for asked, executed in calls if executed > asked})

    def relative_error(self, shape: Shape) -> float:
        """The standard error of the median of one shape, relative to it."""
        own = _standard_error(self._seconds[shape]) / float(np.median(self._seconds[shape]))
        return max(own, 1.25 * self.pooled_deviation() / np.sqrt(self.count(shape)))

    def rows(self) -> dict[tuple[int, int], tuple[Array, Array, Array]]:
        """Per (context, requests): executed sizes ascending, medians, standard errors, each (n,)."""
        merged: dict[tuple[int, int], dict[int, list[float]]] = {}
        for shape in self.shapes("verify"):
            row = merged.setdefault((shape.context_tokens, shape.num_requests), {})
            row.setdefault(self._executed[shape], []).extend(self._seconds[shape])
        pooled = self.pooled_deviation()
        return {place: _line(row, pooled) for place, row in merged.items()}

    def pooled_deviation(self) -> float:
        """The relative deviation of single calls, the median over all verify shapes: two samples alone say little."""
        if self._pooled is None:
            shapes = [shape for shape in self.shapes("verify") if self.count(shape) > 1]
            found = [np.std(self._seconds[shape], ddof=1) / np.mean(self._seconds[shape]) for shape in shapes]
            self._pooled = float(np.median(found)) if found else 0.0
        return self._pooled


def _line(values: dict[int, list[float]], pooled: float) -> tuple[Array, Array, Array]:
    keys = sorted(values)
    medians = np.array([float(np.median(values[key])) for key in keys])
    errors = [
        max(_standard_error(values[key]), 1.25 * pooled * median / np.sqrt(len(values[key])))
        for key, median in zip(keys, medians, strict=True)
    ]
    return np.array(keys, float), medians, np.array(errors)


def _standard_error(samples: Sequence[float]) -> float:
    """Of the median, from the distance of 10th and 90th percentile (2.56 deviations of a normal)."""
    low, high = np.percentile(samples, [10, 90])
    return float(1.25 * (high - low) / 2.56 / np.sqrt(len(samples)))


def open_sizes(
    most: int, num_requests: int, declared: Sequence[int] | None, refused: set[int], padded: Sequence[tuple[int, int]]
) -> list[int]:
    """Sizes worth asking for: multiples of the batch that run, less those known to be padded to another."""
    sizes: Iterable[int] = range(num_requests, most + 1, num_requests) if declared is None else declared
    covered = {size for asked, executed in padded for size in range(asked, executed)}
    return [size for size in sizes if num_requests <= size <= most and size not in refused and size not in covered]


def choose(points: Points, sizes: Callable[[int], list[int]], plan: Range, stepped: bool) -> list[tuple[Gap, list[Shape]]]:
    """Gaps wider than wanted, widest first (at most SIZES_PER_STEP in size, one in context, one in batch), with the
    shapes that would narrow them."""
    rows = points.rows()
    over_sizes = [found for place, row in rows.items() for found in _size_gaps(place, row, sizes(place[1]), plan.error, stepped)]
    over_sizes.sort(key=lambda found: -found[0].relative)
    chosen = over_sizes[:SIZES_PER_STEP]
    for candidates in (_context_gaps(rows, plan), _request_gaps(rows, plan, sizes)):
        if candidates:
            chosen.append(max(candidates, key=lambda found: found[0].relative))
    return sorted(chosen, key=lambda found: -found[0].relative)


def _size_gaps(
    place: tuple[int, int], row: tuple[Array, Array, Array], allowed: list[int], error: float, stepped: bool
) -> list[tuple[Gap, list[Shape]]]:
    found = []
    for gap in find_gaps(row[0], np.maximum.accumulate(row[1]) if stepped else row[1], row[2], stepped):
        inside = [size for size in allowed if gap.left < size < gap.right]
        if gap.relative > error and inside:
            found.append((gap, [Shape("verify", min(inside, key=lambda size: abs(size - gap.at)), *place)]))
    return found


def _columns(rows: Rows, axis: int) -> dict[tuple[int, int], list[tuple[int, float, float]]]:
    """Lines over contexts (axis 0) or batches (axis 1) at equal size: (other coordinate, size) -> points."""
    columns: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for place, (sizes, medians, errors) in sorted(rows.items()):
        for size, median, error in zip(sizes, medians, errors, strict=True):
            columns.setdefault((place[1 - axis], int(size)), []).append((place[axis], float(median), float(error)))
    return columns


def _context_gaps(rows: Rows, plan: Range) -> list[tuple[Gap, list[Shape]]]:
    found = []
    for (requests, _), column in _columns(rows, 0).items():
        for gap in find_gaps(*np.array(column, float).T):
            middle = (gap.left + gap.right) / 2
            context = CONTEXT_MULTIPLE * round(middle / CONTEXT_MULTIPLE)
            if plan.allowed_contexts is not None:
                context = min(plan.allowed_contexts, key=lambda allowed: abs(allowed - middle))
            if gap.relative > plan.error and gap.left < context < gap.right and (context, requests) not in rows:
                found.append((gap, [Shape("verify", int(size), context, requests) for size in _first_of(rows, requests)]))
    return found


def _first_of(rows: Rows, requests: int) -> Array:
    """The sizes every context of this batch has."""
    lines = [set(row[0]) for place, row in rows.items() if place[1] == requests]
    return np.array(sorted(set.intersection(*lines)))


def _request_gaps(rows: Rows, plan: Range, sizes: Callable[[int], list[int]]) -> list[tuple[Gap, list[Shape]]]:
    found = []
    for (context, _), column in _columns(rows, 1).items():
        for gap in find_gaps(*np.array(column, float).T):
            inside = [number for number in plan.num_requests if gap.left < number < gap.right and (context, number) not in rows]
            if gap.relative > plan.error and inside:
                number = min(inside, key=lambda item: abs(item - (gap.left + gap.right) / 2))
                allowed = sizes(number)
                wish = {min(allowed, key=lambda size: abs(size - at)) for at in _first_of(rows, int(gap.left)) if allowed}
                found.append((gap, [Shape("verify", size, context, number) for size in sorted(wish)]))
    return found
