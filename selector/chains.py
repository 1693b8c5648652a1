"""The compiled walk along the best child of every node: the chain a drafter without a tree would propose."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def chain_path(edges, token_ids, max_nodes):
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
