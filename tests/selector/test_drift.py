from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.drift.alarm import LOG_SMALLEST, DriftAlarm, DriftSettings, accepted_log_likelihoods, round_log_likelihoods
from selector.errors import ScorerError
from selector.search.expansion import expand
from selector.tree import DraftTree
from selector.trellis import Trellis
from tests.selector.helpers import random_trellis


def play(
    alarm: DriftAlarm, truth: np.ndarray, scorer: np.ndarray, raw: np.ndarray, rounds: int, rng: np.random.Generator
) -> list:
    """Rounds whose outcome is drawn from `truth`; returns the events."""
    events = []
    for outcome in rng.choice(len(truth), size=rounds, p=truth):
        event = alarm.observe(math.log(scorer[outcome]), math.log(raw[outcome]))
        if event is not None:
            events.append(event)
    return events


GOOD, RAW, WRONG = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.3, 0.3]), np.array([0.1, 0.3, 0.6])


def test_fires_under_drift_and_says_so() -> None:
    """Trained where the first outcome leads, run where the draft is right: 0.15 nats a round, so about 80 rounds to tell."""
    alarm = DriftAlarm()
    assert play(alarm, GOOD, GOOD, RAW, 2000, np.random.default_rng(0)) == [] and alarm.use_scorer
    rng = np.random.default_rng(1)
    events: list = []
    while not events and alarm.num_rounds < 3000:
        events += play(alarm, RAW, GOOD, RAW, 1, rng)
    assert [event.kind for event in events] == ["fell_back"] and alarm.num_rounds < 2600
    assert not alarm.use_scorer and alarm.raised and not alarm.wants_scores and alarm.num_alarms == 1
    assert "worse than the draft's probabilities" in events[0].text and "selector tune" in events[0].text
    assert events[0].nats_per_round < 0


def test_false_alarms_are_as_rare_as_stated() -> None:
    """At most rounds / rounds_between_false_alarms = 5 % of 200 runs for a scorer that is right: 30 has odds of 1e-7.

    (The cumulative sum crosses h within n rounds with probability at most n exp(-h): Ville's inequality from every start.)
    """
    rng = np.random.default_rng(2)
    setting = DriftSettings(rounds_between_false_alarms=8_000)
    raised = sum(bool(play(DriftAlarm(setting), GOOD, GOOD, 0.8 * GOOD + 0.2 * RAW, 400, rng)) for _ in range(200))
    assert raised < 30


def test_comes_back_when_the_prompts_do() -> None:
    alarm, rng = DriftAlarm(DriftSettings(first_pause=20, check_rounds=60)), np.random.default_rng(3)
    while not alarm.raised:
        play(alarm, WRONG, GOOD, RAW, 1, rng)
    alarm_round = alarm.num_rounds
    play(alarm, WRONG, GOOD, RAW, 20, rng)
    assert alarm.wants_scores and not alarm.use_scorer  # checking
    play(alarm, WRONG, GOOD, RAW, 60, rng)
    assert not alarm.wants_scores  # the check failed, and the next pause is twice as long
    for _ in range(40):
        assert alarm.observe_unscored() is None
    events = play(alarm, GOOD, GOOD, RAW, 60, rng)
    assert [event.kind for event in events] == ["came_back"] and alarm.use_scorer
    assert alarm.num_rounds == alarm_round + 20 + 60 + 40 + 60


def test_one_strange_round_is_no_drift_and_nan_is() -> None:
    alarm = DriftAlarm()
    assert alarm.observe(-1e9, -1.0) is None and alarm.use_scorer
    while alarm.use_scorer and alarm.num_rounds < 40:
        alarm.observe(math.nan, -1.0)
    assert alarm.num_rounds == 24  # the strange round and 23 more of 1 nat, half of which is above log(100000)
    with pytest.raises(ScorerError, match="counts must be at least 1"):
        DriftSettings(check_rounds=0)
    for exponent in (0.0, 1.5, math.nan):
        with pytest.raises(ScorerError, match="exponent must lie in"):
            DriftSettings(exponent=exponent)


