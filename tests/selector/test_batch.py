from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel, Profile
from profiles.errors import UsageError
from selector.batch import batch_curve, executed_sizes, select_batch, select_batch_uniform
from selector.errors import CostCurveError
from selector.policies import RoundInputs
from selector.pool import CandidatePool
from selector.registry import parse_policy
from selector.search.expansion import expand
from selector.trellis import Trellis
from tests.selector.helpers import COST_KINDS, best_sums, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)


def chain(p: float, depth: int = 10) -> Trellis:
    return Trellis.from_probabilities(np.arange(depth), np.full(depth, p))


def test_worked_example_four_nodes_go_where_they_are_likely():
    """Survivals .9^i and .3^i: .9, .81, .729, .656 all come before .3."""
    chosen = select_batch([chain(0.9), chain(0.3)], np.arange(1.0, 30.0), total_nodes=4)
    assert chosen.num_nodes.tolist() == [4, 0]
    assert chosen.expected_tokens == pytest.approx(2 + 0.9 + 0.81 + 0.729 + 0.6561)
    assert (chosen.num_verify_tokens, chosen.status) == (6, "budget")
    uniform = select_batch_uniform([chain(0.9), chain(0.3)], np.arange(1.0, 30.0), max_nodes=2, price=0.0)
    assert uniform.num_nodes.tolist() == [2, 2]
    assert uniform.expected_tokens == pytest.approx(2 + 0.9 + 0.81 + 0.3 + 0.09)


def test_worked_example_with_steps_and_padding():
    """Sizes 4, 8, 16 at 8, 8.5, 20 ms; two requests: eight slots cost nearly what four do, sixteen far more."""
    by_tokens = np.full(17, 20.0)
    by_tokens[:9], by_tokens[:5] = 8.5, 8.0
    curve = by_tokens[2:]  # index n: n nodes and two roots
    chosen = select_batch([chain(0.9), chain(0.6)], curve, executable_verify_tokens=[4, 8, 16])
    assert chosen.num_verify_tokens == chosen.executed_verify_tokens == 8
    assert chosen.num_nodes.tolist() == [5, 1]  # .9 .81 .729 .656 .6 .590 | .531
    short = select_batch([chain(0.9, 3), chain(0.6, 1)], curve, executable_verify_tokens=[4, 8, 16])
    assert (short.num_verify_tokens, short.executed_verify_tokens, short.padding_tokens) == (6, 8, 2)
    assert short.expected_seconds == 8.5


def brute_force(trellises, curve, price, caps, executable, bonus=1.0):
    """Best value and tokens over every split of nodes; a split's best trees come from listing every tree."""
    sums = [best_sums(trellis, cap) for trellis, cap in zip(trellises, caps, strict=True)]
    r, values = len(trellises), []
    for split in product(*(range(len(each)) for each in sums)):
        executed = int(executed_sizes(np.array([sum(split) + r]), executable)[0])
        if executed < 0 or executed - r >= len(curve):
            continue
        tokens = r * bonus + sum(each[n] for each, n in zip(sums, split, strict=True))
        seconds = curve[executed - r]
        values.append(tokens / seconds if price is None else tokens - price * seconds)
    return max(values)


@pytest.mark.parametrize("priced", [False, True])
def test_against_every_split_and_every_tree(priced):
    rng = np.random.default_rng(7 + priced)
    for case in range(120):
        r = 2 + case % 2
        shape = [(2, 2), (1, 3), (4, 1)][case % 3]
        trellises = [random_trellis(rng, *shape, conditional=case % 4 == 0, coarse=case % 5 == 0) for _ in range(r)]
        caps = rng.integers(0, 4, r).tolist()
        curve = random_cost(rng, 14, COST_KINDS[case // 3 % 4])
        executable = [None, r, 3, [3, 4, 7, 12]][case % 4]
        price = float(rng.random() * 3) if priced else None
        chosen = select_batch(trellises, curve, price, max_nodes=caps, executable_verify_tokens=executable)
        value = chosen.expected_tokens / chosen.expected_seconds
        if price is not None:
            value = chosen.expected_tokens - price * chosen.expected_seconds
        assert value == pytest.approx(brute_force(trellises, curve, price, caps, executable), rel=1e-9, abs=1e-9)
        assert all(n <= cap for n, cap in zip(chosen.num_nodes, caps, strict=True))
        assert chosen.expected_tokens == pytest.approx(sum(tree.expected_tokens for tree in chosen.trees))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 12))
def test_no_split_of_a_total_has_more_reach_than_the_merged_order(seed, total):
    rng = np.random.default_rng(seed)
    trellises = [random_trellis(rng, 3, 2, coarse=bool(seed % 2)) for _ in range(3)]
    chosen = select_batch(trellises, np.arange(1.0, 60.0), total_nodes=total)
    sums = [np.concatenate([[0], np.cumsum(expand(trellis, 14).reach)]) for trellis in trellises]
    best = max(
        sum(each[n] for each, n in zip(sums, split, strict=True))
        for split in product(*(range(len(each)) for each in sums))
        if sum(split) == chosen.num_nodes.sum()
    )
    assert chosen.expected_tokens == pytest.approx(3 + best)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(COST_KINDS), st.booleans())
