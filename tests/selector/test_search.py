from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.search.expansion import expand, expand_chain, order_all
from selector.search.kernels import (
    BUDGET,
    END_CERTIFIED,
    END_EXHAUSTED,
    END_MAX_NODES,
    EXACT,
    FIRST_DESCENT,
    NEVER,
    PRICED,
    convex_minorant,
)
from selector.search.reference import best_size, expand_in_python
from selector.trellis import Trellis
from tests.selector.helpers import COST_KINDS, all_nodes, best_sums, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)


def test_the_best_tree_of_every_size_by_brute_force():
    rng = np.random.default_rng(0)
    for case in range(150):
        depth, top_k = [(1, 4), (2, 2), (3, 2), (2, 3), (4, 1)][case % 5]
        trellis = random_trellis(rng, depth, top_k, conditional=case % 2 == 0, coarse=case % 3 == 0)
        sums = best_sums(trellis, 6)
        expansion = expand(trellis, 6)
        found = np.concatenate([[0.0], np.cumsum(expansion.reach)])
        np.testing.assert_allclose(found[: len(sums)], sums, atol=1e-12)


def test_two_thousand_random_searches_equal_the_plain_python_ones():
    rng = np.random.default_rng(1)
    for case in range(2000):
        trellis = random_trellis(rng, int(rng.integers(1, 6)), int(rng.integers(1, 5)), bool(case % 2), case % 3 == 0)
        ours, reference = expand(trellis, 25), expand_in_python(trellis, 25)
        np.testing.assert_array_equal(ours.depths, reference.depths)
        np.testing.assert_array_equal(ours.token_ids, reference.token_ids)
        np.testing.assert_array_equal(ours.parents, reference.parents)
        np.testing.assert_allclose(ours.reach, reference.reach, rtol=1e-12)
        assert ours.end == reference.end