def test_a_scorer_that_is_better_but_not_right_is_kept_at_the_exponent() -> None:
    """The third outcome comes oftener than the scorer says, yet it is better by .12 nats: E[(draft / scorer)^.5] = .99 < 1.

    At exponent 1 the mean is 1.09, and the bound does not hold: so at .5 at most 5 % of runs alarm (as above), at 1 many do.
    """
    truth, scorer, raw = np.array([0.62, 0.2, 0.18]), np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.25, 0.35])
    steps = np.minimum(np.log(raw / scorer), 1.0)
    assert truth @ np.exp(0.5 * steps) < 1 < truth @ np.exp(steps) and truth @ steps < -0.1
    raised = []
    for exponent in (0.5, 1.0):
        rng, chosen = np.random.default_rng(4), DriftSettings(rounds_between_false_alarms=8_000, exponent=exponent)
        raised.append(sum(bool(play(DriftAlarm(chosen), truth, scorer, raw, 400, rng)) for _ in range(200)))
    assert raised[0] < 30 and raised[1] > 3 * max(raised[0], 5)


def test_likelihoods_of_a_round_by_hand() -> None:
    ids = np.array([[5, 6], [7, 8]])
    raw = np.log(np.array([[0.5, 0.25], [0.8, 0.1]]))
    with np.errstate(divide="ignore"):
        edges = np.log(np.array([[[0.6, 0.2], [0, 0]], [[0.9, 0.05], [0.3, 0.0]]]))
    assert round_log_likelihoods(edges, raw, ids, [6, 7]) == pytest.approx((math.log(0.2 * 0.3), math.log(0.25 * 0.8)))
    assert round_log_likelihoods(edges, raw, ids, [5, 9]) == pytest.approx((math.log(0.6 * 0.05), math.log(0.5 * 0.1)))
    assert round_log_likelihoods(edges, raw, ids, [4, 7]) == pytest.approx((math.log(0.2), math.log(0.25)))  # ends there
    assert round_log_likelihoods(edges, raw, ids, [6, 8])[0] == pytest.approx(math.log(0.2) + LOG_SMALLEST)
    assert round_log_likelihoods(edges, raw, ids, []) == (0.0, 0.0)
    assert round_log_likelihoods(edges, raw, ids, [5, 7, 1]) == pytest.approx((math.log(0.54), math.log(0.4)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12))
def test_numbers_accepted_have_likelihoods_that_sum_to_one(seed: int, depth: int, top_k: int, nodes: int) -> None:
    trellis = random_trellis(np.random.default_rng(seed), depth, top_k)
    tree = tree_of(trellis, nodes)
    pairs = [accepted_log_likelihoods(tree, n, trellis.token_ids, trellis.log_edges) for n in range(int(tree.depths.max()) + 1)]
    for scorer, raw in pairs:
        assert scorer == pytest.approx(raw, abs=1e-6)  # the tree was chosen on the draft's own probabilities
    assert sum(math.exp(scorer) for scorer, _ in pairs) == pytest.approx(1.0, abs=1e-6)


def test_more_accepted_than_the_tree_is_deep_is_impossible() -> None:
    tree = DraftTree.from_expansion(expand(Trellis.from_probabilities([[1, 2, 3]], [[0.3, 0.2, 0.1]]), 3), "budget")
    raw = np.log([[0.3, 0.2, 0.1]])
    assert accepted_log_likelihoods(tree, 2, np.array([[1, 2, 3]]), raw) == (-23.0, -23.0)


@pytest.mark.parametrize("wrong", [
    {"proof": float("nan")}, {"proof": -5.0}, {"largest_step": -1.0}, {"largest_step": float("nan")}, {"longest_pause": 0},
    {"rounds_between_false_alarms": float("inf")}, {"first_pause": float("nan")}, {"exponent": 0.0},
])  # fmt: skip
def test_settings_that_would_silence_the_alarm_are_refused(wrong) -> None:
    with pytest.raises(ScorerError, match="drift settings"):
        DriftSettings(**wrong)


def test_number_accepted_by_hand() -> None:
    """A chain of two by the scorer .9, .5; by the draft .6, .5: one accepted has chance .45 and .30."""
    ids, drafted = np.array([[3, 4], [5, 6]]), np.log(np.array([[0.6, 0.4], [0.5, 0.5]]))
    edges = np.log(np.array([[0.9, 0.05], [0.5, 0.1]]))
    tree = tree_of(Trellis(ids, edges), 2)
    assert tree.token_ids[1:].tolist() == [3, 5]
    assert accepted_log_likelihoods(tree, 1, ids, drafted) == pytest.approx((math.log(0.45), math.log(0.3)))
    alarm = DriftAlarm()
    assert alarm.observe_tree(tree, 2, ids, drafted) is None and alarm.num_rounds == 1


def tree_of(trellis: Trellis, nodes: int) -> DraftTree:
    return DraftTree.from_expansion(expand(trellis, nodes), "budget")
