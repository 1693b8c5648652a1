from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector.errors import PolicyError
from selector.policies import RoundInputs
from selector.pool import CandidatePool
from selector.registry import parse_policy
from selector.replaying.orders import build_orders
from selector.replaying.playing import play_any
from selector.replaying.rounds import build_curves, play
from selector.search.expansion import expand
from selector.smart import Smart
from selector.taps import Taps, within_top_k
from selector.trellis import Trellis
from selector.tuning.settings import tune_smart, tune_taps
from tests.selector.helpers import COST_KINDS, markov_trace, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)
CURVE = np.linspace(1.0, 2.0, 300)


def take(policy, candidates, curve=CURVE, max_nodes=250):
    return policy.select(candidates, RoundInputs(curve, curve, None, max_nodes))


# --- TAPS


def test_taps_worked_example():
    """Reaches .6, .54 (deeper), .4, .32: the weight on depth turns .54 / 2.2 behind .4 / 1.6."""
    trellis = Trellis.from_probabilities([[1, 2], [3, 4]], [[[0.6, 0.4], [0, 0]], [[0.9, 0.0], [0.0, 0.8]]])
    by_reach = take(Taps(max_nodes=2, depth_weight=0.0), trellis)
    assert by_reach.token_ids.tolist() == [-1, 1, 3]
    by_utility = take(Taps(max_nodes=2, depth_weight=0.6), trellis)
    assert by_utility.token_ids.tolist() == [-1, 1, 2]
    assert by_utility.status == "budget"
    np.testing.assert_allclose(Taps(depth_weight=0.6).utility(np.array([0.54, 0.4]), np.array([2, 1])), [0.54 / 2.2, 0.25])
    useful = take(Taps(depth_weight=0.6, utility_threshold=0.2), trellis)  # .375, .245, .25; not .32 / 2.2
    assert (useful.token_ids.tolist(), useful.status) == ([-1, 1, 3, 2], "threshold")
    assert take(Taps(), trellis).status == "exhausted"


def closure_greedy(pool, utility, threshold, limit):
    """The rule word for word: by falling utility, a node and those of its ancestors that are not in yet, if all fit."""
    chosen: set[int] = set()
    for node in sorted(range(len(utility)), key=lambda i: (-utility[i], i)):
        if utility[node] < threshold:
            break
        path, at = set(), node
        while at >= 0:
            path.add(at)
            at = pool.parents[at] - 1
        if len(chosen | path) <= limit:
            chosen |= path
    return sorted(chosen)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 30), st.sampled_from([0.0, 0.02, 0.1]), st.sampled_from([0.0, 0.1, 1.0]), st.booleans())
def test_taps_is_the_greedy_closure_rule(seed, limit, threshold, weight, coarse):
    rng = np.random.default_rng(seed)
    trellis = random_trellis(rng, 4, 3, conditional=True, coarse=coarse)
    policy = Taps(limit, 60, 16, threshold, 0.2, weight)
    pool = expand(trellis, 60)
    expected = closure_greedy(pool, policy.utility(pool.reach, pool.depths), threshold, limit)
    tree = take(policy, trellis)
    np.testing.assert_array_equal(tree.token_ids[1:], pool.token_ids[expected])
    np.testing.assert_array_equal(tree.depths[1:], pool.depths[expected])
    assert all(parent < slot for slot, parent in enumerate(tree.parents))
    assert tree.expected_tokens == pytest.approx(1 + pool.reach[expected].sum())


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 40))
def test_without_a_weight_on_depth_taps_is_a_fixed_budget(seed, n):
    trellis = random_trellis(np.random.default_rng(seed), 4, 3, conditional=True)
    ours, fixed = take(Taps(n, depth_weight=0.0), trellis), take(parse_policy(f"fixed:{n}"), trellis)
    np.testing.assert_array_equal(ours.token_ids, fixed.token_ids)
    np.testing.assert_array_equal(ours.parents, fixed.parents)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3))
def test_taps_keeps_k_children_and_n_pool_candidates(seed, top_k):
    trellis = random_trellis(np.random.default_rng(seed), 3, 4, conditional=True)
    tree = take(Taps(100, 40, top_k), trellis)
    assert np.bincount(tree.parents[1:]).max(initial=0) <= top_k
    narrow = np.sort(trellis.log_edges, axis=2)[:, :, -top_k][:, :, None]
    cut = Trellis(trellis.token_ids, np.where(trellis.log_edges >= narrow, trellis.log_edges, -np.inf))
    if expand(trellis, 40).num_chosen < 40:  # nothing was lost to N_pool
        assert tree.expected_tokens == pytest.approx(take(Taps(100), cut).expected_tokens)
    assert take(Taps(100, pool_nodes=5), trellis).num_nodes <= 5
    assert within_top_k(expand(trellis, 40), 4).all()


