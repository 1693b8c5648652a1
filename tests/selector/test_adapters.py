from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.adapters import bastion, caddtree, ddtree, sglang
from selector.adapters.arrays import parents_from_mask, tree_from_parents
from selector.adapters.errors import AdapterError
from selector.errors import PolicyError
from selector.search.expansion import expand
from selector.search.growing import expand_logits
from selector.search.reference import best_size, expand_in_python
from selector.tree import DraftTree
from selector.trellis import Trellis

seeds = st.integers(0, 2**32 - 1)

#      0 root (token 7)
#      |-- 1 (token 4) -- 3 (token 8) -- 5 (token 1)
#      |-- 2 (token 9) -- 4 (token 8)
WORKED = tree_from_parents([7, 4, 9, 8, 8, 1], [-1, 0, 0, 1, 2, 3])
VISIBLE = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ],
    bool,
)


def random_tree(seed: int, max_nodes: int = 30) -> DraftTree:
    """A random recursive tree; siblings hold different tokens."""
    rng = np.random.default_rng(seed)
    t = int(rng.integers(1, max_nodes + 2))
    parents = [-1] + [int(rng.integers(i)) for i in range(1, t)]
    tokens, used = [int(rng.integers(50))], set()
    for slot in range(1, t):
        token = int(rng.integers(5))
        while (parents[slot], token) in used:
            token += 1
        used.add((parents[slot], token))
        tokens.append(token)
    return tree_from_parents(tokens, parents)


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.parents, expected.parents)
    np.testing.assert_array_equal(found.depths, expected.depths)


def peaked_logits(rng: np.random.Generator, depth: int, vocab: int, sharp: float = 2.0) -> np.ndarray:
    return (rng.standard_normal((depth, vocab)) * sharp).astype(np.float32)


# --- what they share


def test_a_tree_from_parents_is_checked():
    np.testing.assert_array_equal(WORKED.depths, [0, 1, 1, 2, 2, 3])
    np.testing.assert_array_equal(WORKED.attention_mask(), VISIBLE)
    for tokens, parents, message in [
        ([1, 2], [0, 0], "slot 0"),
        ([1, 2, 3], [-1, 2, 0], "slot 1"),
        ([1, 2, 3], [-1, 0, -1], "slot 2"),
        ([1, 2, 2], [-1, 0, 0], "repeats token 2"),
        ([], [], "at least 1"),
        ([1], [-1, 0], r"\(t,\)"),
    ]:
        with pytest.raises(AdapterError, match=message):
            tree_from_parents(tokens, parents)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_a_mask_alone_gives_the_parents_back(seed):
    tree = random_tree(seed)
    np.testing.assert_array_equal(parents_from_mask(tree.attention_mask()), tree.parents)


def test_what_is_no_mask_of_a_tree_is_refused():
    broken = VISIBLE.copy()
    broken[5, 1] = False
    with pytest.raises(AdapterError, match="row 5"):
        parents_from_mask(broken)
    with pytest.raises(AdapterError, match="diagonal"):
        parents_from_mask(np.zeros((2, 2)))


# --- DDTree


def test_ddtree_worked_example():
    arrays = ddtree.from_tree(WORKED)
    assert arrays.node_token_ids.tolist() == [4, 9, 8, 8, 1]
    assert arrays.node_depths.tolist() == [1, 1, 2, 2, 3]
    assert arrays.parents == [-1, 0, 0, 1, 2, 3]
    assert arrays.child_maps == [{4: 1, 9: 2}, {8: 3}, {8: 4}, {1: 5}, {}, {}]
    np.testing.assert_array_equal(arrays.visibility, VISIBLE)
    assert arrays.node_token_ids.dtype == arrays.node_depths.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_ddtree_there_and_back(seed):
    tree = random_tree(seed)
    assert_same(ddtree.to_tree(ddtree.from_tree(tree), int(tree.token_ids[0])), tree)


def test_ddtree_contradictions_are_named():
    arrays = ddtree.from_tree(WORKED)
    for changed, message in [
        (arrays._replace(node_depths=arrays.node_depths + 1), "node_depths"),
        (arrays._replace(visibility=~arrays.visibility), "visibility"),
        (arrays._replace(child_maps=[{4: 1, 9: 1}, *arrays.child_maps[1:]]), r"child_maps\[0\]"),
        (arrays._replace(child_maps=arrays.child_maps[:-1]), "child_maps hold 5 slots, the tree 6"),
        (arrays._replace(parents=[-1, [0], 0, 1, 1, 3]), "cannot be read as an array of int32"),
        (arrays._replace(parents=[[-1], [0]]), r"parents must be \(t,\)"),
    ]:
        with pytest.raises(AdapterError, match=message):
            ddtree.to_tree(changed)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 80), st.sampled_from([0.3, 2.0, 6.0]))
