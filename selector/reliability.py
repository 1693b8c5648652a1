"""Whether predicted chances come true: calibration error and log-loss by depth and by parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.drift.alarm import LOG_SMALLEST, MISSING_FLOOR
from selector.errors import ScorerError
from selector.scorer.samples import Samples

NUM_BINS = 15
SPLITS = ("all", "on chain", "off chain")


@dataclass(frozen=True)
class Bins:
    """Predictions in NUM_BINS equal widths of [0, 1]: how many, their mean and how often they came true."""

    count: NDArray[np.int64]
    predicted: NDArray[np.float64]  # NaN where a bin is empty
    observed: NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One predictor on one part of the groups.

    Attributes:
        predictor, split: names. depth: 1-based, None for all depths together. num_groups: prefixes that were reached.
        log_loss: mean nats of the target's token, or of none of the listed. ece: see `calibration_error`.
        predicted, observed: mean chance that one of the listed candidates is accepted, and how often one was.
    """

    predictor: str
    split: str
    depth: int | None
    num_groups: int
    log_loss: float
    ece: float
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """All rows, and the bins that diagrams are drawn from, by (predictor, split)."""

    rows: list[Row]
    bins: dict[tuple[str, str], Bins]

    def row(self, predictor: str, depth: int | None = None, split: str = "all") -> Row:
        """One row by its names; raises KeyError."""
        for row in self.rows:
            if (row.predictor, row.depth, row.split) == (predictor, depth, split):
                return row
        raise KeyError((predictor, depth, split))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"num_bins": NUM_BINS, "rows": [vars(row) for row in self.rows]}


def labelled_rows(log_edges: NDArray[np.float64], samples: Samples) -> NDArray[np.float64]:
    """(G, k) log-probabilities that edges (A, depth, k) or (A, depth, k, k) give to the children of reached prefixes."""
    k = samples.token_ids.shape[2]
    if log_edges.ndim not in (3, 4) or log_edges.shape[:2] != samples.hits.shape or log_edges.shape[-1] != k:
        raise ScorerError(f"edges of shape {log_edges.shape} do not fit samples of {samples.token_ids.shape}")
    at = samples.group_anchor, samples.group_depth
    return log_edges[(*at, samples.parent_column)] if log_edges.ndim == 4 else log_edges[at]


def bin_predictions(log_rows: NDArray[np.float64], label: NDArray[np.int64]) -> Bins:
    """Bins over all candidates of groups; pads are left out."""
    real = log_rows > -np.inf
    p = np.exp(log_rows)[real]
    true = (np.arange(log_rows.shape[1]) == label[:, None])[real].astype(float)
    place = np.minimum((p * NUM_BINS).astype(int), NUM_BINS - 1)
    count = np.bincount(place, minlength=NUM_BINS)
    with np.errstate(invalid="ignore", divide="ignore"):
        predicted = np.bincount(place, p, NUM_BINS) / count
        observed = np.bincount(place, true, NUM_BINS) / count
    return Bins(count, predicted, observed)


def calibration_error(bins: Bins, num_groups: int) -> float:
    """Expected calibration error per group: sum over bins of |predicted - observed| x count, over the number of groups.

    In tokens: by how many the number accepted out of one reached parent is misjudged, errors of different bins not
    cancelling. (Per prediction instead of per group it would be k times smaller, most candidates being hopeless.)
    """
    gaps = np.abs(bins.predicted - bins.observed) * bins.count
    return float(np.nansum(gaps)) / max(num_groups, 1)


def log_losses(log_rows: NDArray[np.float64], label: NDArray[np.int64]) -> NDArray[np.float64]:
    """(G,) nats of the true candidate, or of none of the listed (label k)."""
    none = np.log(np.maximum(1.0 - np.exp(log_rows).sum(axis=1), MISSING_FLOOR))
    whole = np.concatenate([log_rows, none[:, None]], axis=1)
    return -np.maximum(whole[np.arange(len(label)), label], LOG_SMALLEST)  # type: ignore[no-any-return]


def judge_edges(predictors: Mapping[str, NDArray[np.float64]], samples: Samples) -> Reliability:
    """Log-loss and calibration error of named edges on every prefix of `samples` that was reached.

    Args:
        predictors: log edges (A, depth, k) or (A, depth, k, k) of all anchors by name ("raw", "calibrated", "scorer").
        samples: from `selector.scorer.samples.collect` with the same k.

    On chain: the parent is the root or the drafter's top candidate of its depth. What was not reached is not counted.
    """
    on_chain = (samples.group_depth == 0) | (samples.parent_column == 0)
    everywhere = np.ones(len(on_chain), bool)
    masks = dict(zip(SPLITS, (everywhere, on_chain, ~on_chain), strict=True))
    rows: list[Row] = []
    bins: dict[tuple[str, str], Bins] = {}
    for name, edges in predictors.items():
        log_rows = labelled_rows(edges, samples)
        losses = log_losses(log_rows, samples.label)
        for split, mask in masks.items():
            bins[name, split] = bin_predictions(log_rows[mask], samples.label[mask])
            for depth in (None, *range(samples.hits.shape[1])):
                where = np.flatnonzero(mask if depth is None else mask & (samples.group_depth == depth))
                if len(where):
                    rows.append(_row(name, split, depth, log_rows[where], samples.label[where], losses[where]))
    return Reliability(rows, bins)


def _row(name: str, split: str, depth: int | None, log_rows: NDArray, label: NDArray, losses: NDArray) -> Row:
    error = calibration_error(bin_predictions(log_rows, label), len(label))
    predicted, observed = float(np.exp(log_rows).sum(axis=1).mean()), float((label < log_rows.shape[1]).mean())
    return Row(name, split, None if depth is None else depth + 1, len(label), float(losses.mean()), error, predicted, observed)
