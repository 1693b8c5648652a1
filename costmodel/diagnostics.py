"""Where a cost curve is not what the theory assumes: cliffs, concave stretches, flat curves, suspect points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.cells import StageCell, VerifyCell
from costmodel.convex import ConvexCost
from costmodel.table import Row, TableCost

Array = NDArray[np.float64]
CLIFF_RELATIVE_JUMP = 0.05  # of the seconds before it
CLIFF_SLOPE_RATIO = 3.0  # against the stretches before and after
CONCAVE_GAP = 0.03  # of the convex minorant
FLAT_RANGE = 0.01  # of the smallest seconds


@dataclass(frozen=True)
class Cliff:
    """A jump between neighbouring measured sizes, far above the slope around it."""

    context_tokens: int
    num_requests: int
    from_verify_tokens: int
    to_verify_tokens: int
    jump_seconds: float
    relative_jump: float


@dataclass(frozen=True)
class ConcaveStretch:
    """Sizes between which the table lies above its convex minorant by at most `relative_gap`."""

    context_tokens: int
    num_requests: int
    from_verify_tokens: int
    to_verify_tokens: int
    relative_gap: float


@dataclass(frozen=True)
class Gap:
    """The measured point at which `convex` and `table` differ most, relative to the table."""

    context_tokens: int
    num_requests: int
    verify_tokens: int
    relative_gap: float


@dataclass(frozen=True)
class Diagnostics:
    """What to know before trusting a cost curve.

    `degenerate` means that size makes no measured difference (or only one size is known): the largest budget would
    always win, so a policy must not read a decision out of this curve; `degenerate_reason` says why.
    """

    degenerate: bool
    degenerate_reason: str | None
    cliffs: tuple[Cliff, ...]
    concave_stretches: tuple[ConcaveStretch, ...]
    largest_gap: Gap | None
    mean_relative_gap: float
    suspect_cells: tuple[VerifyCell | StageCell, ...]
    flags: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """`degenerate`, or `ok`."""
        return "degenerate" if self.degenerate else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {"status": self.status, **asdict(self)}


def find_cliffs(row: Row, num_requests: int = 1) -> list[Cliff]:
    """Jumps of more than 5 % whose slope is over three times that of the stretches before and after.

    A convex curve may steepen, so a jump counts only where the slope falls again behind it.
    """
    tokens, seconds = row.verify_tokens, row.seconds
    slopes = np.diff(seconds) / np.diff(tokens)
    found = []
    for index in range(slopes.size - 1):
        jump = seconds[index + 1] - seconds[index]
        around = [slopes[index + 1]] + ([slopes[index - 1]] if index else [])
        if jump > CLIFF_RELATIVE_JUMP * seconds[index] and slopes[index] > CLIFF_SLOPE_RATIO * max(around):
            ends = int(tokens[index]), int(tokens[index + 1])
            found.append(Cliff(row.context_tokens, num_requests, *ends, float(jump), float(jump / seconds[index])))
    return found


def find_concave_stretches(row: Row, num_requests: int = 1) -> list[ConcaveStretch]:
    """Stretches between neighbouring corners of the convex minorant where the table lies over 3 % above it."""
    tokens, seconds = row.verify_tokens, row.seconds
    corners = minorant_corners(tokens, seconds)
    minorant = np.interp(tokens, tokens[corners], seconds[corners])
    gaps = seconds / minorant - 1.0
    found = []
    for left, right in zip(corners[:-1], corners[1:], strict=True):
        worst = float(gaps[left : right + 1].max())
        if worst > CONCAVE_GAP:
            found.append(ConcaveStretch(row.context_tokens, num_requests, int(tokens[left]), int(tokens[right]), worst))
    return found


def minorant_corners(tokens: Array, seconds: Array) -> list[int]:
    """Indices of the corners of the largest convex function below the points (lower hull, Andrew's monotone chain)."""
    corners: list[int] = []
    for index in range(tokens.size):
        while len(corners) >= 2:
            first, second = corners[-2], corners[-1]
            turn = (tokens[second] - tokens[first]) * (seconds[index] - seconds[first])
            if turn > (tokens[index] - tokens[first]) * (seconds[second] - seconds[first]):
                break
            corners.pop()
        corners.append(index)
    return corners


def diagnose(
    cells: Sequence[VerifyCell], stages: Sequence[StageCell], tables: dict[int, TableCost], convexes: dict[int, ConvexCost]
) -> Diagnostics:
    """Examine every measured context and batch."""
    rows = [(requests, row) for requests, table in sorted(tables.items()) for row in table.rows]
    gaps = [_relative_gaps(cells, requests, tables[requests], convexes[requests]) for requests in sorted(tables)]
    reason = _degenerate([row for _, row in rows])
    cliffs = [cliff for requests, row in rows for cliff in find_cliffs(row, requests)]
    return Diagnostics(
        degenerate=reason is not None,
        degenerate_reason=reason,
        cliffs=_beyond_noise(cliffs, cells),
        concave_stretches=tuple(found for requests, row in rows for found in find_concave_stretches(row, requests)),
        largest_gap=max((gap for gap, _ in gaps), key=lambda gap: abs(gap.relative_gap)),
        mean_relative_gap=float(np.mean(np.concatenate([relative for _, relative in gaps]))),
        suspect_cells=(*(cell for cell in cells if cell.flags), *(cell for cell in stages if cell.flags)),
    )


def _relative_gaps(cells: Sequence[VerifyCell], requests: int, table: TableCost, convex: ConvexCost) -> tuple[Gap, Array]:
    """The largest gap and the size of every gap, of shape (cells of this batch,)."""
    chosen = [cell for cell in cells if cell.num_requests == requests]
    tokens = np.array([cell.verify_tokens for cell in chosen], float)
    contexts = np.array([cell.context_tokens for cell in chosen], float)
    relative = convex.seconds(tokens, contexts) / table.seconds(tokens, contexts) - 1.0
    worst = int(np.abs(relative).argmax())
    gap = Gap(chosen[worst].context_tokens, requests, chosen[worst].verify_tokens, float(relative[worst]))
    return gap, np.abs(relative)


def _beyond_noise(cliffs: Sequence[Cliff], cells: Sequence[VerifyCell]) -> tuple[Cliff, ...]:
    """Cliffs whose two ends do not overlap between the 10th and 90th percentile, where those were sampled."""
    spread = {(cell.num_requests, cell.context_tokens, cell.verify_tokens): cell for cell in cells if cell.num_samples}

    def real(cliff: Cliff) -> bool:
        first = spread.get((cliff.num_requests, cliff.context_tokens, cliff.from_verify_tokens))
        second = spread.get((cliff.num_requests, cliff.context_tokens, cliff.to_verify_tokens))
        before = None if first is None else first.high_seconds
        after = None if second is None else second.low_seconds
        return before is None or after is None or before < after

    return tuple(cliff for cliff in cliffs if real(cliff))


def _degenerate(rows: Sequence[Row]) -> str | None:
    if all(row.verify_tokens.size < 2 for row in rows):
        return "only one size was measured"
    if all(row.seconds[-1] - row.seconds[0] <= FLAT_RANGE * row.seconds[0] for row in rows):
        return f"the curve is flat or falls: from the smallest to the largest size seconds rise by at most {FLAT_RANGE:.0%}"
    return None
