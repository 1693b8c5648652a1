from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.device import DeviceTrellis, search_on_device
from decoder.device.candidates import top_k_by_id, trellis_from_logits
from decoder.device.order import expand_on_device
from decoder.device.trees import build_trees, choose_sizes
from selector.errors import PolicyError
from selector.search.expansion import expand
from selector.search.kernels import BUDGET, EXACT, FIRST_DESCENT, PRICED
from selector.tree import DraftTree
from selector.trellis import Trellis
from tests.decoder.helpers import assert_same_tree
from tests.selector.helpers import COST_KINDS, random_cost, random_trellis

seeds = st.integers(0, 2**32 - 1)

def stacked(trellises: list[Trellis]) -> DeviceTrellis:
    return DeviceTrellis(
        torch.from_numpy(np.stack([each.token_ids for each in trellises])),
        torch.from_numpy(np.stack([each.log_edges for each in trellises])),
    )


def random_batch(seed: int, conditional: bool, coarse: bool, requests: int = 3) -> list[Trellis]:
    rng = np.random.default_rng(seed)
    depth, top_k = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    return [random_trellis(rng, depth, top_k, conditional, coarse) for _ in range(requests)]


def test_worked_example():
    logits = torch.log(torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]]))
    trees = search_on_device(logits, 4, top_k=3, root_tokens=torch.tensor([9]))
    assert trees.token_ids.tolist() == [[9, 0, 1, 1, 1]]  # reaches .6, .42 (0 then 1), .3 (1), .21 (1 then 1)
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3]]
    assert trees.depths.tolist() == [[0, 1, 2, 1, 2]]
    np.testing.assert_allclose(trees.reach[0], [1, 0.6, 0.42, 0.3, 0.21], rtol=1e-6)
    assert trees.attention_mask[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    assert trees.position_ids(torch.tensor([50])).tolist() == [[50, 51, 52, 51, 52]]
    walked, accepted = trees.walk(torch.tensor([[0, 1, 7, 1, 7]]), 2)
    assert (walked.tolist(), accepted.tolist()) == ([[0, 1, 2]], [2])


@settings(max_examples=120, deadline=None)
@given(seeds, st.booleans(), st.booleans(), st.integers(1, 40))
def test_the_order_equals_the_compiled_search_ties_included(seed, conditional, coarse, max_nodes):
    trellises = random_batch(seed, conditional, coarse)
    order = expand_on_device(stacked(trellises), max_nodes)
    for r, trellis in enumerate(trellises):
        expected = expand(trellis, max_nodes)
        n = len(expected.reach)
        assert order.sizes[r] == n
        np.testing.assert_array_equal(order.token_ids[r, :n], expected.token_ids)
        np.testing.assert_array_equal(order.parents[r, :n], expected.parents)
        np.testing.assert_array_equal(order.depths[r, :n], expected.depths)
        np.testing.assert_allclose(order.log_reach[r, :n].exp(), expected.reach, rtol=1e-12)
        assert torch.isneginf(order.log_reach[r, n:]).all()


@settings(max_examples=80, deadline=None)
@given(seeds, st.booleans(), st.sampled_from(COST_KINDS), st.sampled_from([EXACT, PRICED, FIRST_DESCENT]))
def test_sizes_equal_the_compiled_search(seed, conditional, kind, rule):
    rng = np.random.default_rng(seed)
    trellises = random_batch(seed, conditional, coarse=False)
    curve, price = random_cost(rng, 31, kind), float(rng.random() * 3)
    order = expand_on_device(stacked(trellises), 30)
    sizes = choose_sizes(order, rule, torch.from_numpy(curve), price, 1.25)
    trees = build_trees(order, sizes, trellises[0].depth).to_trees()
    for trellis, tree in zip(trellises, trees, strict=True):
        expected = DraftTree.from_expansion(expand(trellis, 30, rule, curve, price, 1.25), "optimal")
        assert_same_tree(tree, expected)


@settings(max_examples=40, deadline=None, derandomize=True)  # the two normalisers differ by 1e-6: near ties could part
@given(seeds, st.integers(1, 40), st.integers(1, 12))
def test_trees_from_logits_equal_those_of_the_selector(seed, max_nodes, top_k):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((2, 4, 50)) * 3).astype(np.float32)
    found = search_on_device(torch.from_numpy(logits), max_nodes, top_k=top_k)
    for r, tree in enumerate(found.to_trees()):
        expected = DraftTree.from_expansion(expand(Trellis.from_logits(logits[r], top_k), max_nodes), "budget")
        assert_same_tree(tree, expected)
        t = tree.num_verify_tokens
        np.testing.assert_array_equal(found.attention_mask[r, :t, :t], expected.attention_mask())


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 20), st.sampled_from([torch.float32, torch.bfloat16]))
def test_candidates_equal_those_of_the_selector_ties_and_infinities_included(seed, top_k, dtype):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (2, 3, 30)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[logits == 0] *= rng.choice([-1.0, 1.0])  # zeros of either sign
    if seed % 3 == 0:
        logits[rng.integers(2), rng.integers(3), rng.integers(30)] = [np.nan, np.inf, -np.inf][seed // 3 % 3]
    if seed % 5 == 0:
        logits[0, 1] = -np.inf
    trellis = trellis_from_logits(torch.from_numpy(logits).to(dtype), top_k)
    for r in range(2):
        expected = Trellis.from_logits(logits[r], top_k)
        depth = expected.depth
        np.testing.assert_array_equal(trellis.token_ids[r, :depth], expected.token_ids)
        np.testing.assert_allclose(trellis.log_edges[r, :depth], expected.log_edges, atol=2e-6)
        assert torch.isneginf(trellis.log_edges[r, depth:]).all() and (trellis.token_ids[r, depth:] == -1).all()


def test_large_rows_are_ranked_in_chunks(monkeypatch):
    monkeypatch.setattr("decoder.device.candidates.MAX_CHUNK_BYTES", 8 * 100)
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
    values, ids = top_k_by_id(logits, 7)
    assert torch.equal(values, logits.topk(7).values) and torch.equal(logits.gather(1, ids), values)


def test_padding_is_seen_by_no_node_and_never_accepted():
    logits = torch.full((1, 1, 6), -torch.inf)
    logits[0, 0, 2:4] = 0.0
    trees = search_on_device(logits, 5, top_k=4)
    assert trees.num_nodes.tolist() == [2]
    assert trees.token_ids.tolist() == [[-1, 2, 3, 0, 0, 0]]
    assert not trees.attention_mask[0, :3, 3:].any() and trees.attention_mask[0].diagonal().all()
    walked, accepted = trees.walk(torch.zeros(1, 6, dtype=torch.int64), 1)
    assert (walked.tolist(), accepted.tolist()) == ([[0, -1]], [0])
    empty = search_on_device(torch.zeros(2, 0, 6), 3)
    assert empty.num_nodes.tolist() == [0, 0] and empty.attention_mask.shape == (2, 4, 4)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_walking_equals_the_trees_own_walk(seed):
    rng = np.random.default_rng(seed)
    trees = search_on_device(torch.from_numpy(rng.standard_normal((3, 4, 4)).astype(np.float32) * 2), 20, top_k=4)
    target = rng.integers(0, 4, (3, 21))
    walked, accepted = trees.walk(torch.from_numpy(target), 4)
    for r, tree in enumerate(trees.to_trees()):
        path = tree.walk(target[r, : tree.num_verify_tokens]).tolist()
        assert walked[r].tolist() == path + [-1] * (5 - len(path))
        assert accepted[r] == len(path) - 1


def test_a_used_up_last_rank_is_told():
    logits = torch.zeros(2, 2, 40)
    logits[1, :, 5] = 20.0
    assert search_on_device(logits, 4, top_k=4).last_rank_used.tolist() == [True, False]
    assert search_on_device(logits, 4, top_k=40).last_rank_used.tolist() == [False, False]


@pytest.mark.parametrize("rule", [EXACT, PRICED, FIRST_DESCENT])
def test_seconds_that_are_none_never_win(rule):
    order = expand_on_device(stacked(random_batch(0, False, False)), 6)
    curve = torch.linspace(1, 1.01, 7, dtype=torch.float64)
    nan = float("nan")
    assert choose_sizes(order, rule, torch.full((7,), nan), 1.0).tolist() == [0, 0, 0]
    spoiled = torch.cat([curve[:4], torch.full((3,), nan, dtype=torch.float64)])
    assert choose_sizes(order, rule, spoiled, 0.1).tolist() == choose_sizes(
        expand_on_device(stacked(random_batch(0, False, False)), 3), rule, curve[:4], 0.1
    ).tolist()
    assert choose_sizes(order, PRICED, curve, nan).tolist() == [0, 0, 0]


def test_wrong_policies_are_refused():
    with pytest.raises(PolicyError):
        search_on_device(torch.zeros(1, 1, 4), 2, "chain")
    with pytest.raises(PolicyError, match="round_seconds"):
        search_on_device(torch.zeros(1, 1, 4), 2, "exact")
    assert choose_sizes(expand_on_device(stacked(random_batch(0, False, False)), 3), BUDGET).shape == (3,)
