"""Best-first search over a trellis: nodes in order of reach, stopped as soon as no larger tree can win.

Order of nodes, total and deterministic: higher reach first; of equal reach the shallower; then the lower token id; then
the node whose parent came earlier. (Reach is compared as a sum of log edge probabilities from the root down.) Every
prefix of this order is prefix-closed and is the tree of its size with the largest sum of reach (DDTree; CaDDTree, arXiv
2606.01813). A node enters the heap when its parent or its next better sibling leaves it, so the heap holds at most one
entry more than there are nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.search.kernels import BUDGET, END_EXHAUSTED, END_MAX_NODES, best_first, order_anchors
from selector.trellis import Trellis

_NO_COST = np.ones(1)
_INT32, _INT64, _FLOAT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float64)  # looked up faster than the types


class Expansion(NamedTuple):
    """Nodes in order of reach and how many of them the rule chose.

    Attributes:
        depths: (m,) int32, 1 for the root's children. token_ids: (m,) int64. parents: (m,) int32 slots, 0 is the root.
        reach: (m,) float64, non-increasing.
        num_chosen: the chosen tree is the first `num_chosen` nodes.
        end: one of END_*. truncated_by_k: an unlisted sibling might have come before a node of this order.
    """

    depths: NDArray[np.int32]
    token_ids: NDArray[np.int64]
    parents: NDArray[np.int32]
    reach: NDArray[np.float64]
    num_chosen: int
    end: int
    truncated_by_k: bool


def expand(
    trellis: Trellis,
    max_nodes: int,
    rule: int = BUDGET,
    cost: NDArray[np.float64] | None = None,
    price: float = 0.0,
    bonus: float = 1.0,
) -> Expansion:
    """Pop nodes in order until the rule is certain of its choice, the trellis is used up, or `max_nodes` are out.

    Args:
        trellis: the round's proposals.
        max_nodes: largest tree.
        rule: BUDGET takes all of max_nodes; EXACT takes argmax over n of (bonus + Phi(n)) / cost[n], PRICED of
            bonus + Phi(n) - price cost[n], FIRST_DESCENT the n before the first that does not raise
            (bonus + Phi(n)) / cost[n] (CaDDTree, Theorem on unimodality: optimal if cost is convex). Phi(n) is the sum
            of the first n reaches; of equal values the smaller tree wins.
        cost: (at least max_nodes + 1,) seconds of a round with n nodes at index n; unused by BUDGET.
        price: tokens per second, for PRICED.
        bonus: what a round yields beyond its nodes, in the scale of reach.
    """
    max_nodes = max(int(max_nodes), 0)
    if cost is None or rule == BUDGET:
        curve, rule = _NO_COST, BUDGET
    else:
        curve = np.array(cost[: max_nodes + 1], np.float64)  # a copy: compiled code has one version, for writable arrays
    edges = np.ascontiguousarray(trellis.log_edges, _FLOAT64)
    token_ids = np.ascontiguousarray(trellis.token_ids, _INT64)
    depths, parents = np.empty(max_nodes, _INT32), np.empty(max_nodes, _INT32)
    tokens, reach = np.empty(max_nodes, _INT64), np.empty(max_nodes)
    n, num_chosen, end, truncated = best_first(
        edges, token_ids, rule, curve, float(price), float(bonus), depths, tokens, parents, reach
    )
    if n < max_nodes:
        depths, tokens, parents, reach = depths[:n], tokens[:n], parents[:n], reach[:n]
    return Expansion(depths, tokens, parents, reach, num_chosen, end, truncated)


def order_all(log_edges: NDArray, token_ids: NDArray, next_tokens: NDArray, max_nodes: int) -> tuple[NDArray, ...]:
    """Every anchor's first `max_nodes` nodes, N: what a replay needs to know of them.

    Args:
        log_edges: (A, depth, K) float64, or (A, depth, P, K) by parent (P = 1 or K; see `Trellis.log_edges`).
        token_ids: (A, depth, K) int64. next_tokens: (A, depth) int64, the target's own tokens after the anchor.

    Returns Phi (A, N + 1), depth of the deepest of the first n nodes (A, N + 1), nodes there are (A,), and the places in the
    order of the target's own tokens (A, depth), NEVER from the first on that is not there. ValueError for other shapes.
    """
    edges = log_edges[:, :, None, :] if log_edges.ndim == 3 else log_edges
    anchors, depth, top_k = token_ids.shape
    if edges.shape not in ((anchors, depth, 1, top_k), (anchors, depth, top_k, top_k)) or (depth and not top_k):
        raise ValueError(f"log_edges {log_edges.shape} must be (A, depth, K), (A, depth, 1, K) or (A, depth, K, K), K at least 1")
    edges, ids = np.ascontiguousarray(edges, np.float64), np.ascontiguousarray(token_ids, np.int64)
    path = np.ascontiguousarray(next_tokens, np.int64)
    return order_anchors(edges, ids, path, int(max_nodes))  # type: ignore[no-any-return]


@njit(cache=True)
def _chain_path(edges, token_ids, max_nodes):
    """Tokens and reach of the most probable child of the most probable child and so on; ties to the lower token id."""
    depth, num_rows, _ = edges.shape
    length = min(depth, max_nodes)
    tokens, reach = np.empty(length, np.int64), np.empty(length, np.float64)
    row, log_reach, n = 0, 0.0, 0
    while n < length:
        best = -1
        for column in range(edges.shape[2]):
            edge = edges[n, row, column]
            if not edge > -np.inf:
                continue
            if (
                best < 0
                or edge > edges[n, row, best]
                or (edge == edges[n, row, best] and token_ids[n, column] < token_ids[n, best])
            ):
                best = column
        if best < 0:
            break
        log_reach += edges[n, row, best]
        tokens[n], reach[n] = token_ids[n, best], np.exp(log_reach)
        row = best if num_rows > 1 else 0
        n += 1
    return tokens[:n], reach[:n]


def expand_chain(trellis: Trellis, max_nodes: int) -> Expansion:
    """The most probable child of every node, one after the other, at most `max_nodes` deep (DFlash)."""
    edges = np.ascontiguousarray(trellis.edges_by_parent, np.float64)
    tokens, reach = _chain_path(edges, np.ascontiguousarray(trellis.token_ids, np.int64), max(int(max_nodes), 0))
    n = len(tokens)
    end = END_MAX_NODES if n < trellis.depth and n == max_nodes else END_EXHAUSTED
    steps = np.arange(n + 1, dtype=np.int32)
    return Expansion(steps[1:], tokens, steps[:-1], reach, n, end, False)
