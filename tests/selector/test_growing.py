"""A small top-k that grows where it was too small: selection equals a search over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector import Plan, TreeSelector
from selector.calibration import Calibration
from tests.selector.fake_scorers import ArbitraryScorer
from tests.selector.helpers import random_cost

POLICIES = ("fixed:5", "fixed:40", "exact", "priced", "unimodal", "smart", "smart:60", "chain")
COSTS = {
    "cheap": CostModel.from_points([1, 2, 8, 33, 64], [0.042, 0.0421, 0.043, 0.045, 0.048], draft_seconds=0.010),
    "cliff": CostModel.from_points([1, 2, 4, 8, 9, 16, 32, 64], [0.042, 0.050, 0.053, 0.059, 0.065, 0.076, 0.094, 0.14]),
    "flat": CostModel.from_points([1, 64], [0.06, 0.06]),
}
FLAT_WARNING = pytest.mark.filterwarnings("ignore:the cost curve does not grow")


def random_logits(seed: int, depth: int, vocab: int, spread: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((depth, vocab)) * spread).astype(np.float32)


def make(name: str, cost: str, top_k: int) -> TreeSelector:
    return TreeSelector(COSTS[cost], plan=Plan(name, price=30.0, max_nodes=48, top_k=top_k))


@FLAT_WARNING
@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(POLICIES), st.sampled_from(sorted(COSTS)), st.integers(1, 5),
    st.sampled_from([0.3, 1.0, 3.0]), st.integers(1, 5),
)  # fmt: skip
def test_selection_equals_a_search_over_the_whole_vocabulary(seed, name, cost, top_k, spread, depth):
    logits = random_logits(seed, depth, 40, spread)
    found = make(name, cost, top_k).select(logits, 10)
    whole = make(name, cost, 40).select(logits, 10)
    assert found.num_nodes == whole.num_nodes
    np.testing.assert_array_equal(found.token_ids, whole.token_ids)
    np.testing.assert_array_equal(found.parents, whole.parents)
    np.testing.assert_allclose(found.reach, whole.reach)


@dataclass(frozen=True)
class Curve:
    """A round's seconds as they are, with nothing fitted."""

    seconds: np.ndarray

    @property
    def max_verify_tokens(self) -> int:
        return len(self.seconds)

    def round_seconds(self, max_verify_tokens, context_tokens=0, num_requests=1, form="table"):
        return self.seconds[:max_verify_tokens].copy()

    def plain_seconds(self, context_tokens=0, num_requests=1):
        return float(self.seconds[0])


def on_curve(name: str, seconds: np.ndarray, top_k: int, price: float | None = None) -> TreeSelector:
    plan = Plan(name, price=price, max_nodes=len(seconds) - 1, top_k=top_k)
    return TreeSelector(Curve(seconds), plan=plan, adapt=False)  # type: ignore[arg-type]


def test_a_row_that_was_not_listed_further_is_still_watched():
    """Listing row 1 alone further leaves row 2 with one candidate of .48: the .27 and .24 beside it are worth their time."""
    logits = np.log([[0.96, 0.02, 0.01, 0.01], [0.24, 0.48, 0.01, 0.27]])
    seconds = np.array([1, 1.1, 1.4, 1.42, 1.44, 1.46, 1.56, 1.86, 1.88])
    tree = on_curve("exact", seconds, top_k=1).select(logits, 0)
    assert (tree.num_nodes, tree.status) == (4, "optimal")
    assert tree.expected_tokens / seconds[4] == pytest.approx(2.0211, abs=1e-4)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["convex", "staircase", "concave"]), st.integers(1, 4),
    st.sampled_from([0.1, 0.3, 1.0]), st.sampled_from([4, 6, 12]),
    st.sampled_from(["exact", "priced", "unimodal", "smart:60", "fixed:7"]),
)  # fmt: skip
def test_no_listing_makes_a_tree_worth_less_on_any_curve(seed, kind, top_k, evenness, vocab, name):
    rng = np.random.default_rng(seed)
    logits = np.log(rng.dirichlet(np.full(vocab, evenness), rng.integers(1, 6)) + 1e-9)
    seconds = random_cost(rng, int(rng.integers(3, 40)), kind)
    price = float(1.2 / seconds[0])
    found, whole = (on_curve(name, seconds, k, price).select(logits, 0) for k in (top_k, vocab))

    def value(tree):
        spent = seconds[tree.num_nodes]
        return tree.expected_tokens - price * spent if name == "priced" else tree.expected_tokens / spent

    # A share of a millionth beside the listed candidates counts as rounding, for every parent in the tree
    assert value(found) == pytest.approx(value(whole), abs=1e-5 * max(1, 1 / seconds[0]))
    assert found.status != "truncated:top_k"


def test_growth_is_counted_and_seldom_needed():
    logits = random_logits(0, 5, 400, 4.0)
    logits[:, 7] += 20
    sure = make("exact", "cliff", 16)
    sure.select(logits, 10)
    assert (sure.stats.grown, sure.stats.truncated) == (0, 0)
    unsure = make("fixed:40", "cheap", 2)
    assert unsure.select(random_logits(0, 5, 400, 0.1), 10).status == "budget"
    assert (unsure.stats.grown, unsure.stats.truncated, unsure.stats.rounds) == (1, 0, 1)


def test_a_calibration_or_a_scorer_is_about_the_listed_candidates():
    logits = random_logits(0, 4, 100, 0.1)
    calibrated = TreeSelector(COSTS["cheap"], plan=Plan("fixed:30", calibration=Calibration((0.8,), (-0.1,)), top_k=3))
    scored = TreeSelector(COSTS["cheap"], policy="fixed:30", top_k=3, scorer=ArbitraryScorer())
    for selector in (calibrated, scored):
        tree = selector.select(logits, 10, root_token=1)
        assert selector.stats.grown == 0
        assert len(np.unique(tree.token_ids[1:][tree.depths[1:] == 1])) <= 3


def test_rows_with_nan_end_the_tree_as_before():
    logits = random_logits(1, 4, 60, 0.2)
    logits[2, 3] = np.nan
    found, whole = (make("fixed:40", "cheap", k).select(logits, 10) for k in (2, 60))
    assert found.max_depth <= 2
    np.testing.assert_array_equal(found.token_ids, whole.token_ids)
