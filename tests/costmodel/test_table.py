from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel, Identity, Profile
from costmodel.diagnostics import find_cliffs, minorant_corners
from costmodel.table import Row, monotone


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=20), st.data())
def test_passes_through_monotone_medians(steps, data):
    tokens = data.draw(st.lists(st.integers(1, 500), min_size=len(steps), max_size=len(steps), unique=True))
    seconds = np.cumsum(steps)
    cost = CostModel.from_points(sorted(tokens), seconds)
    np.testing.assert_allclose(cost.verify_seconds(sorted(tokens)), seconds, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=20))
def test_any_medians_become_monotone_and_stay_within_their_range(seconds):
    fitted = monotone(np.arange(1.0, len(seconds) + 1), np.array(seconds))
    assert np.all(np.diff(fitted) >= 0)
    assert fitted[0] == seconds[0]  # one token is exact
    assert fitted.max() <= max(seconds) * (1 + 1e-12)


def test_isotonic_agrees_with_scikit_learn():
    isotonic = pytest.importorskip("sklearn.isotonic")
    seconds = np.random.default_rng(1).uniform(1, 2, 40)
    tokens = np.arange(2.0, 42)  # without t = 1 there is no exact point
    expected = isotonic.isotonic_regression(seconds, sample_weight=1 / seconds**2)
    np.testing.assert_allclose(monotone(tokens, seconds), expected, rtol=1e-9)


def test_linear_between_sizes_and_contexts_and_clamped_outside():
    cost = CostModel.from_points([1, 3, 1, 3], [1.0, 2.0, 2.0, 3.0], [100, 100, 200, 200])
    assert cost.verify_seconds(2, 100) == pytest.approx(1.5)
    assert cost.verify_seconds(2, 150) == pytest.approx(2.0)
    assert not cost.diagnostics.flags
    assert cost.verify_seconds(2, 0) == pytest.approx(1.5) and cost.verify_seconds(2, 999) == pytest.approx(2.5)
    assert len(cost.diagnostics.flags) == 2
    assert cost.verify_seconds(5, 100) == pytest.approx(3.0)  # the convex slope, half a second a token
    assert len(cost.diagnostics.flags) == 3 and "beyond the measured 3" in cost.diagnostics.flags[2]


@pytest.mark.parametrize("mode", ["captured", "padded"])
def test_captured_sizes_step_up(mode):
    cost = CostModel.from_points([1, 4, 8], [1.0, 2.0, 4.0], identity=Identity(mode=mode))
    assert cost.verify_seconds([1, 2, 3, 4, 5, 8]).tolist() == [1, 2, 2, 2, 4, 4]
    assert CostModel.from_points([1, 4, 8], [1.0, 2.0, 4.0]).verify_seconds(5) == pytest.approx(2.5)


def test_executable_sizes_can_be_named():
    profile = replace(Profile.from_points([1, 4, 8], [1.0, 2.0, 4.0]), executable_verify_tokens=(1, 8))
    assert CostModel(profile).verify_seconds([1, 2, 4, 8]).tolist() == [1, 4, 4, 4]


def test_below_the_smallest_size_the_smallest_is_charged():
    assert CostModel.from_points([8, 16], [1.0, 2.0]).verify_seconds([1, 7]).tolist() == [1.0, 1.0]


def test_minorant_is_the_largest_convex_function_below():
    tokens, seconds = np.arange(1.0, 8), np.array([1, 5, 2, 6, 7, 7.5, 12.0])
    corners = minorant_corners(tokens, seconds)
    hull = np.interp(tokens, tokens[corners], seconds[corners])
    chords = [
        min(
            seconds[i] + (t - tokens[i]) / (tokens[j] - tokens[i]) * (seconds[j] - seconds[i]) if j > i else seconds[i]
            for i in range(7) for j in range(i, 7) if tokens[i] <= t <= tokens[j]
        )
        for t in tokens
    ]  # fmt: skip
    np.testing.assert_allclose(hull, chords)


def test_a_convex_kink_is_no_cliff_and_noise_is_none_either():
    assert not find_cliffs(Row(0, np.array([1.0, 8, 9, 10, 11]), np.array([1.0, 1.0, 1.5, 2.0, 2.5])))
    assert not find_cliffs(Row(0, np.array([1.0, 2, 3, 4]), np.array([1.0, 1.02, 1.02, 1.03])))


def test_a_cliff_within_the_scatter_of_its_ends_is_not_reported():
    profile = Profile.from_points([8, 9, 10, 13], [1.0, 1.2, 1.21, 1.22])
    assert CostModel(profile).diagnostics.cliffs
    noisy = tuple(
        replace(cell, low_seconds=cell.seconds * 0.8, high_seconds=cell.seconds * 1.25, num_samples=9) for cell in profile.verify
    )
    assert not CostModel(replace(profile, verify=noisy)).diagnostics.cliffs
