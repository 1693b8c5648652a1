from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel, load_profile
from costmodel.convex import fit_convex
from costmodel.errors import FitError

POINTS = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([0, 100, 777, 4096]), st.floats(1e-3, 10.0)),
    min_size=1, max_size=40, unique_by=lambda point: point[:2],
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(POINTS, st.integers(0, 9000))
def test_monotone_and_convex_in_t_at_every_context(points, context):
    tokens, contexts, seconds = (np.array(column) for column in zip(*points, strict=True))
    fit = fit_convex(tokens, contexts, seconds)
    curve = fit.seconds(np.arange(1, 401), context)
    steps = np.diff(curve)
    tolerance = 1e-9 * max(curve.max(), 1.0)
    assert np.all(curve > 0) and np.all(steps >= -tolerance) and np.all(np.diff(steps) >= -tolerance)


@settings(max_examples=60, deadline=None)
@given(POINTS)
def test_one_token_is_exact_wherever_it_was_measured(points):
    tokens, contexts, seconds = (np.array(column) for column in zip(*points, strict=True))
    chosen = tokens == 1
    fitted = fit_convex(tokens, contexts, seconds).seconds(tokens[chosen], contexts[chosen])
    np.testing.assert_allclose(fitted, seconds[chosen], rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=12, max_size=12),
    st.lists(st.integers(2, 120), min_size=2, max_size=2, unique=True),
    st.sampled_from([100, 1000]),
)
def test_exact_hinge_data_is_recovered(weights, knots, context_knot):
    def truth(t, c):
        phi = np.stack([np.ones_like(t), t - 1, *(np.maximum(t - knot, 0) for knot in knots)])
        psi = np.stack([np.ones_like(c), c / 1000, np.maximum(c - context_knot, 0) / 1000])
        return 1.0 + np.einsum("in,ij,jn->n", phi, np.reshape(weights, (4, 3)), psi)

    tokens, contexts = (grid.ravel().astype(float) for grid in np.meshgrid([1, 5, 40, *knots, 121, 128], [0, 100, 1000, 5000]))
    fit = fit_convex(tokens, contexts, truth(tokens, contexts))
    new_tokens, new_contexts = (grid.ravel().astype(float) for grid in np.meshgrid([1, 3, 60, 128, 200], [0, 50, 3000, 8000]))
    expected = truth(new_tokens, new_contexts)
    np.testing.assert_allclose(fit.seconds(new_tokens, new_contexts), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["a800-qwen3-4b", "a800-qwen3-8b"])
def test_fifty_points_recover_a_published_table(name):
    full = load_profile(name).profile.verify
    truth = {(cell.verify_tokens, cell.context_tokens): cell.seconds for cell in full}
    sizes = {0: (1, 48, 128, 224, 384, 512), 1: (1, 96, 192, 320, 512)}
    contexts = sorted({context for _, context in truth})
    picked = [(size, context) for index, context in enumerate(contexts) for size in sizes[index % 2]]
    assert len(picked) == 50 and len(truth) == 512 * 9
    few = CostModel.from_points([t for t, _ in picked], [truth[p] for p in picked], [c for _, c in picked])
    tokens, contexts_all = (np.array(column) for column in zip(*truth, strict=True))
    seconds = np.array(list(truth.values()))
    for form, limit in (("convex", 0.020), ("table", 0.006)):  # the prototype's convex fit: 2.0 to 2.2 %
        errors = np.abs(few.verify_seconds(tokens, contexts_all, form=form) / seconds - 1)
        assert errors.mean() < limit, (form, errors.mean())


def test_a_plain_step_that_is_slower_than_the_trend_gives_a_flat_start():
    fit = fit_convex([1, 2, 4, 8], [0] * 4, [1.3, 1.0, 1.2, 1.6])
    curve = fit.seconds([1, 2, 4, 8])
    assert curve[0] == pytest.approx(1.3) and np.all(np.diff(curve) >= 0) and curve[3] == pytest.approx(1.6, rel=0.1)


def test_a_plain_step_that_is_faster_than_the_trend_meets_it_on_a_tangent():
    tokens = np.array([1, 2, 4, 8, 16, 32])
    fit = fit_convex(tokens, np.zeros(6), [0.58, 1.0, 1.0, 1.0, 1.0, 1.5])
    curve = fit.seconds(tokens)
    assert curve[0] == pytest.approx(0.58) and curve[-1] == pytest.approx(1.5, rel=0.1)


def test_slope_beyond_the_last_point():
    fit = fit_convex([1, 10, 20], [0] * 3, [1.0, 1.0, 2.0])
    assert fit.slope(20) == pytest.approx(0.1) and fit.seconds(30) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ([], [], "as many"),
        ([1, 2], [1.0], "as many"),
        ([1], [float("nan")], "finite"),
        ([0], [1.0], "t >= 1"),
        ([1], [0.0], "positive"),
    ],
)
def test_unusable_points_are_refused(tokens, seconds, message):
    with pytest.raises(FitError, match=message):
        fit_convex(tokens, np.zeros(len(tokens)), seconds)
