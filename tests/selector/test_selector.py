from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from costmodel import CostModel
from profiles.errors import UsageError
from selector import CandidatePool, Plan, TreeSelector, Trellis
from selector.adapters import ddtree
from selector.calibration import Calibration
from tests.selector.helpers import random_trellis

POINTS = [1, 2, 4, 8, 9, 16, 32, 64]
SECONDS = [0.042, 0.050, 0.053, 0.059, 0.065, 0.076, 0.094, 0.14]


@pytest.fixture
def cost() -> CostModel:
    return CostModel.from_points(POINTS, SECONDS, draft_seconds=0.010)


def logits(seed: int = 0, depth: int = 7, vocab: int = 500) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((depth, vocab)) * 2
    x[:, 7] += 9
    return x.astype(np.float32)


def test_the_three_lines_of_the_readme(cost):
    selector = TreeSelector(cost, policy="priced")
    tree = selector.select(logits(), context_tokens=812, root_token=3)
    assert tree.token_ids[0] == 3
    assert tree.parents[0] == -1
    assert tree.num_nodes > 0
    assert tree.position_ids(812)[0] == 812
    assert tree.attention_mask().shape == (tree.num_verify_tokens,) * 2


def test_max_nodes_never_exceed_what_was_measured(cost):
    assert TreeSelector(cost, max_nodes=256).max_nodes == 63
    assert TreeSelector(cost, max_nodes=5).max_nodes == 5


def test_case_6_a_nan_row_gives_the_root_and_a_count(cost):
    x = logits()
    x[0, 5] = np.nan
    selector = TreeSelector(cost, policy="fixed:16")
    tree = selector.select(x, 10)
    assert (tree.num_nodes, selector.stats.nan_rows, selector.stats.root_only) == (0, 1, 1)


def test_case_8_a_small_vocabulary(cost):
    tree = TreeSelector(cost, policy="fixed:64", top_k=64, max_nodes=64).select(logits(vocab=8), 10)
    assert tree.num_nodes == 63
    assert np.bincount(tree.parents[1:]).max() <= 8


def test_case_5_a_flat_curve_warns_once_and_is_counted():
    selector = TreeSelector(CostModel.from_points([1, 64], [0.06, 0.06]), policy="exact")
    with pytest.warns(UserWarning, match="does not grow"):
        tree = selector.select(logits(), 10)
    assert (tree.status, tree.num_nodes) == ("degenerate-cost", 7)
    selector.select(logits(), 10)
    assert selector.stats.degenerate_cost == 2


def test_warming_up_leaves_no_trace(cost):
    selector = TreeSelector(cost, policy="exact")
    selector.warm_up()
    assert selector.stats.rounds == 0


def test_plain_never_drafts(cost):
    selector = TreeSelector(cost, policy="plain")
    assert not selector.drafts and not selector.drafts_next(10)
    assert selector.select(logits(), 10).num_nodes == 0


def test_priced_starts_as_exact_and_learns_a_price(cost):
    priced, exact = TreeSelector(cost, policy="priced"), TreeSelector(cost, policy="exact")
    assert priced.price is None
    first = priced.select(logits(), 10)
    np.testing.assert_array_equal(first.token_ids, exact.select(logits(), 10).token_ids)
    for _ in range(50):
        priced.observe(first, 2, 0.1)
    assert priced.price == pytest.approx(30.0)


def test_what_cannot_have_happened_is_refused_and_not_learned(cost):
    selector = TreeSelector(cost, policy="priced")
    tree = selector.select(logits(), 10)
    for accepted in (-1, tree.num_nodes + 1):
        with pytest.raises(UsageError, match=f"allowed are 0 to {tree.num_nodes}, got {accepted}"):
            selector.observe(tree, accepted, 0.1)
    for seconds in (0.0, -0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="round_seconds must be a positive number"):
            selector.observe(tree, 1, seconds)
        with pytest.raises(UsageError, match="round_seconds must be a positive number"):
            selector.observe_plain(seconds)
    assert selector.stats.plain_steps == 0 and selector.reach_scale == 1.0
    with pytest.raises(UsageError, match="max_nodes must not be negative"):
        TreeSelector(cost, max_nodes=-1)
    with pytest.raises(UsageError, match="context_tokens must not be negative"):
        selector.select(logits(), -1)


def test_a_tree_of_unknown_reach_teaches_the_price_alone(cost):
    selector = TreeSelector(cost, policy="priced")
    tree = selector.select(logits(), 10)
    foreign = ddtree.to_tree(ddtree.from_tree(tree))
    for _ in range(20):
        selector.observe(foreign, 1, 0.1)
    assert (selector.reach_scale, selector.price) == (1.0, pytest.approx(20.0))
    assert selector.select(logits(), 10).num_nodes > 0


