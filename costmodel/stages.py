"""What drafting, selecting and committing cost: interpolation of the stage cells of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.cells import StageCell

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageCost:
    """Seconds of one stage for one batch size, linear in size and in context, held constant outside what was measured."""

    contexts: Array  # (C,)
    sizes: tuple[Array, ...]  # per context (S,)
    medians: tuple[Array, ...]  # per context (S,)

    def seconds(self, size: object = None, context_tokens: float = 0, straight: bool = False) -> Array:
        """Seconds at `size` (scalar or array); None is the middle of the sizes measured.

        `straight` reads a least-squares line in size that does not fall, so that a convex curve stays one when this is
        added to it.
        """
        read = _line if straight else np.interp
        at = [
            read(np.asarray(_middle(sizes) if size is None else size, float), sizes, medians)
            for sizes, medians in zip(self.sizes, self.medians, strict=True)
        ]
        above = int(np.searchsorted(self.contexts, context_tokens))
        if above == 0 or above == self.contexts.size:
            return np.asarray(at[min(above, self.contexts.size - 1)])
        share = (context_tokens - self.contexts[above - 1]) / (self.contexts[above] - self.contexts[above - 1])
        return np.asarray((1 - share) * at[above - 1] + share * at[above])


def _line(at: Array, sizes: Array, medians: Array) -> Array:
    """The value at `at` of the least-squares line through the points, its slope at least 0."""
    around = sizes - sizes.mean()
    slope = max(float(around @ medians) / max(float(around @ around), 1.0), 0.0)
    return np.maximum(medians.mean() + slope * (at - sizes.mean()), medians.min())


def _middle(sizes: Array) -> float:
    return float(sizes[(sizes.size - 1) // 2])


def fit_stage(cells: Sequence[StageCell]) -> StageCost | None:
    """The stage cost of cells that share a stage and a batch; None where nothing was measured (it then costs 0)."""
    if not cells:
        return None
    contexts = sorted({cell.context_tokens for cell in cells})
    by_size = sorted(cells, key=lambda cell: cell.size)
    groups = [[cell for cell in by_size if cell.context_tokens == context] for context in contexts]
    return StageCost(
        contexts=np.asarray(contexts, float),
        sizes=tuple(np.array([cell.size for cell in group], float) for group in groups),
        medians=tuple(np.array([cell.seconds for cell in group], float) for group in groups),
    )
