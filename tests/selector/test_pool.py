from __future__ import annotations

import numpy as np
import pytest

from selector.errors import PoolError
from selector.pool import CandidatePool, expand_pool, expand_pool_chain
from selector.search.kernels import END_EXHAUSTED, END_MAX_NODES


@pytest.mark.parametrize(
    ("tokens", "parents", "probabilities", "message"),
    [
        ([1], [0], [0.5], "node 0 has a cycle"),
        ([1, 2], [1, 0], [0.5, 0.5], "node 0 has a cycle"),
        ([1, 2], [1, -1], [0.5, 0.5], "node 0 has a forward parent"),
        ([1, 2], [-1, 5], [0.5, 0.5], "parent 5"),
        ([1, 2], [-1, -2], [0.5, 0.5], "parent -2"),
        ([1, 1], [-1, -1], [0.5, 0.5], "nodes 0 and 1 are duplicate siblings"),
        ([1, 2], [-1, -1], [0.5, 1.5], "node 1 has edge probability"),
        ([1, 2], [-1, -1], [0.5, np.nan], "node 1 has edge probability"),
        ([1, 2], [-1, -1], [0.7, 0.6], "node -1 sum to 1.3"),
        ([1, 2], [-1], [0.7, 0.6], r"must be \(m,\)"),
        (1, -1, 0.7, r"must be \(m,\)"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(tokens, parents, probabilities, message):
    with pytest.raises(PoolError, match=message):
        CandidatePool(tokens, parents, probabilities)


def test_order_and_slots():
    pool = CandidatePool([5, 6, 7, 8], [-1, -1, 1, 0], [0.3, 0.6, 0.8, 1.0])
    expansion = expand_pool(pool, 4)
    assert expansion.token_ids.tolist() == [6, 7, 5, 8]  # .6, .48, .3, .3 (deeper)
    assert expansion.parents.tolist() == [0, 1, 0, 3]
    np.testing.assert_allclose(expansion.reach, [0.6, 0.48, 0.3, 0.3])
    assert expand_pool_chain(pool, 9).token_ids.tolist() == [6, 7]
    assert [expand_pool_chain(pool, n).end for n in (1, 2)] == [END_MAX_NODES, END_EXHAUSTED]


def test_an_empty_pool():
    pool = CandidatePool([], [], [])
    assert expand_pool(pool, 4).num_chosen == 0
    assert expand_pool_chain(pool, 4).num_chosen == 0
    assert pool.depth == 0