def test_one_request_is_the_single_policy_and_uniform_never_beats_merged(seed, kind, priced):
    rng = np.random.default_rng(seed)
    trellises = [random_trellis(rng, 4, 3) for _ in range(3)]
    curve, price = random_cost(rng, 80, kind), float(rng.random() * 2) if priced else None
    single = parse_policy("priced").select(trellises[0], RoundInputs(curve, curve, price, 60))
    alone = select_batch(trellises[:1], curve, price, max_nodes=60)
    assert alone.trees[0].num_nodes == single.num_nodes
    np.testing.assert_array_equal(alone.trees[0].token_ids, single.token_ids)
    merged = select_batch(trellises, curve, price, max_nodes=25)
    uniform = select_batch_uniform(trellises, curve, price, max_nodes=25)

    def value(chosen):
        if price is None:
            return chosen.expected_tokens / chosen.expected_seconds
        return chosen.expected_tokens - price * chosen.expected_seconds

    assert value(merged) >= value(uniform) - 1e-9
    assert uniform.executed_verify_tokens % 3 == 0


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_order_of_the_requests_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    trellises = [random_trellis(rng, 3, 3) for _ in range(4)]
    curve = random_cost(rng, 100, "staircase")
    forward, backward = select_batch(trellises, curve), select_batch(trellises[::-1], curve)
    assert forward.num_nodes.tolist() == backward.num_nodes.tolist()[::-1]
    assert forward.expected_tokens == pytest.approx(backward.expected_tokens)


def test_sizes_an_engine_runs():
    tokens = np.array([3, 4, 5, 9, 17])
    assert executed_sizes(tokens, None).tolist() == tokens.tolist()
    assert executed_sizes(tokens, 4).tolist() == [4, 4, 8, 12, 20]
    assert executed_sizes(tokens, [16, 4, 8]).tolist() == [4, 4, 8, 16, -1]
    for bad in (0, [], [0, 4]):
        with pytest.raises(CostCurveError):
            executed_sizes(tokens, bad)


def test_the_curve_of_a_batch_counts_every_root():
    profile = Profile.from_points([1, 2, 4, 8, 16, 32], [0.01, 0.011, 0.013, 0.017, 0.03, 0.05])
    cost = CostModel(replace(profile, requests_rule="total_tokens"))
    curve = batch_curve(cost, 4, 12, [100, 200, 300, 400])
    assert len(curve) == 13
    assert curve[0] == pytest.approx(cost.verify_seconds(4, 250, 4))
    assert curve[12] == pytest.approx(cost.verify_seconds(16, 250, 4))


def test_statuses_and_refusals():
    flat = np.full(20, 0.05)
    chosen = select_batch([chain(0.9, 3), chain(0.5, 2)], flat)
    assert (chosen.status, chosen.num_nodes.tolist()) == ("degenerate-cost", [3, 2])
    assert select_batch([chain(0.9, 3), chain(0.5, 2)], flat[:4]).num_nodes.sum() == 3
    assert select_batch_uniform([chain(0.9, 3), chain(0.5, 2)], flat).status == "degenerate-cost"
    rising = np.linspace(1.0, 1.1, 20)
    assert select_batch([chain(0.9, 3)], rising, max_nodes=2).status == "truncated:max_nodes"
    assert select_batch([chain(0.9, 3)], rising, total_nodes=9).status == "exhausted"
    complete = Trellis.from_probabilities([[0, 1]] * 2, [[0.6, 0.4]] * 2)
    assert select_batch([complete], rising).status == "optimal"
    listed = Trellis.from_probabilities([[0, 1]] * 2, [[0.4, 0.3]] * 2)
    assert select_batch([listed, listed], rising).status == "truncated:top_k"
    assert select_batch([listed, listed], rising, total_nodes=1).status == "budget"
    capped = select_batch([chain(1.0, 3), chain(1.0, 3)], np.linspace(1.0, 1.01, 20), max_nodes=[1, 9])
    assert (capped.num_nodes.tolist(), capped.status) == ([1, 3], "truncated:max_nodes")
    assert select_batch([chain(1.0, 3)], rising[:3], total_nodes=9).status == "truncated:max_nodes"
    assert select_batch_uniform([complete, complete], rising).status == "optimal"
    assert select_batch_uniform([complete, complete], rising[:3]).status == "truncated:max_nodes"
    assert select_batch_uniform([listed, listed], rising).status == "truncated:top_k"


def test_what_is_no_batch_is_refused_by_name():
    rising, two = np.linspace(1.0, 1.1, 20), [chain(0.9), chain(0.5)]
    for select in (select_batch, select_batch_uniform):
        with pytest.raises(UsageError, match="at least one request"):
            select([], rising)
        with pytest.raises(UsageError, match="or 2 of them"):
            select(two, rising, max_nodes=[1, 2, 3])
        with pytest.raises(UsageError, match="one number of at least 0"):
            select(two, rising, max_nodes=-1)
        with pytest.raises(UsageError, match="2 requests need as many root_tokens, got 1"):
            select(two, rising, root_tokens=[4])
        with pytest.raises(CostCurveError, match="positive finite"):
            select(two, np.array([1.0, np.nan]))
    with pytest.raises(UsageError, match="total_nodes must not be negative"):
        select_batch(two, rising, total_nodes=-1)
    with pytest.raises(CostCurveError, match="positive finite"):
        select_batch(two, np.array([1.0, np.nan]), total_nodes=1)


def test_an_engine_that_cannot_hold_the_roots_is_refused():
    rising = np.linspace(1.0, 1.1, 20)
    with pytest.raises(CostCurveError, match="roots alone"):
        select_batch([chain(0.9)] * 3, rising, executable_verify_tokens=[2])


def test_pools_and_roots_take_part():
    pool = CandidatePool([5, 6, 7], [-1, 0, -1], [0.8, 0.9, 0.1])
    chosen = select_batch([pool, chain(0.5, 2)], np.arange(1.0, 9.0), total_nodes=3, root_tokens=[11, 12])
    assert chosen.num_nodes.tolist() == [2, 1]
    assert [int(tree.token_ids[0]) for tree in chosen.trees] == [11, 12]
    assert chosen.trees[0].parents.tolist() == [-1, 0, 1]