def test_the_ddtree_drop_in_is_the_search_over_the_whole_vocabulary(seed, budget, sharp):
    rng = np.random.default_rng(seed)
    logits = peaked_logits(rng, int(rng.integers(1, 5)), 60, sharp)
    expected = expand_in_python(Trellis.from_logits(logits, 60), budget)
    arrays = ddtree.build_ddtree_tree(logits, budget)
    assert arrays.node_token_ids.tolist() == expected.token_ids.tolist()
    assert arrays.parents == [-1, *expected.parents.tolist()]


def test_the_ddtree_drop_in_answers_in_torch_where_it_is_asked_in_torch():
    torch = pytest.importorskip("torch")
    logits = torch.from_numpy(peaked_logits(np.random.default_rng(0), 3, 40))
    arrays = ddtree.build_ddtree_tree(logits, 12)
    assert arrays.node_token_ids.dtype == torch.int64 and arrays.visibility.dtype == torch.bool
    assert isinstance(arrays.parents, list) and isinstance(arrays.child_maps[0], dict)
    plain = ddtree.build_ddtree_tree(logits.numpy(), 12)
    assert arrays.node_token_ids.tolist() == plain.node_token_ids.tolist() and arrays.parents == plain.parents
    assert_same(ddtree.to_tree(arrays), ddtree.to_tree(plain))
    assert ddtree.build_ddtree_tree(logits, 0).parents == [-1]
    assert ddtree.build_ddtree_tree(logits[:0], 5).visibility.tolist() == [[True]]


# --- CaDDTree


class TheirCost:
    """The two things the public builder asks of its cost model."""

    Cd = 8.0

    def __init__(self, verify: np.ndarray) -> None:
        self.verify = verify

    def Cv(self, nodes: int, context: int) -> float:  # noqa: N802 - their name
        return float(self.verify[nodes]) + 0.001 * context


def test_caddtree_worked_example():
    arrays = caddtree.from_tree(WORKED)
    assert arrays.budget == 5 and arrays.parents == [-1, 0, 0, 1, 2, 3]
    with pytest.raises(AdapterError, match="budget"):
        caddtree.to_tree(arrays._replace(budget=4))


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_caddtree_there_and_back(seed):
    tree = random_tree(seed)
    assert_same(caddtree.to_tree(caddtree.from_tree(tree), int(tree.token_ids[0])), tree)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_caddtree_drop_in_stops_where_the_rule_says(seed):
    rng = np.random.default_rng(seed)
    logits = peaked_logits(rng, 4, 50, 3.0)
    cost = TheirCost(50 + np.cumsum(rng.random(61) * rng.choice([0.0, 3.0], 61)) + 0.01 * np.arange(61))
    curve = caddtree.round_curve(cost, 1000, 60)
    assert curve[0] == pytest.approx(8 + cost.verify[0] + 1)
    order = expand(Trellis.from_logits(logits, 50), 60)
    ratio = (1 + np.concatenate([[0], np.cumsum(order.reach)])) / curve
    first = next((n for n in range(60) if ratio[n + 1] <= ratio[n]), 60)
    assert caddtree.build_caddtree_tree(logits, cost, 1000, 60, "unimodal").budget == first
    arrays = caddtree.build_caddtree_tree(logits, cost, 1000, 60)
    assert arrays.budget == best_size(order.reach, curve)
    assert arrays.node_token_ids.tolist() == order.token_ids[: arrays.budget].tolist()


def test_caddtree_takes_our_cost_model_and_refuses_a_flat_one_as_a_guide():
    from costmodel import CostModel

    ours = CostModel.from_points([1, 8, 16, 33], [0.05, 0.051, 0.06, 0.08], draft_seconds=0.008)
    logits = peaked_logits(np.random.default_rng(0), 5, 50, 3.0)
    assert 0 < caddtree.build_caddtree_tree(logits, ours, 0, 32).budget <= 32
    assert caddtree.build_caddtree_tree(logits, TheirCost(np.full(33, 60.0)), 0, 32).budget == 5
    assert caddtree.build_caddtree_tree(logits[:0], ours, 0).budget == 0
    with pytest.raises(PolicyError):
        caddtree.build_caddtree_tree(logits, ours, 0, policy="greedy")


