from __future__ import annotations

import numpy as np
import pytest

from selector.search.expansion import expand, expand_chain
from selector.tree import DraftTree
from selector.trellis import Trellis
from tests.selector.helpers import random_trellis


def tree_of(parents, tokens=None):
    parents = np.array(parents, np.int32)
    depths = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents):
        depths[i] = 0 if parent < 0 else depths[parent] + 1
    tokens = np.arange(len(parents)) if tokens is None else np.array(tokens)
    return DraftTree(tokens.astype(np.int64), parents, depths, np.ones(len(parents)))


def test_case_9_position_ids_follow_depth():
    assert tree_of([-1, 0, 0, 1, 2]).position_ids(10).tolist() == [10, 11, 11, 12, 12]


def test_case_13_reach_is_a_product():
    trellis = Trellis.from_probabilities([1, 2, 3], [0.9, 0.8, 0.7])
    tree = DraftTree.from_expansion(expand_chain(trellis, 3), "budget")
    np.testing.assert_allclose(tree.reach, [1, 0.9, 0.72, 0.504])
    assert tree.expected_tokens == pytest.approx(3.124)


def test_mask_shows_ancestors_only():
    mask = tree_of([-1, 0, 0, 1, 2]).attention_mask()
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_mask_of_random_trees_equals_walking_up():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = DraftTree.from_expansion(expand(random_trellis(rng, 5, 3), 40), "budget")
        mask = tree.attention_mask()
        for slot in range(tree.num_verify_tokens):
            ancestors, at = set(), slot
            while at >= 0:
                ancestors.add(at)
                at = int(tree.parents[at])
            assert set(np.flatnonzero(mask[slot])) == ancestors


def test_walk_follows_the_target():
    tree = tree_of([-1, 0, 0, 1, 2, 2], tokens=[9, 5, 6, 7, 7, 8])
    assert tree.walk([6, 0, 8, 0, 0, 1]).tolist() == [0, 2, 5]
    assert tree.walk([1, 0, 0, 0, 0, 0]).tolist() == [0]
    assert tree.child_with_token(2, 8) == 5
    assert tree.child_with_token(2, 5) == -1
    assert tree.children(2) == [4, 5]
    with pytest.raises(ValueError, match="shape"):
        tree.walk([1, 2])


def test_walk_of_random_trees_equals_child_by_child():
    rng = np.random.default_rng(2)
    for _ in range(200):
        tree = DraftTree.from_expansion(expand(random_trellis(rng, 4, 3, True), 30), "budget")
        target = rng.integers(0, 9, tree.num_verify_tokens)
        path, slot = [0], 0
        while (slot := tree.child_with_token(slot, int(target[slot]))) >= 0:
            path.append(slot)
        assert tree.walk(target).tolist() == path


def test_root_only():
    tree = DraftTree.root_only(7)
    assert (tree.num_nodes, tree.num_verify_tokens, tree.expected_tokens, tree.max_depth) == (0, 1, 1.0, 0)
    assert tree.token_ids.tolist() == [7]
    assert tree.attention_mask().tolist() == [[True]]
    assert tree.walk([3]).tolist() == [0]
