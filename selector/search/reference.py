"""Best-first tree building in plain Python: the readable twin of `expansion`, for tests, benchmarks and doubters."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from selector.search.expansion import Expansion
from selector.search.kernels import END_EXHAUSTED, END_MAX_NODES
from selector.trellis import Trellis


def expand_in_python(trellis: Trellis, max_nodes: int) -> Expansion:
    """The first `max_nodes` nodes in the order `search` defines; a node's first child and next sibling follow it."""
    rows: list[list[list[tuple[float, int, int]]]] = [
        [
            sorted((-edge, token, column) for column, (edge, token) in enumerate(zip(row, ids, strict=True)) if edge > -math.inf)
            for row in rows_of_depth
        ]
        for rows_of_depth, ids in zip(trellis.edges_by_parent.tolist(), trellis.token_ids.tolist(), strict=True)
    ]
    conditional = trellis.log_edges.ndim == 3
    heap: list[tuple[float, int, int, int, int, int, int]] = []  # -log reach, depth, token, parent, row, rank, column
    log_reach = [0.0]

    def push(depth: int, row: int, rank: int, parent: int) -> None:
        if depth < len(rows) and rank < len(rows[depth][row]):
            negated, token, column = rows[depth][row][rank]
            heapq.heappush(heap, (log_reach[parent] + negated, depth, token, parent, row, rank, column))

    push(0, 0, 0, 0)
    nodes: list[tuple[int, int, int]] = []
    while heap and len(nodes) < max_nodes:
        negated, depth, token, parent, row, rank, column = heapq.heappop(heap)
        nodes.append((depth + 1, token, parent))
        log_reach.append(negated)
        push(depth, row, rank + 1, parent)
        push(depth + 1, column if conditional else 0, 0, len(nodes))
    depths, tokens, parents = zip(*nodes, strict=True) if nodes else ((), (), ())
    reach = np.exp(-np.array(log_reach[1:]))
    end = END_MAX_NODES if heap else END_EXHAUSTED
    return Expansion(
        np.array(depths, np.int32), np.array(tokens, np.int64), np.array(parents, np.int32), reach, len(nodes), end, False
    )


def best_size(reach: NDArray[np.float64], cost: NDArray[np.float64], price: float | None = None) -> int:
    """Number of nodes of the highest value, found by looking at every size: tokens per second, or priced."""
    total = 1.0 + np.concatenate([[0.0], np.cumsum(reach)])[: len(cost)]
    curve = cost[: len(total)]
    return int(np.argmax(total / curve if price is None else total - price * curve))
