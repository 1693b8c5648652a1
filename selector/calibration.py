"""Turning a drafter's probabilities into chances of acceptance: per depth a temperature and a scale.

Drafters are over-confident, the more so the deeper. Per depth the chance that the target says candidate i, given that
the walk got there, is taken as q_i = exp(offset) p_i^slope (slope = 1 / temperature), shrunk to sum 1 where the sum
exceeds it; what is missing is the chance of any unlisted token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from selector.errors import PlanError

Array = NDArray[np.float64]
MAX_LISTED_MASS = 0.9999  # listed candidates together; some chance is always left to the unlisted ones
SLOPE_BOUNDS, OFFSET_BOUNDS = (0.2, 2.0), (-3.0, 1.0)
RIDGE = 5.0  # pseudo-observations' worth of pull towards slope 1, offset 0 (no change)
MIN_OBSERVATIONS = 30  # a depth reached less often takes the values of the depth above it


@dataclass(frozen=True)
class Calibration:
    """log q = offsets[d] + slopes[d] log p at depth d + 1; deeper positions use the last entry."""

    slopes: tuple[float, ...]
    offsets: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check; raises PlanError."""
        fits = len(self.slopes) == len(self.offsets) > 0 and all(0 < s < np.inf for s in self.slopes)
        if not (fits and all(-np.inf < o < np.inf for o in self.offsets)):
            raise PlanError(
                f"calibration needs as many positive slopes as finite offsets, at least one, got {self.slopes} and {self.offsets}"
            )

    def apply(self, log_edges: Array) -> Array:
        """Calibrated copy of one trellis' log edge probabilities, (depth, K) or (depth, K, K)."""
        return apply_per_depth(log_edges, np.asarray(self.slopes), np.asarray(self.offsets), axis=0)

    def apply_to_batch(self, log_edges: Array) -> Array:
        """Calibrated copy of a batch of marginals, (anchors, depth, K)."""
        return apply_per_depth(log_edges, np.asarray(self.slopes), np.asarray(self.offsets), axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"slopes": list(self.slopes), "offsets": list(self.offsets)}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Calibration:
        """The inverse of `to_dict`."""
        return cls(tuple(float(s) for s in document["slopes"]), tuple(float(o) for o in document["offsets"]))


def apply_per_depth(log_edges: Array, slopes: Array, offsets: Array, axis: int) -> Array:
    """offset + slope log p along the depth axis, then each group of siblings (last axis) shrunk to MAX_LISTED_MASS."""
    depth = log_edges.shape[axis]
    index = np.minimum(np.arange(depth), len(slopes) - 1)
    shape = [1] * log_edges.ndim
    shape[axis] = depth
    scaled = log_edges * slopes[index].reshape(shape) + offsets[index].reshape(shape)
    mass = np.exp(scaled).sum(axis=-1, keepdims=True)
    return scaled - np.log(np.maximum(mass / MAX_LISTED_MASS, 1.0))  # type: ignore[no-any-return]


def _loss_at_depth(parameters: Array, log_p: Array, hits: NDArray[np.intp], weights: Array) -> float:
    """Weighted log-loss of 'the target's token is candidate hits[i], or -1: none listed', plus the ridge."""
    slope, offset = parameters
    scaled = apply_per_depth(log_p[:, None, :], np.array([slope]), np.array([offset]), axis=1)[:, 0]
    missing = np.log(np.maximum(1.0 - np.exp(scaled).sum(axis=1), 1e-9))
    chosen = np.where(hits >= 0, scaled[np.arange(len(hits)), np.maximum(hits, 0)], missing)
    return float(-(weights * chosen).sum() + RIDGE * ((slope - 1.0) ** 2 + offset**2))


def fit_calibration(log_edges: Array, hits: NDArray[np.integer], weights: Array | None = None) -> Calibration:
    """Fit a slope and an offset per depth by log-loss on prefixes that were reached.

    Args:
        log_edges: (anchors, depth, K) the drafter's log-probabilities, -inf pads.
        hits: (anchors, depth) column of the target's own token, -1 where it is not listed, -2 where the text had ended.
            An anchor counts at depth d only if every shallower hit was listed (the prefix was reached) and the text
            goes on: beyond that nothing is known (censoring), so nothing is counted.
        weights: (anchors,) how much each anchor counts; default 1.

    Depths with too few observations take the values of the depth above; with none at all the identity is returned.
    """
    anchors, depth, _ = log_edges.shape
    if depth == 0:
        return Calibration((1.0,), (0.0,))
    weights = np.ones(anchors) if weights is None else np.asarray(weights, np.float64)
    slopes: list[float] = []
    offsets: list[float] = []
    reached = np.ones(anchors, bool)
    floor = np.maximum(log_edges, -60.0)
    for d in range(depth):
        rows = np.flatnonzero(reached & (hits[:, d] > -2) & (weights > 0))
        if len(rows) >= MIN_OBSERVATIONS:
            start = np.array([slopes[-1] if slopes else 1.0, offsets[-1] if offsets else 0.0])
            fit = minimize(
                _loss_at_depth, start, args=(floor[rows, d], hits[rows, d].astype(np.intp), weights[rows]),
                method="L-BFGS-B", bounds=(SLOPE_BOUNDS, OFFSET_BOUNDS),
            )  # fmt: skip
            slopes.append(float(fit.x[0]))
            offsets.append(float(fit.x[1]))
        else:
            slopes.append(slopes[-1] if slopes else 1.0)
            offsets.append(offsets[-1] if offsets else 0.0)
        reached &= hits[:, d] >= 0
    return Calibration(tuple(slopes), tuple(offsets))


def log_loss(log_edges: Array, hits: NDArray[np.integer], calibration: Calibration | None = None) -> float:
    """Mean log-loss in nats over all depths and reached prefixes, for judging a calibration on held-out anchors."""
    scaled = log_edges if calibration is None else calibration.apply_to_batch(log_edges)
    anchors, depth, _ = scaled.shape
    reached, total, count = np.ones(anchors, bool), 0.0, 0
    for d in range(depth):
        rows = np.flatnonzero(reached & (hits[:, d] > -2))
        listed = scaled[rows, d]
        missing = np.log(np.maximum(1.0 - np.exp(listed).sum(axis=1), 1e-9))
        chosen = np.where(hits[rows, d] >= 0, listed[np.arange(len(rows)), np.maximum(hits[rows, d], 0)], missing)
        total, count = total - float(np.maximum(chosen, -60.0).sum()), count + len(rows)
        reached &= hits[:, d] >= 0
    return total / max(count, 1)
