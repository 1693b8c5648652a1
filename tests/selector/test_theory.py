"""Statements of docs/theory.md that no other test checks."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.search.expansion import Expansion, expand
from selector.search.kernels import BUDGET, EXACT, FIRST_DESCENT, PRICED
from selector.trellis import Trellis
from tests.selector.helpers import COST_KINDS, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)
SIZE = 6


def sums(expansion: Expansion) -> np.ndarray:
    """1 + Phi(n) for n = 0.."""
    return 1 + np.concatenate([[0.0], np.cumsum(expansion.reach)])


# --- 1. What a tree yields


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 30))
def test_expected_tokens_are_one_and_the_sum_of_reach(seed, n):
    """Against the recursion over what the target may say at every slot, whatever it says elsewhere."""
    trellis = random_trellis(np.random.default_rng(seed), 4, 3, conditional=True)
    tree, edges = expand(trellis, n), np.exp(trellis.edges_by_parent)
    columns = [0] + [
        int(np.flatnonzero(trellis.token_ids[depth - 1] == token)[0])
        for depth, token in zip(tree.depths, tree.token_ids, strict=True)
    ]

    def tokens_from(slot: int, depth: int) -> float:
        children = np.flatnonzero(tree.parents == slot) + 1
        return 1 + sum(
            edges[depth, columns[slot] if depth else 0, columns[child]] * tokens_from(int(child), depth + 1)
            for child in children
        )

    assert tokens_from(0, 0) == pytest.approx(sums(tree)[-1])


# --- 2. When first descent is enough


def test_first_descent_can_lose_on_a_concave_curve():
    """Two tokens cost twice one, all further ones nearly nothing: the first node does not pay, eight of them do."""
    cost = np.array([1.0, 2.0, *(2 + 0.01 * np.arange(1, 8))])
    chain = Trellis.from_probabilities(np.arange(8), np.full(8, 0.9))
    assert expand(chain, 8, FIRST_DESCENT, cost).num_chosen == 0
    best = expand(chain, 8, EXACT, cost)
    assert best.num_chosen == 8
    assert sums(best)[8] / cost[8] > 2.5


# --- 3. The certificate


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(COST_KINDS), st.booleans())
def test_the_bound_behind_the_certificate(seed, kind, coarse):
    """Phi(m) <= Phi(n) + (m - n) r, r the reach of the next node; and so no m > n beats the bound's best."""
    rng = np.random.default_rng(seed)
    phi = sums(expand(random_trellis(rng, 4, 3, True, coarse), 40, BUDGET))
    cost = random_cost(rng, len(phi), kind)
    for n in range(len(phi) - 1):
        later = np.arange(n + 1, len(phi))
        bound = phi[n] + (later - n) * (phi[n + 1] - phi[n])
        assert np.all(phi[later] <= bound + 1e-12)
        assert (phi[later] / cost[later]).max() <= (bound / cost[later]).max() + 1e-12


# --- 4. The price


def kinds_of_rounds(seed: int) -> tuple[list[Trellis], np.ndarray, list[np.ndarray]]:
    """Three kinds of rounds, how often each comes, and its cost curve."""
    rng = np.random.default_rng(seed)
    trellises = [random_trellis(rng, 3, 3) for _ in range(3)]
    curves = [random_cost(rng, SIZE + 1, COST_KINDS[int(rng.integers(4))]) for _ in range(3)]
    return trellises, rng.dirichlet(np.ones(3)), curves


def throughput(sizes, tokens, weights, curves) -> float:
    yielded = sum(w * each[n] for w, each, n in zip(weights, tokens, sizes, strict=True))
    return yielded / sum(w * curve[n] for w, curve, n in zip(weights, curves, sizes, strict=True))


def charged(price, trellises, curves):
    return [expand(t, SIZE, PRICED, c, price).num_chosen for t, c in zip(trellises, curves, strict=True)]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_one_price_for_all_rounds_is_the_best_there_is(seed):
    """Against every way to give each kind of round a size: the fixed point is the optimum, and it is reached from below."""
    trellises, weights, curves = kinds_of_rounds(seed)
    tokens = [sums(expand(trellis, SIZE)) for trellis in trellises]
    best = max(throughput(sizes, tokens, weights, curves) for sizes in product(*(range(len(each)) for each in tokens)))
    price, seen = 0.0, []
    for _ in range(12):
        price = throughput(charged(price, trellises, curves), tokens, weights, curves)
        seen.append(price)
    assert price == pytest.approx(best, rel=1e-12)
    assert np.all(np.diff(seen) >= -1e-12)  # Dinkelbach: never down
    gain = [max(each - best * curve[: len(each)]) for each, curve in zip(tokens, curves, strict=True)]
    assert np.dot(weights, gain) == pytest.approx(0.0, abs=1e-9)  # at the optimum tokens are worth what their seconds cost


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_each_rounds_own_ratio_never_beats_the_price(seed):
    trellises, weights, curves = kinds_of_rounds(seed)
    tokens = [sums(expand(trellis, SIZE)) for trellis in trellises]
    own = [expand(t, SIZE, EXACT, c).num_chosen for t, c in zip(trellises, curves, strict=True)]
    price = 0.0
    for _ in range(12):
        price = throughput(charged(price, trellises, curves), tokens, weights, curves)
    assert throughput(own, tokens, weights, curves) <= price + 1e-12


