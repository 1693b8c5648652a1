"""Expected tokens of the best chain or tree of every size, from survival per position."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.acceptance import Acceptance

Array = NDArray[np.float64]


def expected_tokens(acceptance: Acceptance, max_nodes: int) -> Array:
    """Tokens per round with 0..max_nodes nodes, float64 of shape (m + 1,), m at most max_nodes.

    Without siblings the draft is a chain: 1 + sum of survival, and m stops at the last known position. With siblings it
    is a tree of independent positions (the product model of Sequoia, arXiv 2402.12374): at depth d the first candidate is
    right with the conditional acceptance a_d, the k-th with (1 - a_d) x siblings_k, whatever the path to its parent; nodes
    are taken in order of reach, so every prefix is the best tree of its size.
    """
    if not acceptance.siblings:
        return np.concatenate([[1.0], 1.0 + np.cumsum(acceptance.survival[:max_nodes])])
    return 1.0 + np.concatenate([[0.0], np.cumsum(_reaches(acceptance, max_nodes))])


def tokens_in_case(tokens: Array, errors: Sequence[float] | None, case: str) -> Array:
    """Tokens per round (m + 1,) as expected, as many as their interval allows (`cheap`) or as few (`dear`).

    `errors` are the relative half-widths (m + 1,), None where acceptance is taken as exact. A round gives at least one token
    and at most one more than it has nodes, so the plain step gives 1 always.
    """
    if errors is None or case == "expected":
        return tokens
    ends = tokens * (1.0 + (1.0 if case == "cheap" else -1.0) * np.asarray(errors)[: tokens.size])
    return np.clip(ends, 1.0, 1.0 + np.arange(tokens.size))


def _reaches(acceptance: Acceptance, max_nodes: int) -> list[float]:
    """Reaches of the best nodes in non-increasing order; fewer than max_nodes where no further node has any."""
    edges = [
        sorted([first, *((1.0 - first) * share for share in acceptance.siblings)], reverse=True)
        for first in acceptance.conditional
    ]
    heap = [(-edges[0][0], 1, 0, 1.0)]  # (-reach, depth, rank, reach of the parent)
    taken: list[float] = []
    while heap and len(taken) < max_nodes:
        minus_reach, depth, rank, parent = heapq.heappop(heap)
        if minus_reach >= 0:
            break
        taken.append(-minus_reach)
        if rank + 1 < len(edges[depth - 1]):
            heapq.heappush(heap, (-parent * edges[depth - 1][rank + 1], depth, rank + 1, parent))
        if depth < len(edges):
            heapq.heappush(heap, (minus_reach * edges[depth][0], depth + 1, 0, -minus_reach))
    return taken
