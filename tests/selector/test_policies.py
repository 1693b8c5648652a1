from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector.errors import CostCurveError, PolicyError
from selector.policies import RoundInputs
from selector.pool import CandidatePool
from selector.registry import REGISTRY, parse_policy
from selector.trellis import Trellis
from tests.selector.helpers import COST_KINDS, best_sums, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)


def staircase(t):
    """Case 1: milliseconds of verifying t tokens, with 8 for the draft."""
    t = np.asarray(t)
    return 8 + np.where(t <= 8, 50 + 0.5 * (t - 1), 60.8 + 0.3 * (t - 9))


def chain_trellis(p: float, depth: int = 16) -> Trellis:
    return Trellis.from_probabilities(np.arange(depth), np.full(depth, p))


@pytest.mark.parametrize(("p", "best"), [(0.93, 16), (0.70, 7)])
def test_case_1_staircase_costs(p, best):
    cost = staircase(np.arange(1, 18)) / 1000
    tree = parse_policy("exact").select(chain_trellis(p), RoundInputs(cost, cost, None, 16))
    assert tree.num_nodes == best
    if p == 0.93:  # stopping at the first drop loses 28 %
        first = parse_policy("unimodal").select(chain_trellis(p), RoundInputs(cost, cost, None, 16))
        loss = 1 - (first.expected_tokens / first.expected_seconds) / (tree.expected_tokens / tree.expected_seconds)
        assert loss == pytest.approx(0.28, abs=0.01)


def test_case_1_a_convex_fit_loses_nine_percent():
    t = np.arange(1, 18)
    cost = CostModel.from_points(t, (staircase(t) - 8) / 1000, draft_seconds=0.008)
    table, convex = cost.round_seconds(17), cost.round_seconds(17, form="convex")
    exact = parse_policy("exact").select(chain_trellis(0.70), RoundInputs(table, convex, None, 16))
    fitted = parse_policy("exact").select(chain_trellis(0.70), RoundInputs(convex, convex, None, 16))
    assert (exact.num_nodes, fitted.num_nodes) == (7, 8)
    loss = 1 - fitted.expected_tokens / table[8] / (exact.expected_tokens / table[7])
    assert loss == pytest.approx(0.09, abs=0.005)


def test_case_2_the_root_is_counted():
    cost = staircase(np.arange(1, 18)) / 1000
    tree = parse_policy("exact").select(chain_trellis(0.70), RoundInputs(cost, cost, None, 16))
    assert (tree.num_nodes, tree.num_verify_tokens) == (7, 8)
    assert tree.expected_seconds == pytest.approx(staircase(8) / 1000)
    forgetful = parse_policy("exact").select(chain_trellis(0.70), RoundInputs(staircase(np.arange(0, 17)) / 1000, cost, None, 16))
    assert forgetful.num_nodes == 8
    loss = 1 - forgetful.expected_tokens / cost[8] / (tree.expected_tokens / cost[7])
    assert loss == pytest.approx(0.09, abs=0.005)


@pytest.mark.parametrize("name", ["unimodal", "exact", "priced"])
def test_case_5_a_flat_curve_is_reported_and_never_the_largest_budget(name):
    flat = np.full(65, 0.06)
    trellis = random_trellis(np.random.default_rng(0), 4, 3)
    tree = parse_policy(name).select(trellis, RoundInputs(flat, flat, 20.0, 64))
    assert tree.status == "degenerate-cost"
    assert tree.num_nodes == trellis.depth


@pytest.mark.parametrize("bad", [[], [0.0, 1.0], [1.0, np.nan], [1.0, np.inf], [-1.0, 2.0]])
def test_bad_curves_are_refused(bad):
    with pytest.raises(CostCurveError):
        parse_policy("exact").select(chain_trellis(0.5), RoundInputs(np.array(bad), np.array(bad), None, 1))


