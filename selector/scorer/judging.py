"""Tokens per round at equal numbers of nodes, whatever the edges: what a scorer is judged by without a cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from selector.search.expansion import order_all
from selector.trace import Trace


def path_ranks(
    log_edges: NDArray[np.float64], token_ids: NDArray[np.int64], next_tokens: NDArray[np.int64], max_nodes: int
) -> NDArray[np.int64]:
    """(A, depth) place in the order of reach of the target's own token at every depth, NEVER from the first missing one on.

    Args:
        log_edges: (A, depth, k) or (A, depth, k, k). token_ids: (A, depth, k). next_tokens: (A, depth), negative unknown.
    """
    return order_all(log_edges, token_ids, next_tokens, max_nodes)[3].astype(np.int64)


def play_budget(ranks: NDArray[np.int64], text_starts: Sequence[int], budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Greedy decoding with the first `budget` nodes of every round: anchors visited (R,) and nodes accepted there (R,)."""
    accepted = (ranks < budget).cumprod(axis=1).sum(axis=1) if ranks.size else np.zeros(len(ranks), np.int64)
    visited: list[int] = []
    for start, end in zip(text_starts[:-1], text_starts[1:], strict=True):
        a = int(start)
        while a < end - 1:
            visited.append(a)
            a += int(accepted[a]) + 1
    where = np.array(visited, np.int64)
    return where, accepted[where].astype(np.int64)


def text_starts(trace: Trace) -> NDArray[np.int64]:
    """(T + 1,) first anchor of every text among all anchors."""
    return np.concatenate([[0], np.cumsum([text.num_anchors for text in trace.texts])]).astype(np.int64)


def tokens_per_round_by_budget(
    trace: Trace, log_edges: NDArray[np.float64], token_ids: NDArray[np.int64], budgets: Sequence[int]
) -> dict[int, float]:
    """Tokens committed per round at each number of nodes, over all texts of a trace.

    Args:
        log_edges: (A, depth, k) or (A, depth, k, k) of all anchors, text after text. token_ids: (A, depth, k).
    """
    following = np.concatenate([text.next_tokens() for text in trace.texts])
    ranks = path_ranks(log_edges, token_ids, following, max(budgets))
    starts = text_starts(trace)
    tokens = int(np.maximum(np.diff(starts) - 1, 0).sum())
    return {budget: tokens / max(len(play_budget(ranks, starts.tolist(), budget)[0]), 1) for budget in budgets}