def test_what_the_own_ratio_gets_wrong():
    """A hopeless and a good round at 1 + .02 n seconds, equally often: the ratio spends in the first, saves in the second."""
    hopeless = Trellis.from_probabilities(np.arange(8), np.full(8, 0.2))
    good = Trellis.from_probabilities(np.arange(40), np.full(40, 0.9))
    cost = 1 + 0.02 * np.arange(41)
    curves, tokens = [cost[:9], cost], [sums(expand(hopeless, 8)), sums(expand(good, 40))]
    own = [expand(hopeless, 8, EXACT, cost).num_chosen, expand(good, 40, EXACT, cost).num_chosen]
    price = 0.0
    for _ in range(12):
        sizes = [expand(hopeless, 8, PRICED, cost, price).num_chosen, expand(good, 40, PRICED, cost, price).num_chosen]
        price = throughput(sizes, tokens, [0.5, 0.5], curves)
    assert sizes[0] < own[0] and sizes[1] > own[1]
    assert price > throughput(own, tokens, [0.5, 0.5], curves)


# --- 5. What independence costs


@settings(max_examples=60, deadline=None)
@given(seeds, st.floats(0, 1), st.sampled_from(COST_KINDS))
def test_reach_off_by_a_factor_costs_at_most_that_factor(seed, epsilon, kind):
    """Estimates between exp(-epsilon) and 1 times the true reach: size for size, and in tokens per second."""
    rng = np.random.default_rng(seed)
    true = random_trellis(rng, 3, 3, conditional=True)
    noise = rng.random(true.log_edges.shape) * epsilon / true.depth
    guessed = Trellis(true.token_ids, true.log_edges - noise)
    cost = random_cost(rng, 31, kind)

    def true_tokens(expansion: Expansion, n: int) -> float:
        column, reach = [0], [1.0]
        for i in range(n):
            depth, parent = int(expansion.depths[i]) - 1, int(expansion.parents[i])
            column.append(int(np.flatnonzero(true.token_ids[depth] == expansion.token_ids[i])[0]))
            row = column[parent] if depth else 0
            reach.append(reach[parent] * float(np.exp(true.log_edges[depth, row, column[-1]])))
        return sum(reach)

    best, order = sums(expand(true, 30)), expand(guessed, 30)
    floor = np.exp(-epsilon) - 1e-12
    for n in range(1, len(order.reach) + 1, 4):
        assert true_tokens(order, n) - 1 >= floor * (best[n] - 1)
    chosen = expand(guessed, 30, EXACT, cost)
    rate = true_tokens(chosen, chosen.num_chosen) / cost[chosen.num_chosen]
    assert rate >= floor * (best / cost[: len(best)]).max()


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 12))
def test_marginals_never_beat_path_conditional_probabilities(seed, n):
    """The same candidates with each depth's probabilities averaged over the paths that lead there, judged by the truth."""
    true = random_trellis(np.random.default_rng(seed), 3, 3, conditional=True)
    edges = np.exp(true.log_edges)
    arriving, marginals = edges[0, 0], [edges[0, 0]]
    for depth in range(1, true.depth):
        arriving = arriving @ edges[depth]
        marginals.append(arriving)
    blind = Trellis.from_probabilities(true.token_ids, np.array(marginals))
    order = expand(blind, n)
    column, reach = [0], [1.0]
    for depth, token, parent in zip(order.depths, order.token_ids, order.parents, strict=True):
        column.append(int(np.flatnonzero(true.token_ids[depth - 1] == token)[0]))
        reach.append(reach[parent] * edges[depth - 1, column[parent] if depth > 1 else 0, column[-1]])
    found = expand(true, len(order.reach))
    assert sum(reach) <= sums(found)[-1] + 1e-12


def two_state_throughput(sizes, phi, cost, after) -> float:
    """Rounds whose kind depends on the last one: `after[kind][n]` is the chance that an easy round (kind 0) follows."""
    to_easy = [after[kind][n] for kind, n in enumerate(sizes)]
    share = to_easy[1] / (1 - to_easy[0] + to_easy[1])  # stationary share of easy rounds
    return throughput(sizes, phi, [share, 1 - share], [cost, cost])


def test_rounds_that_depend_on_each_other_can_defeat_the_price():
    """Where a larger tree also makes the next round easier, the price, blind to that, leaves something: here a sixth."""
    cost = 1 + 0.3 * np.arange(4)
    phi = [1 + np.array([0, 0.8, 1.4, 1.8]), 1 + np.array([0, 0.3, 0.4, 0.45])]
    after = [[0.5, 0.5, 0.5, 0.5], [0.05, 0.6, 0.9, 0.95]]
    best = max(two_state_throughput(sizes, phi, cost, after) for sizes in product(range(4), repeat=2))
    price = 0.0
    for _ in range(20):
        sizes = [int(np.argmax(each - price * cost)) for each in phi]
        price = two_state_throughput(sizes, phi, cost, after)
    assert (sizes, price) == ([3, 0], pytest.approx(1.0756, abs=1e-4))
    assert best == pytest.approx(1.3017, abs=1e-4)


def test_every_test_that_the_page_names_exists():
    root = Path(__file__).resolve().parents[2]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (root / "docs" / "theory.md").read_text("utf-8"))
    assert len(named) > 20
    files = {path.name: path.read_text("utf-8") for path in (root / "tests").rglob("test_*.py")}
    assert [name for file, name in named if f"def {name}(" not in files.get(file, "")] == []
