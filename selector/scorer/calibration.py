"""Calibration on top of the network: per depth a temperature, how much the network is believed, an offset on none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

RIDGE = 10.0  # observations' worth of pull towards no change
MIN_OBSERVATIONS = 60  # a depth with fewer takes the values of the depth above it
BOUNDS = ((0.3, 2.0), (0.0, 1.5), (-2.0, 2.0))  # slope, gain, offset of none
NO_CHANGE = (1.0, 1.0, 0.0)


def fit_depth_calibration(
    drafted: NDArray[np.floating],
    residuals: NDArray[np.floating],
    label: NDArray[np.int64],
    depth: NDArray[np.int64],
    weight: NDArray[np.floating],
    num_depths: int,
) -> dict[str, NDArray[np.float32]]:
    """Slopes, gains and offsets of none (num_depths,) float32 that minimise log-loss on groups not trained on.

    logit = slope drafted + gain residual (+ offset on none). The gain is what guards against a network that learned its
    training texts by heart: it comes out below 1 where the network helps less on other texts, 0 where it does not help.

    Args:
        drafted: (G, k + 1) log-probabilities and, last, the log of the missing mass; -inf pads. residuals: (G, k + 1)
            the network's. label: (G,) true column. depth: (G,) 0-based. weight: (G,).
    """
    fitted = np.tile(NO_CHANGE, (num_depths, 1))
    for d in range(num_depths):
        rows = np.flatnonzero((depth == d) & (weight > 0))
        fitted[d] = fitted[d - 1] if d else NO_CHANGE
        if len(rows) >= MIN_OBSERVATIONS:
            arrays = (np.asarray(x[rows], np.float64) for x in (drafted, residuals, weight))
            fitted[d] = minimize(_loss, fitted[d], (*arrays, label[rows]), method="L-BFGS-B", bounds=BOUNDS).x
    slopes, gains, offsets = fitted.astype(np.float32).T.copy()
    return {"slopes": slopes, "gains": gains, "none_offsets": offsets}


def _loss(x: NDArray[np.float64], drafted: NDArray, residuals: NDArray, weight: NDArray, label: NDArray[np.int64]) -> float:
    """Weighted log-loss of the true columns, plus the ridge."""
    logits = x[0] * drafted + x[1] * residuals
    logits[:, -1] += x[2]
    chosen = np.maximum(log_softmax(logits, axis=1)[np.arange(len(label)), label], -60.0)
    return float(-(weight * chosen).sum() + RIDGE * ((x - NO_CHANGE) ** 2).sum())