def test_policies_against_every_prefix_closed_tree():
    """exact and priced against brute force over all trees, on trellises small enough to list them."""
    rng = np.random.default_rng(3)
    for case in range(200):
        depth, top_k = [(2, 2), (3, 2), (2, 3), (5, 1)][case % 4]
        trellis = random_trellis(rng, depth, top_k, conditional=case % 2 == 0, coarse=case % 5 == 0)
        cost = random_cost(rng, 7, COST_KINDS[case // 4 % 4])
        price = float(rng.random() * 3)
        sums = 1 + best_sums(trellis, 6)
        for name, value in (("exact", sums / cost[: len(sums)]), ("priced", sums - price * cost[: len(sums)])):
            tree = parse_policy(name).select(trellis, RoundInputs(cost, cost, price, 6))
            seconds = cost[tree.num_nodes]
            mine = tree.expected_tokens / seconds if name == "exact" else tree.expected_tokens - price * seconds
            assert mine == pytest.approx(value.max(), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(COST_KINDS))
def test_exact_is_at_least_every_fixed_budget_on_its_own_objective(seed, kind):
    rng = np.random.default_rng(seed)
    trellis, cost = random_trellis(rng, 4, 3), random_cost(rng, 33, kind)
    exact = parse_policy("exact").select(trellis, RoundInputs(cost, cost, None, 32))
    best = exact.expected_tokens / cost[exact.num_nodes]
    for n in (1, 2, 4, 8, 16, 32):
        fixed = parse_policy(f"fixed:{n}").select(trellis, RoundInputs(cost, cost, None, 32))
        assert fixed.expected_tokens / cost[fixed.num_nodes] <= best * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_at_the_ratio_exact_finds_priced_finds_the_same_value(seed):
    """Dinkelbach: at the best ratio as the price, the best priced value is 0."""
    rng = np.random.default_rng(seed)
    trellis, cost = random_trellis(rng, 3, 3), random_cost(rng, 33, "rough")
    exact = parse_policy("exact").select(trellis, RoundInputs(cost, cost, None, 32))
    ratio = exact.expected_tokens / cost[exact.num_nodes]
    priced = parse_policy("priced").select(trellis, RoundInputs(cost, cost, ratio, 32))
    assert priced.expected_tokens - ratio * cost[priced.num_nodes] == pytest.approx(0, abs=1e-9)


def test_a_scale_of_reach_is_a_bonus():
    """argmax (1 + s Phi) / C equals argmax (1/s + Phi) / C."""
    rng = np.random.default_rng(4)
    for _ in range(100):
        trellis, cost, scale = random_trellis(rng, 3, 3), random_cost(rng, 21, "rough"), float(rng.uniform(0.3, 1.4))
        tree = parse_policy("exact").select(trellis, RoundInputs(cost, cost, None, 20, bonus=1 / scale))
        full = parse_policy("fixed:20").select(trellis, RoundInputs(cost, cost, None, 20))
        value = (1 + scale * np.concatenate([[0], np.cumsum(full.reach[1:])])) / cost[: full.num_nodes + 1]
        assert tree.num_nodes == value.argmax()


def test_statuses():
    trellis = Trellis.from_probabilities([[0, 1]] * 3, [[0.6, 0.4]] * 3)  # 14 nodes, nothing unlisted
    rising = np.linspace(1, 2, 15)
    cheap = np.linspace(1, 1.0001, 15)
    status = {
        name: parse_policy(name).select(trellis, RoundInputs(cost, cost, 1.0, limit)).status
        for name, cost, limit in [
            ("exact", rising, 14), ("unimodal", rising, 14), ("fixed:3", rising, 14),
            ("chain", rising, 14), ("plain", rising, 14),
        ]
    }  # fmt: skip
    assert status == {"exact": "optimal", "unimodal": "first-descent", "fixed:3": "budget", "chain": "budget", "plain": "plain"}
    assert parse_policy("exact").select(trellis, RoundInputs(cheap, cheap, None, 5)).status == "truncated:max_nodes"
    assert parse_policy("fixed:9").select(trellis, RoundInputs(cheap, cheap, None, 5)).status == "truncated:max_nodes"
    assert parse_policy("fixed:99").select(trellis, RoundInputs(np.linspace(1, 2, 101), rising, None, 100)).status == "exhausted"
    fewer = Trellis.from_probabilities([[1]], [[0.5]])  # all there is fits the round, which is less than was asked for
    assert parse_policy("fixed:9").select(fewer, RoundInputs(cheap, cheap, None, 1)).status == "exhausted"
    partial = Trellis.from_probabilities([[0, 1]] * 3, [[0.4, 0.3]] * 3)
    assert parse_policy("exact").select(partial, RoundInputs(cheap, cheap, None, 14)).status == "truncated:top_k"


def test_unimodal_reads_the_convex_curve_and_exact_the_table():
    table = staircase(np.arange(1, 18)) / 1000
    convex = np.linspace(0.058, 0.0712, 17)
    trellis = chain_trellis(0.93)
    assert parse_policy("unimodal").select(trellis, RoundInputs(table, convex, None, 16)).num_nodes == 16
    assert parse_policy("exact").select(trellis, RoundInputs(table, convex * 100, None, 16)).num_nodes == 16


def test_priced_without_a_price_is_exact():
    rng = np.random.default_rng(5)
    trellis, cost = random_trellis(rng, 4, 3), random_cost(rng, 33, "rough")
    trees = [parse_policy(name).select(trellis, RoundInputs(cost, cost, None, 32)) for name in ("exact", "priced")]
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()


def test_a_short_curve_lowers_max_nodes():
    assert (
        parse_policy("exact").select(chain_trellis(0.99), RoundInputs(np.linspace(1, 1.1, 4), np.ones(4), None, 16)).num_nodes
        == 3
    )


@pytest.mark.parametrize("text", ["fixed", "fixed:0", "fixed:x", "fixed:-1", "exact:3", "best", "", "chain:", "plain:1"])
def test_unknown_policies_are_usage_errors(text):
    with pytest.raises(PolicyError):
        parse_policy(text)


def test_names_survive_parsing():
    for name in ("plain", "chain", "chain:3", "fixed:8", "unimodal", "exact", "priced"):
        assert parse_policy(name).name == name
    assert {name.partition(":")[0] for name in REGISTRY} == {
        "plain",
        "chain",
        "fixed",
        "unimodal",
        "exact",
        "priced",
        "taps",
        "smart",
    }
    assert [parse_policy(name).drafts for name in ("plain", "chain", "exact")] == [False, True, True]


def as_pool(trellis: Trellis) -> CandidatePool:
    """Every node of a trellis, one by one."""
    edges = np.exp(trellis.edges_by_parent)
    tokens, parents, probabilities, frontier = [], [], [], [(-1, 0)]
    for depth in range(trellis.depth):
        following = []
        for parent, column in frontier:
            row = edges[depth, column if edges.shape[1] > 1 and depth > 0 else 0]
            for child in range(trellis.top_k):
                following.append((len(tokens), child))
                tokens.append(trellis.token_ids[depth, child])
                parents.append(parent)
                probabilities.append(row[child])
        frontier = following
    return CandidatePool(tokens, parents, probabilities)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(["chain", "chain:2", "fixed:5", "unimodal", "exact", "priced"]))
def test_a_pool_of_all_nodes_gives_the_tree_of_its_trellis(seed, name):
    rng = np.random.default_rng(seed)
    trellis, cost = random_trellis(rng, 3, 3, conditional=True), random_cost(rng, 41, "staircase")
    trees = [parse_policy(name).select(source, RoundInputs(cost, cost, 1.5, 39)) for source in (trellis, as_pool(trellis))]
    np.testing.assert_array_equal(trees[0].token_ids, trees[1].token_ids)
    np.testing.assert_array_equal(trees[0].parents, trees[1].parents)
    np.testing.assert_allclose(trees[0].reach, trees[1].reach)
