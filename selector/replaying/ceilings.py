"""Ceilings: what selection and drafting could yield at most on a trace, found by an oracle that knows the text.

Every policy commits the same tokens, so the highest throughput is the least time. That is a shortest path over the
anchors of each text: exact, and it needs no price (at any price per second the tokens are a constant, so Dinkelbach's
fixed point is reached in one step).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.replaying.orders import Orders
from selector.replaying.rounds import Curves, Rounds

ORACLE, ORACLE_DRAFTER = "oracle", "oracle drafter"
PLAIN_STEP = -1


def cheapest_at_least(table: NDArray[np.float64]) -> NDArray[np.int64]:
    """(B, N + 1) the number of nodes of the cheapest round with at least n nodes, at index n; the smallest of equal ones.

    Where a measured curve falls, useful nodes and padding together may cost less than the useful nodes alone, and a
    policy may by chance have verified just that many.
    """
    best = np.empty(table.shape, np.int64)
    best[:, -1] = table.shape[1] - 1
    rows = np.arange(len(table))
    for n in range(table.shape[1] - 2, -1, -1):
        later = best[:, n + 1]
        best[:, n] = np.where(table[:, n] <= table[rows, later], n, later)
    return best


@njit(cache=True)
def _least_time(reachable, starts, cost, plain, bucket):
    """(A,) useful nodes of every anchor on the fastest way through its text (-1: a plain step), and seconds from there."""
    choice = np.full(len(reachable), PLAIN_STEP, np.int64)
    left = np.zeros(len(reachable))
    for text in range(len(starts) - 1):
        last = starts[text + 1] - 1
        for a in range(last - 1, starts[text] - 1, -1):
            row = bucket[a]
            left[a] = plain[row] + left[a + 1]
            for n in range(reachable[a] + 1):
                seconds = cost[row, n] + left[min(a + n + 1, last)]
                if seconds < left[a]:
                    left[a], choice[a] = seconds, n
    return choice, left


def play_oracle(orders: Orders, curves: Curves, perfect_drafter: bool = False) -> Rounds:
    """The fastest rounds possible over all texts: only nodes that will be accepted, no more of them than pay.

    At every anchor the oracle may take a plain step (no draft is paid for), or verify the first n nodes of the target's
    own path, as deep as the drafter listed them; n as it likes, at the cost of the cheapest round of at least n nodes.
    So no policy on these drafts is faster: its accepted nodes are n of those, and it verified at least n.

    Args:
        perfect_drafter: every token of the path counts as listed, to the depth of the draft (the limit of drafting at
            this block size and draft cost: what the target's own distribution as drafter would list first).

    Returns rounds whose `nodes` are what was charged for, `accepted` the useful ones; 0 and 0 for a plain step.
    """
    reachable = listed_depths(orders, perfect_drafter)
    cheapest = cheapest_at_least(curves.table)
    cost = np.take_along_axis(curves.table, cheapest, axis=1)
    starts = orders.text_starts.astype(np.int64)
    choice, _ = _least_time(reachable, starts, cost, curves.plain, curves.bucket)
    visited = _followed(choice, starts)
    useful, rows = choice[visited], curves.bucket[visited]
    drafted = useful != PLAIN_STEP
    nodes = np.where(drafted, cheapest[rows, np.maximum(useful, 0)], 0)
    accepted = np.maximum(useful, 0)
    seconds = np.where(drafted, curves.table[rows, nodes], curves.plain[rows])
    unknown = np.full(len(visited), np.nan)
    return Rounds.of(ORACLE_DRAFTER if perfect_drafter else ORACLE, orders, visited, nodes, accepted, seconds, accepted, unknown)


def listed_depths(orders: Orders, perfect_drafter: bool = False) -> NDArray[np.int64]:
    """(A,) leading depths whose true token is among the candidates (or, for a perfect drafter, exists), at most N."""
    depth = orders.hits.shape[1]
    listed = orders.hits > -2 if perfect_drafter else orders.hits >= 0
    if depth and not perfect_drafter:
        listed &= ~np.isneginf(np.take_along_axis(orders.log_edges, np.maximum(orders.hits, 0)[:, :, None], axis=2)[:, :, 0])
    return np.minimum(listed.cumprod(axis=1).sum(axis=1), orders.max_nodes).astype(np.int64)


def _followed(choice: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Anchors at which a round starts when every choice is followed."""
    visited, steps = [], np.maximum(choice, 0) + 1
    for first, after in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        anchor = first
        while anchor < after - 1:
            visited.append(anchor)
            anchor += int(steps[anchor])
    return np.array(visited, np.int64)


def share_of_gap(throughput: float, fixed: float, oracle: float) -> float | None:
    """How much of the way from the best fixed budget to the oracle a throughput is: 0 at the first, 1 at the second.

    Below 0 for what is slower than the best fixed budget; None where there is no gap.
    """
    gap = oracle - fixed
    return (throughput - fixed) / gap if gap > 1e-9 * max(fixed, oracle) else None