# --- BASTION


def test_bastion_worked_example():
    draft = bastion.from_tree(WORKED)
    assert draft.token_ids.tolist() == [7, 4, 9, 8, 8, 1]
    assert draft.parent_indices.tolist() == [-1, 0, 0, 1, 2, 3]
    assert draft.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert draft.retrieve_indices.tolist() == [[0, 2, 4, -1], [0, 1, 3, 5]]
    assert draft.path_lens.tolist() == [3, 4]
    np.testing.assert_array_equal(draft.tree_mask, VISIBLE)
    root = bastion.from_tree(DraftTree.root_only(3))
    assert (root.retrieve_indices.tolist(), root.path_lens.tolist()) == ([[0]], [1])


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_bastion_there_and_back(seed):
    tree = random_tree(seed)
    draft = bastion.from_tree(tree)
    assert_same(bastion.to_tree(draft), tree)
    parents = np.full(tree.num_verify_tokens, -1)
    for path, length in zip(draft.retrieve_indices, draft.path_lens, strict=True):  # the paths alone hold the tree
        parents[path[1:length]] = path[: length - 1]
        assert (path[length:] == -1).all()
    np.testing.assert_array_equal(parents, tree.parents)


def test_bastion_contradictions_are_named_and_torch_is_answered_in_torch():
    torch = pytest.importorskip("torch")
    draft = bastion.from_tree(WORKED, like=torch.zeros(1))
    assert draft.retrieve_indices.dtype == torch.int64 and draft.tree_mask.dtype == torch.bool
    assert_same(bastion.to_tree(draft), WORKED)
    with pytest.raises(AdapterError, match="retrieve_indices"):
        bastion.to_tree(bastion.TreeDraft(**{**vars(draft), "retrieve_indices": draft.retrieve_indices.flip(0)}))


# --- SGLang


def test_sglang_worked_example():
    batch = sglang.from_trees([WORKED, DraftTree.root_only(3)], [10, 20], num_draft_tokens=7)
    assert batch.draft_token.tolist() == [7, 4, 9, 8, 8, 1, 0, 3, 0, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [10, 11, 11, 12, 12, 13, 11, 20, 21, 21, 21, 21, 21, 21]
    assert batch.retrieve_index.tolist() == [list(range(7)), list(range(7, 14))]
    assert batch.retrieve_next_token[0].tolist() == [1, 3, 4, 5, -1, -1, -1]
    assert batch.retrieve_next_sibling[0].tolist() == [-1, 2, -1, -1, -1, -1, -1]
    assert batch.retrieve_next_token[1].tolist() == [-1] * 7
    packed = batch.tree_mask(sglang.QLEN_ONLY_BITPACKING)
    assert packed.dtype == np.dtype("u1")
    assert packed[:7].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b101011, 0b1000001]


def test_sglang_masks_say_the_same_thing():
    batch = sglang.from_trees([WORKED, DraftTree.root_only(3)], [2, 0])
    flat = batch.tree_mask(sglang.QLEN_ONLY)
    full = batch.tree_mask(sglang.FULL_MASK)
    assert flat.size == 2 * 36 and full.size == 6 * 8 + 6 * 6
    first = full[: 6 * 8].reshape(6, 8)
    assert first[:, :2].all()
    np.testing.assert_array_equal(first[:, 2:], VISIBLE)
    np.testing.assert_array_equal(flat[:36].reshape(6, 6), VISIBLE)


