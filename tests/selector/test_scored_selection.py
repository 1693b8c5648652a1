"""The live selector with a scorer: scored trees, falling back on drift, prices by context, limits of a plan."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel import CostModel
from selector import CandidatePool, Plan, TreeSelector, Trellis
from selector.calibration import Calibration
from selector.drift.alarm import DriftAlarm, DriftSettings
from selector.edges import EdgeSource
from selector.errors import PlanError
from selector.price import PriceRange, prices_at
from selector.replaying.orders import build_orders
from selector.replaying.playing import play_policy
from selector.replaying.rounds import build_curves
from tests.selector.fake_scorers import ArbitraryScorer, FakeScorer, MarginalScorer
from tests.selector.helpers import markov_trace
from tests.selector.test_replay import cost_model, decode_live

COST = CostModel.from_points([1, 2, 4, 8, 16, 32, 64], [0.042, 0.050, 0.053, 0.059, 0.076, 0.094, 0.14], draft_seconds=0.010)
WORKED = Trellis.from_probabilities([[1, 2], [3, 4]], [[0.6, 0.3], [0.5, 0.4]])


class WorkedScorer(FakeScorer):
    """After 1 comes 4, after 2 comes 3; never the other."""

    def row(self, depth, parent, children, log_probs):
        if depth == 0:
            return log_probs
        wanted = {1: 4, 2: 3}[parent]
        return np.where(children == wanted, np.log(0.9), -np.inf)


def test_worked_example_of_a_scored_tree():
    selector = TreeSelector(COST, policy="fixed:3", scorer=WorkedScorer())
    tree = selector.select_trellis(WORKED, 10, root_token=9)
    assert tree.token_ids.tolist() == [9, 1, 4, 2]  # .6, .54 and .3: 3 after 1, the drafter's best, is not there
    np.testing.assert_allclose(tree.reach[1:], [0.6, 0.54, 0.3])
    assert selector.stats.scored == 1


def test_only_the_scorers_candidates_enter():
    selector = TreeSelector(COST, policy="fixed:40", scorer=MarginalScorer(top_k=1))
    tree = selector.select_trellis(Trellis.from_probabilities([[1, 2], [3, 4]], [[0.3, 0.3], [0.5, 0.4]]), 10, 9)
    assert tree.token_ids.tolist() == [9, 1, 3]


@pytest.mark.parametrize("calibration", [None, Calibration((0.9,), (-0.3,))])
def test_without_anything_to_score_the_next_best_is_used(calibration):
    plan = Plan("fixed:3", calibration=calibration)
    scored, other = TreeSelector(COST, plan=plan, scorer=WorkedScorer()), TreeSelector(COST, plan=plan)
    for root in (-1, 9):
        tree, expected = scored.select_trellis(WORKED, 10, root), other.select_trellis(WORKED, 10, root)
        assert (tree.reach.tolist() == expected.reach.tolist()) == (root == -1)
    assert (scored.stats.scored, scored.stats.fallbacks, other.stats.fallbacks) == (1, 1, 0)
    pool = CandidatePool([1, 2, 3], [-1, 0, 0], [0.9, 0.6, 0.3])
    assert scored.select_trellis(pool, 10, 9).num_nodes == 3
    assert scored.stats.fallbacks == 2


def test_drift_falls_back_and_says_so_once_and_comes_back():
    """The scorer swears by tokens that never come, the drafter is right; later the scorer is right again."""
    settings = DriftSettings(rounds_between_false_alarms=1000, first_pause=20, check_rounds=10)
    plan = Plan("fixed:3", calibration=Calibration((1.0,), (-0.1,)))
    selector = TreeSelector(COST, plan=plan, scorer=WorkedScorer(), alarm=DriftAlarm(settings))
    fallen = Trellis(WORKED.token_ids, plan.calibration.apply(WORKED.log_edges))
    expected = TreeSelector(COST, policy="fixed:3").select_trellis(fallen, 10, 9)
    with pytest.warns(UserWarning, match="worse than the draft") as warned:
        while not selector.stats.drift_alarms:
            tree = selector.select_trellis(WORKED, 10, root_token=9)
            selector.observe(tree, 1, 0.08, [1, 3])  # after 1 came 3, which the scorer held impossible
            assert selector.stats.rounds < 50
    np.testing.assert_array_equal(selector.select_trellis(WORKED, 10, 9).reach, expected.reach)
    assert selector.stats.fallbacks == 1
    for _ in range(60):
        tree = selector.select_trellis(WORKED, 10, root_token=9)
        selector.observe(tree, 2, 0.08, [1, 4, 5])
    assert 4 in selector.select_trellis(WORKED, 10, 9).token_ids[:3]
    assert selector.stats.fallbacks == 1 + 20 + 10  # the pause, and the rounds in which the scorer was checked
    assert [warning.filename for warning in warned] == [__file__]


def test_without_tokens_the_number_of_accepted_nodes_is_compared():
    alarm = DriftAlarm(DriftSettings(rounds_between_false_alarms=1000))
    selector = TreeSelector(COST, policy="fixed:3", scorer=WorkedScorer(), alarm=alarm)
    with pytest.warns(UserWarning, match="worse than the draft"):
        for _ in range(100):
            selector.observe(selector.select_trellis(WORKED, 10, 9), 1, 0.08)  # .54 was promised for two nodes
    assert selector.stats.drift_alarms == 1


@pytest.mark.parametrize("sharpness", [None, 0.2])
def test_the_alarm_compares_with_what_would_be_used_instead(sharpness):
    """A scorer as good as the drafter is no worse; beside a calibration that knows better it is."""
    calibration = None if sharpness is None else Calibration((sharpness,), (0.0,))
    alarm = DriftAlarm(DriftSettings(rounds_between_false_alarms=100))
    source = EdgeSource(calibration, MarginalScorer(top_k=2), alarm)
    unsure = Trellis.from_probabilities([[1, 2]], [[0.97, 0.01]])
    for _ in range(40):
        tree = TreeSelector(COST, policy="fixed:1").select_trellis(source.apply(unsure, 9), 10)
        source.observe(tree, 0, [2])  # the unlikely one, every time
    assert (alarm.num_alarms > 0) == (sharpness is not None)


def test_an_alarm_hears_nothing_of_rounds_without_a_scorer():
    source = EdgeSource(alarm=DriftAlarm())
    assert source.apply(WORKED, 9) is WORKED
    tree = TreeSelector(COST, policy="fixed:3").select_trellis(WORKED, 10)
    assert source.observe(tree, 0, [7]) is None
    assert source.alarm.num_rounds == 0


def test_scoring_is_part_of_what_a_round_costs():
    """Where scoring took as long as three rounds, a round with many nodes would be the cheaper way to spend it."""
    logits = np.random.default_rng(0).standard_normal((6, 300)).astype(np.float32) * 2
    sizes = []
    for seconds in (0.0, 0.3):
        selector = TreeSelector(COST, plan=Plan("exact", scoring_seconds=seconds), scorer=MarginalScorer())
        sizes.append(selector.select(logits, 10, root_token=1).num_nodes)
    assert sizes[1] > sizes[0]
    unscored = TreeSelector(COST, plan=Plan("exact", scoring_seconds=0.3))
    assert unscored.select(logits, 10, root_token=1).num_nodes == sizes[0]


def test_only_rounds_that_ask_the_scorer_are_charged_for_it():
    """As large a tree as a selector without a scorer takes, where there is nothing to score."""
    plan = Plan("exact", scoring_seconds=0.3)
    logits = np.random.default_rng(0).standard_normal((6, 300)).astype(np.float32) * 2
    scored, unscored = TreeSelector(COST, plan=plan, scorer=MarginalScorer()), TreeSelector(COST, plan=plan)
    expected = unscored.select(logits, 10).num_nodes
    assert scored.select(logits, 10).num_nodes == expected  # no root token
    assert scored.select(logits, 10, root_token=1).num_nodes > expected
    scored._edges.alarm.state = "paused"
    assert scored.select(logits, 10, root_token=1).num_nodes == expected


def test_a_scorer_put_aside_is_not_asked_where_it_cannot_be_checked():
    scorer = WorkedScorer()
    alarm = DriftAlarm(DriftSettings(rounds_between_false_alarms=10, first_pause=5, check_rounds=10))
    selector = TreeSelector(COST, policy="fixed:3", scorer=scorer, alarm=alarm)
    with pytest.warns(UserWarning, match="worse than the draft"):
        while not selector.stats.drift_alarms:
            selector.observe(selector.select_trellis(WORKED, 10, 9), 1, 0.08)
    asked = len(scorer.batches)
    for _ in range(50):
        selector.observe(selector.select_trellis(WORKED, 10, 9), 1, 0.08)
    assert (alarm.state, len(scorer.batches)) == ("checking", asked)
    for _ in range(11):  # from the second on: the first round does not know yet that its tokens will be told
        selector.observe(selector.select_trellis(WORKED, 10, 9), 2, 0.08, [1, 4, 5])
    assert (alarm.state, len(scorer.batches)) == ("using", asked + 10)


@pytest.mark.parametrize("seed", range(3))
def test_live_decoding_at_prices_by_range_is_the_replay_that_tuning_judges(seed):
    """Scorer, scale of reach and time of scoring at once; the trackers held still."""
    trace, cost, scorer = markov_trace(num_texts=3, length=24, seed=seed), cost_model(), ArbitraryScorer(3)
    ranges = [PriceRange(0, 30, 25.0), PriceRange(31, 99, 35.0)]
    plan = Plan("priced", prices=ranges, reach_scale=0.8, scoring_seconds=0.004)
    selector = TreeSelector(cost, plan=plan, pause=None, scorer=scorer, alarm=DriftAlarm(DriftSettings(1e300)))
    for low in (0, 31):
        selector._prices.at(low).observe = lambda tokens, seconds: None
    nodes, tokens, seconds = decode_live(trace, cost, selector)
    orders = build_orders(trace, selector.max_nodes, None, scorer)
    rounds = play_policy(
        plan.make_policy(), orders, build_curves(orders, cost).plus(0.004), prices_at(ranges, orders.context_tokens), 0.8
    )
    assert rounds.nodes.tolist() == nodes
    assert rounds.text_tokens.sum() == tokens
    assert rounds.total_seconds == pytest.approx(seconds + 0.004 * len(nodes))


def test_every_range_of_contexts_has_its_price():
    ranges = [PriceRange(100, 199, 40.0), PriceRange(10, 99, 60.0)]
    selector = TreeSelector(COST, plan=Plan("priced", price=50.0, prices=ranges), pause=None)
    found = []
    for context in (5, 10, 99, 100, 500):
        tree = selector.select_trellis(WORKED, context)
        found.append(selector.price)
    assert found == [60.0, 60.0, 60.0, 40.0, 40.0]
    for _ in range(500):
        selector.observe(tree, 1, 0.1)  # at the last context
    assert selector.price == pytest.approx(20.0, rel=0.1)
    selector.select_trellis(WORKED, 50)
    assert selector.price == 60.0
    assert TreeSelector(COST, plan=Plan("priced", price=50.0)).price == 50.0


def test_contexts_beyond_the_traced_ones_are_counted_and_said_once():
    selector = TreeSelector(COST, plan=Plan("fixed:2", identity={"context_tokens": [40, 300]}))
    selector.select_trellis(WORKED, 40)
    selector.select_trellis(WORKED, 300)
    assert selector.stats.out_of_range == 0
    with pytest.warns(UserWarning, match="301 tokens lies outside the 40 to 300") as warned:
        selector.select_trellis(WORKED, 301)
        selector.select_trellis(WORKED, 39)
    assert (selector.stats.out_of_range, len(warned)) == (2, 1)
    assert warned[0].filename == __file__  # the line that called the selector


def test_drafts_of_another_block_size_than_the_plans_are_refused():
    selector = TreeSelector(COST, plan=Plan("fixed:2", identity={"block_size": 3}))
    assert selector.select_trellis(WORKED, 10).num_nodes == 2
    assert selector.select_trellis(Trellis(WORKED.token_ids[:1], WORKED.log_edges[:1]), 10).num_nodes == 2  # the end of a text
    with pytest.raises(PlanError, match="block_size is 3 in the plan, the draft has 5 positions") as caught:
        selector.select(np.zeros((5, 20), np.float32), 10)
    assert (caught.value.field, selector.stats.rounds) == ("block_size", 2)


def test_warming_up_runs_the_scorer_once_and_leaves_no_trace():
    scorer = ArbitraryScorer()
    selector = TreeSelector(COST, policy="exact", scorer=scorer)
    selector.warm_up()
    assert (scorer.batches, selector.stats.rounds) == ([1], 0)
