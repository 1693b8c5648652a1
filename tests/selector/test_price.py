from __future__ import annotations

import pytest

from selector.price import PriceTracker, ReachScale, RunningRatio


def test_price_is_tokens_over_seconds_not_a_mean_of_ratios():
    tracker = PriceTracker(half_life_rounds=1e9)
    for _ in range(50):
        tracker.observe(4, 0.1)
        tracker.observe(1, 0.4)
    assert tracker.price == pytest.approx(5 / 0.5)


def test_price_waits_for_enough_rounds_unless_a_plan_gave_one():
    fresh, planned = PriceTracker(), PriceTracker(initial=20.0)
    assert (fresh.price, planned.price) == (None, 20.0)
    for _ in range(3):
        fresh.observe(1, 1.0)
        planned.observe(1, 1.0)
    assert fresh.price is None
    assert 1.0 < planned.price < 20.0


def test_a_slow_first_round_does_not_hold_the_price_of_a_plan():
    """Two tokens in .08 s against a plan of 50 a second; the first round compiles or captures, and takes 2 s."""
    prices = []
    for first in (0.08, 2.0):
        tracker = PriceTracker(50.0)
        tracker.observe(2, first)
        for _ in range(100):
            tracker.observe(2, 0.08)
        prices.append(tracker.price)
    assert 25 < prices[0] < 29 and 22 < prices[1] < 26


def test_old_rounds_fade():
    tracker = PriceTracker(half_life_rounds=10)
    for _ in range(100):
        tracker.observe(1, 1.0)
    for _ in range(100):
        tracker.observe(5, 1.0)
    assert tracker.price == pytest.approx(5, rel=0.01)


def test_scale_is_shrunk_and_bounded():
    scale = ReachScale()
    assert scale.value == 1
    scale.observe(0, 2.0)
    assert 0.9 < scale.value < 1
    for _ in range(2000):
        scale.observe(0, 5.0)
    assert scale.value == 0.25
    for _ in range(5000):
        scale.observe(50, 5.0)
    assert scale.value == 1.5


def test_running_ratio():
    ratio = RunningRatio(half_life=1)
    assert ratio.value is None
    ratio.add(1, 1)
    ratio.add(4, 1)
    assert ratio.value == pytest.approx(4.5 / 1.5)
    ratio.fade(0.5)
    assert ratio.value == pytest.approx(3)