@settings(max_examples=100, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_order_is_by_reach_then_depth_then_token_and_prefix_closed(seed, conditional, coarse):
    trellis = random_trellis(np.random.default_rng(seed), 4, 3, conditional, coarse)
    expansion = expand(trellis, 40)
    keys = list(zip(-expansion.reach, expansion.depths, expansion.token_ids, expansion.parents, strict=True))
    assert keys == sorted(keys)
    assert all(parent <= i for i, parent in enumerate(expansion.parents))
    depths = np.concatenate([[0], expansion.depths])
    assert np.all(depths[1:] == depths[expansion.parents] + 1)


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_equal_columns_make_both_forms_of_a_trellis_agree(seed):
    trellis = random_trellis(np.random.default_rng(seed), 4, 3)
    wide = Trellis(trellis.token_ids, np.repeat(trellis.log_edges[:, None, :], 3, axis=1))
    for narrow, full in zip(expand(trellis, 30)[:4], expand(wide, 30)[:4], strict=True):
        np.testing.assert_array_equal(narrow, full)


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_permuting_columns_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    trellis = random_trellis(rng, 3, 4)
    order = np.array([rng.permutation(4) for _ in range(3)])
    shuffled = Trellis(np.take_along_axis(trellis.token_ids, order, 1), np.take_along_axis(trellis.log_edges, order, 1))
    for plain, other in zip(expand(trellis, 20)[:4], expand(shuffled, 20)[:4], strict=True):
        np.testing.assert_array_equal(plain, other)


@pytest.mark.parametrize("kind", COST_KINDS)
def test_stopping_early_never_changes_the_choice(kind):
    """The certificate against looking at every size, on 4 x 1,000 random cases, most of them not convex."""
    rng = np.random.default_rng(COST_KINDS.index(kind))
    certified = 0
    for case in range(1000):
        trellis = random_trellis(rng, int(rng.integers(1, 6)), int(rng.integers(1, 5)), bool(case % 2), case % 3 == 0)
        cost = random_cost(rng, 41, kind)
        price = float(rng.random() * 3)
        full = expand(trellis, 40)
        for rule, used in ((EXACT, None), (PRICED, price)):
            found = expand(trellis, 40, rule, cost, price)
            certified += found.end == END_CERTIFIED
            total = 1 + np.concatenate([[0.0], np.cumsum(full.reach)])
            value = total / cost[: len(total)] if used is None else total - used * cost[: len(total)]
            assert value[found.num_chosen] == pytest.approx(value.max(), rel=1e-12, abs=1e-12)
            assert found.num_chosen == best_size(full.reach, cost, used)
    assert certified > 500  # the search really stops early


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_first_descent_equals_exact_on_convex_costs(seed):
    rng = np.random.default_rng(seed)
    trellis = random_trellis(rng, 4, 3, conditional=True)
    cost = random_cost(rng, 61, "convex")
    assert expand(trellis, 60, FIRST_DESCENT, cost).num_chosen == expand(trellis, 60, EXACT, cost).num_chosen


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_minorant_is_the_largest_convex_function_below(values):
    cost = np.array(values)
    minorant = convex_minorant(cost)
    assert np.all(minorant <= cost + 1e-9)
    assert np.all(np.diff(minorant, 2) >= -1e-9)
    chords = [
        min(
            cost[a] + (cost[b] - cost[a]) * ((i - a) / (b - a)) if b > a else cost[i]
            for a in range(i + 1)
            for b in range(i, len(cost))
        )
        for i in range(len(cost))
    ]
    np.testing.assert_allclose(minorant, chords, atol=1e-9)


def test_truncation_by_k_is_told_apart_from_a_complete_vocabulary():
    complete = Trellis.from_probabilities([[0, 1]] * 3, [[0.6, 0.4]] * 3)
    assert not expand(complete, 14).truncated_by_k
    listed = Trellis.from_probabilities([[0, 1]] * 3, [[0.4, 0.3]] * 3)
    assert expand(listed, 14).truncated_by_k
    assert not expand(listed, 1).truncated_by_k


@pytest.mark.parametrize("rule", [BUDGET, EXACT])
def test_a_row_with_fewer_candidates_than_others_runs_out_where_its_own_end(rule):
    """Row 2 lists one of .4; after it an unlisted sibling of up to .4 may come, which is more than the .03 taken last."""
    trellis = Trellis.from_probabilities([[0, 1, 2], [3, -1, -1]], [[0.9, 0.06, 0.03], [0.4, 0.0, 0.0]])
    cost = np.linspace(1, 1.001, 6)
    assert not expand(trellis, 2, rule, cost[:3]).truncated_by_k
    assert expand(trellis, 4, rule, cost[:5]).truncated_by_k
    whole = Trellis.from_probabilities([[0, 1, 2], [3, -1, -1]], [[0.9, 0.07, 0.03], [1.0, 0.0, 0.0]])
    assert not expand(whole, 5, rule, cost).truncated_by_k


def test_a_first_descent_looks_at_what_was_not_listed():
    """A half beside the only candidate is worth its time; at a dearer second node it is not, whatever it holds."""
    trellis = Trellis.from_probabilities([[0]], [[0.5]])
    for second, truncated in [(1.2, True), (1.9, False)]:
        cost = np.array([1.0, 1.1, second])
        assert expand(trellis, 2, FIRST_DESCENT, cost).truncated_by_k is truncated
    deeper = Trellis.from_probabilities([[0], [1]], [[0.5], [0.1]])
    assert expand(deeper, 2, FIRST_DESCENT, np.array([1.0, 1.1, 1.2])).truncated_by_k
    assert not expand(deeper, 2, FIRST_DESCENT, np.array([1.0, 1.1, 1.9])).truncated_by_k


def test_chain_follows_the_most_probable_child():
    trellis = Trellis.from_probabilities(
        [[5, 6], [7, 8], [9, 10]],
        [[[0.4, 0.6], [0, 0]], [[0.9, 0.1], [0.2, 0.7]], [[0.5, 0.5], [0.5, 0.5]]],
    )
    chain = expand_chain(trellis, 3)
    assert chain.token_ids.tolist() == [6, 8, 9]  # the last is a tie: lower id
    assert chain.parents.tolist() == [0, 1, 2]
    np.testing.assert_allclose(chain.reach, [0.6, 0.42, 0.21])
    cut = expand_chain(trellis, 2)
    assert (cut.num_chosen, cut.end) == (2, END_MAX_NODES)


def test_zero_probability_never_enters():
    trellis = Trellis.from_probabilities([[1, 2], [3, 4]], [[1.0, 0.0], [0.0, 0.5]])
    assert expand(trellis, 10).token_ids.tolist() == [1, 4]
    assert len(all_nodes(trellis)) == 2


def test_empty_trellis_and_empty_budget():
    empty = Trellis(np.zeros((0, 1), np.int64), np.zeros((0, 1)))
    assert expand(empty, 5, EXACT, np.ones(6)).num_chosen == 0
    assert expand(random_trellis(np.random.default_rng(0), 2, 2), 0, EXACT, np.ones(1)).num_chosen == 0
    assert expand_chain(empty, 5).num_chosen == 0


@pytest.mark.parametrize("form", ["3-D", "P = 1", "P = K"])
def test_all_anchors_at_once_equal_the_searches_one_by_one(form):
    rng = np.random.default_rng(3)
    for coarse in (False, True):
        trellises = [random_trellis(rng, 4, 3, form == "P = K", coarse) for _ in range(40)]
        ids = np.stack([each.token_ids for each in trellises])
        edges = np.stack([each.edges_by_parent if form != "3-D" else each.log_edges for each in trellises])
        path = np.where(rng.random((40, 4)) < 0.8, np.take_along_axis(ids, rng.integers(0, 3, (40, 4, 1)), 2)[:, :, 0], 99)
        phi, deepest, sizes, ranks = order_all(edges, ids, path, 25)
        for a, trellis in enumerate(trellises):
            order = expand(trellis, 25)
            n = len(order.reach)
            assert sizes[a] == n
            np.testing.assert_allclose(phi[a], np.concatenate([[0], np.cumsum(order.reach), np.full(25 - n, order.reach.sum())]))
            levels = np.maximum.accumulate(np.concatenate([[0], order.depths, np.zeros(25 - n, int)]))
            np.testing.assert_array_equal(deepest[a], levels)
            slot, expected = 0, np.full(4, NEVER)
            for d, token in enumerate(path[a]):
                found = np.flatnonzero((order.parents == slot) & (order.token_ids == token))
                if not found.size:
                    break
                expected[d], slot = found[0], found[0] + 1
            np.testing.assert_array_equal(ranks[a], expected)


def test_edges_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="depth, K, K"):
        order_all(np.zeros((2, 3, 2, 4)), np.zeros((2, 3, 4), np.int64), np.zeros((2, 3), np.int64), 5)


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 200), st.booleans())
def test_ranked_rows_are_searched_by_level_in_the_same_order(seed, max_nodes, coarse):
    """Rows that fall, ties by lower id, as `Trellis.from_logits` lists them: another algorithm, the order of the plain one."""
    rng = np.random.default_rng(seed)
    trellis = random_trellis(rng, int(rng.integers(1, 7)), int(rng.integers(1, 9)), coarse=coarse)
    order = np.lexsort((trellis.token_ids, -trellis.log_edges))
    ranked = Trellis(np.take_along_axis(trellis.token_ids, order, 1), np.take_along_axis(trellis.log_edges, order, 1))
    ours, reference, by_heap = expand(ranked, max_nodes), expand_in_python(ranked, max_nodes), expand(trellis, max_nodes)
    np.testing.assert_array_equal(ours.depths, reference.depths)
    np.testing.assert_array_equal(ours.token_ids, reference.token_ids)
    np.testing.assert_array_equal(ours.parents, reference.parents)
    np.testing.assert_allclose(ours.reach, reference.reach, rtol=1e-12)
    for fast, slow in zip(ours, by_heap, strict=True):  # truncation and end included
        np.testing.assert_array_equal(fast, slow)


def test_a_row_of_nan_or_nothing_ends_a_ranked_trellis():
    edges = np.log([[0.5, 0.4], [0.6, 0.1], [0.5, 0.2]])
    for nothing in (np.nan, -np.inf):
        edges[1] = nothing
        expansion = expand(Trellis(np.array([[1, 2], [3, 4], [5, 6]]), edges), 9)
        assert (expansion.token_ids.tolist(), expansion.depths.tolist(), expansion.end) == ([1, 2], [1, 1], END_EXHAUSTED)