def test_taps_takes_pools_and_refuses_bad_settings():
    pool = CandidatePool([5, 6, 7], [-1, 0, -1], [0.8, 0.9, 0.1])
    assert take(Taps(2), pool).token_ids.tolist() == [-1, 5, 6]
    assert (Taps().name, Taps(24).name) == ("taps", "taps:24")
    assert parse_policy("taps:3000").pool_nodes == 3000  # a pool smaller than the tree would cap it unsaid
    statuses = [take(Taps(n, utility_threshold=t), pool, max_nodes=m).status for n, t, m in [(2, 0, 9), (3, 0, 2), (3, 0.5, 9)]]
    assert (statuses, take(Taps(9), pool).status) == (["budget", "truncated:max_nodes", "threshold"], "exhausted")
    for bad in [{"max_nodes": 0}, {"top_k": 0}, {"depth_weight": -1.0}, {"utility_threshold": float("nan")}]:
        with pytest.raises(PolicyError):
            Taps(**bad)


# --- SMART


def test_smart_worked_example():
    """A chain of .5 at 1 + .21 n seconds: q / step over T / c is 2.38, .960, .483, .259 for the four nodes."""
    trellis = Trellis.from_probabilities(np.arange(4), np.full(4, 0.5))
    cost = 1 + 0.21 * np.arange(5)
    taken = [take(Smart(percent), trellis, cost, 4).num_nodes for percent in (300, 100, 97, 96, 49, 48, 25)]
    assert taken == [0, 1, 1, 2, 2, 3, 4]
    assert take(Smart(100), trellis, cost, 4).status == "truncated:top_k"  # an unlisted sibling of .5 would have come first
    pool = CandidatePool(np.arange(4), np.arange(4) - 1, np.full(4, 0.5))
    assert [take(Smart(p), pool, cost, 4).status for p in (100, 25)] == ["first-descent", "exhausted"]
    assert take(Smart(25), pool, cost, 3).status == "truncated:max_nodes"


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from(COST_KINDS), st.sampled_from([30, 80, 100, 140]))
def test_smart_is_the_rule_node_by_node(seed, kind, percent):
    rng = np.random.default_rng(seed)
    trellis, cost = random_trellis(rng, 4, 3, conditional=True), random_cost(rng, 61, kind)
    reach = expand(trellis, 60).reach
    n, tokens = 0, 1.25
    while n < len(reach) and reach[n] * cost[n] > percent / 100 * tokens * (cost[n + 1] - cost[n]):
        tokens, n = tokens + reach[n], n + 1
    assert Smart(percent).select(trellis, RoundInputs(cost, cost, None, 60, bonus=1.25)).num_nodes == n


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(COST_KINDS))
def test_smart_without_a_discount_is_first_descent(seed, kind):
    rng = np.random.default_rng(seed)
    trellis, cost = random_trellis(rng, 4, 3, conditional=True), random_cost(rng, 61, kind)
    smart, unimodal = (take(policy, trellis, cost, 60) for policy in (Smart(), parse_policy("unimodal")))
    assert smart.num_nodes == unimodal.num_nodes
    assert smart.status == "truncated:top_k" or unimodal.status != "truncated:top_k"


def test_smart_on_a_flat_curve_and_bad_settings():
    trellis = random_trellis(np.random.default_rng(0), 4, 3)
    tree = take(Smart(), trellis, np.full(65, 0.06), 64)
    assert (tree.status, tree.num_nodes) == ("degenerate-cost", 4)
    assert take(Smart(), CandidatePool([5], [-1], [0.8]), CURVE).num_nodes == 1
    assert (Smart().name, Smart(80).name) == ("smart", "smart:80")
    with pytest.raises(PolicyError):
        Smart(0)


# --- replay and tuning


@pytest.fixture(scope="module")
def machine():
    cost = CostModel.from_points(
        [1, 2, 4, 8, 16, 32, 65], [0.05, 0.052, 0.054, 0.058, 0.07, 0.1, 0.16], draft_seconds=0.008, commit_seconds=0.001
    )
    orders = build_orders(markov_trace(num_texts=6), 64)
    return orders, build_curves(orders, cost)


@pytest.mark.parametrize("name", ["chain:3", "fixed:6", "unimodal", "exact"])
def test_playing_any_policy_equals_playing_a_known_one(machine, name):
    orders, curves = machine
    found, expected = play_any(parse_policy(name), orders, curves), play(parse_policy(name), orders, curves, adapt=False)
    np.testing.assert_array_equal(found.visited, expected.visited)
    np.testing.assert_array_equal(found.nodes, expected.nodes)
    np.testing.assert_array_equal(found.accepted, expected.accepted)
    np.testing.assert_array_equal(found.depths, expected.depths)
    np.testing.assert_allclose(found.text_seconds, expected.text_seconds)


def test_tuning_finds_the_best_of_its_grid(machine):
    orders, curves = machine
    policy, played = tune_taps(orders, curves, [4, 16], [0.0, 0.05], [0.0])
    rates = [
        play_any(Taps(n, utility_threshold=threshold, depth_weight=0.0), orders, curves).tokens_per_second
        for n in (4, 16)
        for threshold in (0.0, 0.05)
    ]
    assert played.tokens_per_second == max(rates)
    assert play_any(policy, orders, curves).tokens_per_second == max(rates)
    smart, smart_played = tune_smart(orders, curves, [50, 100])
    assert smart_played.tokens_per_second == max(play_any(Smart(p), orders, curves).tokens_per_second for p in (50, 100))
    assert smart.percent in (50, 100)
    for tuner in (lambda: tune_taps(orders, curves, [], [0.0], [0.0]), lambda: tune_smart(orders, curves, [])):
        with pytest.raises(PolicyError):
            tuner()
