"""From raw logits to nodes in order of reach, with a small top-k that grows only in the rows where it was too small."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.kernels import BUDGET
from selector.search import Expansion, expand
from selector.trellis import Trellis

FIRST_TOP_K, GROWTH = 16, 4


@njit(cache=True)
def _last_ranked_popped(depths, tokens, last_tokens):
    """(depth,) bool: whether the last listed candidate of a row is among the nodes."""
    popped = np.zeros(last_tokens.shape[0], np.bool_)
    for i in range(depths.shape[0]):
        row = depths[i] - 1
        if tokens[i] == last_tokens[row]:
            popped[row] = True
    return popped


def expand_logits(
    logits: Any,
    max_nodes: int,
    rule: int = BUDGET,
    cost: NDArray[np.float64] | None = None,
    price: float = 0.0,
    bonus: float = 1.0,
    top_k: int | None = None,
) -> tuple[Trellis, Expansion]:
    """The order a search over the whole vocabulary would give, without listing more of it than is needed.

    An unlisted candidate comes after every listed one of its row, under any parent. So as long as the last listed
    candidate of a row is not among the nodes, no unlisted one can be. Rows where it is are scanned again for 4 times
    as many, until none is left.

    Args:
        logits: (depth, vocab), numpy or torch. max_nodes, rule, cost, price, bonus: as `search.expand`.
        top_k: candidates listed at first; default 16, or a 16th of max_nodes if that is more.
    """
    trellis = Trellis.from_logits(logits, top_k or max(FIRST_TOP_K, max_nodes // 16))
    depth, vocab = trellis.depth, int(logits.shape[1]) if len(logits) else 0
    listed = np.full(depth, trellis.top_k, np.int64)
    while True:
        expansion = expand(trellis, max_nodes, rule, cost, price, bonus)
        last = trellis.token_ids[np.arange(depth), listed - 1] if depth else np.zeros(0, np.int64)
        short = _last_ranked_popped(expansion.depths, expansion.token_ids, last) & (listed < vocab)
        if not short.any():
            return trellis, expansion._replace(truncated_by_k=False)
        listed[short] = np.minimum(listed[short] * GROWTH, vocab)
        trellis = _with_longer_rows(trellis, logits, np.flatnonzero(short), int(listed.max()), listed)


def _with_longer_rows(trellis: Trellis, logits: Any, rows: NDArray[np.intp], width: int, listed: NDArray[np.int64]) -> Trellis:
    """The trellis with some rows listed anew; others are padded to the same width with candidates that never enter."""
    token_ids = np.full((trellis.depth, width), -1, np.int64)
    log_edges = np.full((trellis.depth, width), -np.inf)
    token_ids[:, : trellis.top_k], log_edges[:, : trellis.top_k] = trellis.token_ids, trellis.log_edges
    for row in rows.tolist():
        longer = Trellis.from_logits(logits[row : row + 1], int(listed[row]))
        token_ids[row, : longer.top_k], log_edges[row, : longer.top_k] = longer.token_ids[0], longer.log_edges[0]
    return Trellis(token_ids, log_edges, trellis.num_nan_rows)