@pytest.mark.parametrize(("size", "dtype"), [(8, "u1"), (9, "u2"), (16, "u2"), (17, "u4"), (32, "u4")])
def test_sglang_packed_words_unpack_to_the_mask(size, dtype):
    tree = tree_from_parents(range(size), [-1, *range(size - 1)])
    words = sglang.from_tree(tree, 0).tree_mask(sglang.QLEN_ONLY_BITPACKING)
    assert words.dtype == np.dtype(dtype).newbyteorder("<")
    bits = np.unpackbits(words.reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")[:, :size].astype(bool)
    np.testing.assert_array_equal(bits, tree.attention_mask())


@settings(max_examples=60, deadline=None)
@given(st.lists(seeds, min_size=1, max_size=4), st.integers(0, 5))
def test_sglang_there_and_back(many, spare):
    trees = [random_tree(seed, 20) for seed in many]
    size = max(tree.num_verify_tokens for tree in trees) + spare
    batch = sglang.from_trees(trees, np.arange(len(trees)) * 7, size, pad_token=99)
    for found, tree in zip(sglang.to_trees(batch), trees, strict=True):
        assert_same(found, tree)
    masks = batch.tree_mask(sglang.QLEN_ONLY).reshape(len(trees), size, size)
    for mask, tree in zip(masks, trees, strict=True):  # the mask alone holds the tree
        t = tree.num_verify_tokens
        np.testing.assert_array_equal(parents_from_mask(mask[:t, :t]), tree.parents)
        assert not mask[:t, t:].any() and mask[:, 0].all()


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_sglang_greedy_verification_walks_as_we_do(seed):
    tree = random_tree(seed)
    batch = sglang.from_tree(tree, 5, tree.num_verify_tokens + 2, pad_token=0)
    target = np.random.default_rng(seed).integers(0, 5, batch.num_draft_tokens)
    child, sibling = batch.retrieve_next_token[0], batch.retrieve_next_sibling[0]
    path, slot = [0], child[0]
    while slot != -1:  # first child, then its siblings, until one holds what the target says
        if batch.draft_token[slot] == target[path[-1]]:
            path.append(int(slot))
            slot = child[slot]
        else:
            slot = sibling[slot]
    assert path == tree.walk(target[: tree.num_verify_tokens]).tolist()


def test_sglang_refusals():
    with pytest.raises(AdapterError, match="does not fit"):
        sglang.from_tree(WORKED, 0, num_draft_tokens=5)
    with pytest.raises(AdapterError, match="seq_lens"):
        sglang.from_trees([WORKED], [1, 2])
    with pytest.raises(AdapterError, match="32"):
        sglang.from_tree(WORKED, 0, 33).tree_mask(sglang.QLEN_ONLY_BITPACKING)
    with pytest.raises(AdapterError, match="mode"):
        sglang.from_tree(WORKED, 0).tree_mask(3)
    looped = sglang.from_tree(WORKED, 0)
    looped.retrieve_next_sibling[0, 2] = 1
    with pytest.raises(AdapterError, match="twice"):
        sglang.to_tree(looped)
    unlinked = sglang.from_tree(WORKED, 0)
    unlinked.retrieve_next_token[0, 2] = -1
    with pytest.raises(AdapterError, match="linked by none"):
        sglang.to_tree(unlinked)
    moved = sglang.from_tree(WORKED, 0)
    moved.positions[4] += 1
    with pytest.raises(AdapterError, match="positions"):
        sglang.to_tree(moved)
    for request in (-1, 1):
        with pytest.raises(AdapterError, match=f"request is {request}, the batch holds 0 to 0"):
            sglang.to_tree(moved, request)


# --- growing the top-k


def test_the_top_k_grows_only_where_it_was_too_small():
    rng = np.random.default_rng(3)
    logits = peaked_logits(rng, 3, 200, 4.0)
    logits[0] *= 0.01  # a flat first row: many of its candidates come before any deeper node
    trellis, expansion = expand_logits(logits, 60, top_k=4)
    assert expansion.token_ids.tolist() == expand(Trellis.from_logits(logits, 200), 60).token_ids.tolist()
    listed = (trellis.token_ids >= 0).sum(axis=1)
    assert listed[0] == 64 and listed[2] < 64 and not expansion.truncated_by_k


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 8), st.integers(1, 60))
def test_growing_equals_listing_everything_ties_included(seed, top_k, max_nodes):
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, (3, 12)).astype(np.float32)
    logits[1, rng.integers(12)] = -np.inf
    whole = expand(Trellis.from_logits(logits, 12), max_nodes)
    _, grown = expand_logits(logits, max_nodes, top_k=top_k)
    for found, expected in zip(grown[:4], whole[:4], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_growing_meets_nan_and_nothing():
    logits = peaked_logits(np.random.default_rng(0), 3, 30)
    logits[1, 4] = np.nan
    trellis, expansion = expand_logits(logits, 100, top_k=2)
    assert (trellis.depth, expansion.num_chosen, trellis.num_nan_rows) == (1, 30, 1)
    assert expand_logits(logits[1:], 5)[1].num_chosen == 0
