from __future__ import annotations

import numpy as np
import pytest

from selector.calibration import MAX_LISTED_MASS, Calibration, apply_per_depth, fit_calibration, log_loss
from selector.errors import PlanError


def drawn(slopes, offsets, anchors=6000, top_k=4, seed=0):
    """Marginals and hits drawn from a known calibration of them."""
    rng = np.random.default_rng(seed)
    depth = len(slopes)
    p = rng.dirichlet(np.full(top_k + 2, 0.8), size=(anchors, depth))[..., :top_k]
    log_edges = np.log(np.maximum(p, 1e-12))
    q = np.exp(apply_per_depth(log_edges, np.array(slopes), np.array(offsets), axis=1))
    draws = rng.random((anchors, depth, 1))
    below = (q.cumsum(axis=2) < draws).sum(axis=2)
    return log_edges, np.where(below < top_k, below, -1)


def test_a_known_calibration_is_found_again():
    slopes, offsets = (0.7, 0.5), (-0.2, -0.6)
    log_edges, hits = drawn(slopes, offsets)
    fitted = fit_calibration(log_edges, hits)
    np.testing.assert_allclose(fitted.slopes, slopes, atol=0.06)
    np.testing.assert_allclose(fitted.offsets, offsets, atol=0.1)
    held_out = drawn(slopes, offsets, seed=1)
    assert log_loss(*held_out, fitted) < log_loss(*held_out) - 0.01


def test_depths_beyond_an_unlisted_token_do_not_count():
    """Garbage at depth 2 wherever depth 1 was missed must not matter: those prefixes were never reached."""
    log_edges, hits = drawn((0.8, 0.8), (-0.1, -0.1))
    other = hits.copy()
    missed = hits[:, 0] < 0
    other[missed, 1] = 0
    assert missed.sum() > 100
    assert fit_calibration(log_edges, hits) == fit_calibration(log_edges, other)


def test_case_14_depths_never_seen_take_the_values_above():
    log_edges, hits = drawn((0.6, 0.6, 0.6), (-0.3, -0.3, -0.3))
    hits[:, 2] = -2  # every text ends before depth 3
    fitted = fit_calibration(log_edges, hits)
    assert (fitted.slopes[2], fitted.offsets[2]) == (fitted.slopes[1], fitted.offsets[1])


def test_without_observations_nothing_changes():
    assert fit_calibration(np.zeros((0, 3, 2)), np.zeros((0, 3), int)) == Calibration((1.0,) * 3, (0.0,) * 3)


def test_siblings_never_sum_above_one_and_order_stays():
    rng = np.random.default_rng(0)
    log_edges = np.log(rng.dirichlet(np.ones(5), size=(7,))[:, :4])
    log_edges[2, 3] = -np.inf
    calibrated = Calibration((0.4, 1.5), (0.9, 0.2)).apply(log_edges)
    assert np.exp(calibrated).sum(axis=1).max() <= MAX_LISTED_MASS + 1e-12
    np.testing.assert_array_equal(np.argsort(calibrated, axis=1), np.argsort(log_edges, axis=1))
    assert calibrated[2, 3] == -np.inf


def test_both_forms_and_batches_agree():
    rng = np.random.default_rng(1)
    log_edges = np.log(rng.dirichlet(np.ones(4), size=(3,))[:, :3])
    calibration = Calibration((0.9, 0.8), (-0.1, -0.3))
    once = calibration.apply(log_edges)
    np.testing.assert_allclose(calibration.apply(np.repeat(log_edges[:, None], 3, 1)), np.repeat(once[:, None], 3, 1))
    np.testing.assert_allclose(calibration.apply_to_batch(log_edges[None])[0], once)


def test_bad_calibrations_are_refused():
    with pytest.raises(PlanError):
        Calibration((1.0,), (0.0, 0.0))
    with pytest.raises(PlanError):
        Calibration((-1.0,), (0.0,))
    with pytest.raises(PlanError, match="finite offsets"):
        Calibration((1.0,), (float("nan"),))


def test_a_trace_without_positions_changes_nothing():
    assert fit_calibration(np.zeros((5, 0, 4)), np.zeros((5, 0), np.int64)) == Calibration((1.0,), (0.0,))