def test_a_high_price_shrinks_trees(cost):
    sizes = [TreeSelector(cost, plan=Plan("priced", price=price)).select(logits(), 10).num_nodes for price in (5, 40, 200)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_reach_scale_follows_what_is_accepted(cost):
    selector = TreeSelector(cost, policy="exact")
    trellis = Trellis.from_probabilities(np.arange(12), np.full(12, 0.85))
    tree = selector.select_trellis(trellis, 10)
    for _ in range(300):
        selector.observe(tree, 0, 0.1)
    assert selector.reach_scale < 0.4
    assert selector.select_trellis(trellis, 10).num_nodes < tree.num_nodes
    assert TreeSelector(cost, policy="exact", adapt=False).select_trellis(trellis, 10).num_nodes == tree.num_nodes


def test_a_plan_sets_the_defaults_and_arguments_override_it(cost):
    plan = Plan("fixed:4", top_k=3, max_nodes=20)
    selector = TreeSelector(cost, plan=plan)
    assert (selector.policy.name, selector.top_k, selector.max_nodes) == ("fixed:4", 3, 20)
    selector = TreeSelector(cost, policy="exact", max_nodes=8, top_k=2, plan=plan)
    assert (selector.policy.name, selector.top_k, selector.max_nodes) == ("exact", 2, 8)


def test_calibration_is_applied_before_the_search(cost):
    plan = Plan("exact", calibration=Calibration((1.0,), (-1.0,)))
    with_plan, without = TreeSelector(cost, plan=plan), TreeSelector(cost, policy="exact")
    trellis = random_trellis(np.random.default_rng(0), 5, 4)
    assert with_plan.select_trellis(trellis, 10).num_nodes < without.select_trellis(trellis, 10).num_nodes


def test_pools_are_selected_from(cost):
    pool = CandidatePool([1, 2, 3], [-1, 0, 0], [0.9, 0.6, 0.3])
    tree = TreeSelector(cost, policy="fixed:2").select_trellis(pool, 10)
    assert tree.token_ids.tolist() == [-1, 1, 2]


def simulate(
    selector: TreeSelector, tokens_per_draft: float, draft_seconds: float, plain_seconds: float, num_tokens: int
) -> float:
    """Seconds of decoding where drafting rounds always yield the same; returns tokens per second."""
    rng = np.random.default_rng(0)
    tree = selector.select_trellis(Trellis.from_probabilities(np.arange(20), np.full(20, 0.9)), 10)
    tokens = seconds = 0.0
    while tokens < num_tokens:
        if selector.drafts_next(10):
            accepted = min(int(rng.poisson(tokens_per_draft - 1)), tree.num_nodes)
            selector.observe(tree, accepted, draft_seconds)
            tokens, seconds = tokens + accepted + 1, seconds + draft_seconds
        else:
            selector.observe_plain(plain_seconds)
            tokens, seconds = tokens + 1, seconds + plain_seconds
    return tokens / seconds


def test_drafting_pauses_where_it_does_not_pay(cost):
    plain = 1 / 0.042
    slow = TreeSelector(cost, policy="exact")
    assert simulate(slow, 1.3, 0.075, 0.042, 4000) > 0.97 * plain
    assert slow.stats.pauses >= 1


def test_drafting_goes_on_where_it_pays(cost):
    fast = TreeSelector(cost, policy="exact")
    rate = simulate(fast, 2.6, 0.075, 0.042, 4000)
    assert rate > 0.97 * 2.6 / 0.075
    assert fast.stats.pauses == 0


def test_drafting_comes_back_when_it_pays_again(cost):
    selector = TreeSelector(cost, policy="exact")
    simulate(selector, 1.0, 0.075, 0.042, 500)
    assert selector.stats.pauses >= 1
    assert simulate(selector, 3.0, 0.075, 0.042, 4000) > 0.9 * 3.0 / 0.075


def test_a_profile_that_promises_too_slow_plain_steps_is_found_out():
    """The profile says plain takes 42 ms, the machine does it in 25: measured steps decide."""
    selector = TreeSelector(CostModel.from_points(POINTS, SECONDS, draft_seconds=0.010), policy="exact")
    simulate(selector, 1.8, 0.075, 0.025, 500)
    assert selector.stats.pauses >= 1


def test_selecting_is_cheap(cost):
    """From 7 x 49,152 logits to the tree; 0.25 ms on a quiet processor, 4 ms allowed: a regression of an order fails."""
    selector, x = TreeSelector(cost, policy="exact"), logits(vocab=49152)
    selector.select(x, 10)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        selector.select(x, 10)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.004


def test_importing_the_selector_imports_no_torch():
    code = "import sys, selector, selector.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
