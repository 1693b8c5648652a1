from __future__ import annotations

import numpy as np
import pytest

from selector.errors import ScorerError
from selector.reliability import (
    NUM_BINS,
    bin_predictions,
    calibration_error,
    judge_edges,
    labelled_rows,
    log_losses,
)
from selector.scorer.samples import collect
from tests.selector.helpers import markov_trace


def drawn(rng: np.random.Generator, groups: int, k: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Chances of k candidates and none, and what came, drawn from them."""
    p = rng.dirichlet(np.full(k + 1, 0.5), groups)
    label = (rng.random((groups, 1)) > p.cumsum(1)).sum(1)
    return np.log(np.maximum(p[:, :k], 1e-300)), label


def test_worked_example() -> None:
    """Two groups promise .9 and .05 (and a pad); the first keeps the .9, the second says none of these."""
    rows = np.log(np.array([[0.9, 0.05, 1.0], [0.9, 0.05, 1.0]]))
    rows[:, 2] = -np.inf
    label = np.array([0, 3])
    bins = bin_predictions(rows, label)
    assert bins.count.tolist() == [2, *[0] * 12, 2, 0]  # .05 twice in the first bin of 1/15, .9 twice in the 14th
    assert bins.predicted[13] == pytest.approx(0.9) and bins.observed[13] == 0.5
    assert calibration_error(bins, 2) == pytest.approx((2 * 0.4 + 2 * 0.05) / 2)
    np.testing.assert_allclose(log_losses(rows, label), [-np.log(0.9), -np.log(0.05)])


def test_true_chances_have_no_error_and_overconfident_ones_do() -> None:
    rows, label = drawn(np.random.default_rng(0), 20_000)
    honest = calibration_error(bin_predictions(rows, label), len(label))
    sharp = rows * 2 - np.log(np.exp(rows * 2).sum(1, keepdims=True) + (1 - np.exp(rows).sum(1, keepdims=True)) ** 2)
    assert honest < 0.03 < 0.1 < calibration_error(bin_predictions(sharp, label), len(label))
    assert log_losses(rows, label).mean() < log_losses(sharp, label).mean()


def test_loops_find_the_same_error() -> None:
    rows, label = drawn(np.random.default_rng(1), 300)
    sums = [[0.0, 0.0] for _ in range(NUM_BINS)]
    for row, truth in zip(np.exp(rows), label, strict=True):
        for column, p in enumerate(row):
            place = min(int(p * NUM_BINS), NUM_BINS - 1)
            sums[place][0] += p
            sums[place][1] += column == truth
    assert calibration_error(bin_predictions(rows, label), 300) == pytest.approx(sum(abs(a - b) for a, b in sums) / 300)


def test_rows_of_a_trace_by_depth_and_parent() -> None:
    trace = markov_trace(num_texts=6, length=40, seed=2)
    samples = collect(trace, 4)
    wide = np.repeat(samples.log_probs[:, :, None, :], 4, axis=2)
    found = judge_edges({"raw": samples.log_probs, "scorer": wide}, samples)
    for split in ("all", "on chain", "off chain"):
        for depth in (None, 1, 2, 3, 4):
            try:
                raw = found.row("raw", depth, split)
            except KeyError:
                assert (split, depth) == ("off chain", 1)  # the root is on the chain
                continue
            other = found.row("scorer", depth, split)  # the same chances from every parent
            assert (raw.log_loss, raw.ece, raw.num_groups) == (other.log_loss, other.ece, other.num_groups)
    whole, on, off = (found.row("raw", split=split) for split in ("all", "on chain", "off chain"))
    assert whole.num_groups == len(samples.label) == on.num_groups + off.num_groups
    assert whole.observed == pytest.approx((samples.label < 4).mean())
    assert off.num_groups == ((samples.group_depth > 0) & (samples.parent_column > 0)).sum()
    assert found.to_dict()["rows"][0]["predictor"] == "raw"


def test_edges_of_another_size_are_refused() -> None:
    samples = collect(markov_trace(num_texts=3, length=20, seed=3), 3)
    with pytest.raises(ScorerError, match="do not fit samples"):
        labelled_rows(np.zeros((*samples.hits.shape, 4)), samples)
