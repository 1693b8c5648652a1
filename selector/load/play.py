"""A server under load, played from a trace: r requests in lockstep under one forward, plain or with trees.

Every request walks a text of its own and takes the next one when it ends, so the batch stays full; a round costs what
the curves say of all verify tokens together. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.errors import TraceError
from selector.load.curves import LoadCurves
from selector.replaying.orders import Orders
from selector.replaying.replay import BUDGET_GRID
from selector.replaying.rounds import CONTEXT_BUCKET_TOKENS

TEXTS_PER_REQUEST = 8  # at least so many texts pass through every place of a batch
PLAIN, UNIFORM, MERGED = 0, 1, 2


@njit(cache=True)
def _sift_down(reaches, requests, size):
    """Restore a heap (largest reach first, ties to the earlier request) whose root was replaced."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        other = child + 1
        if other < size and (
            reaches[other] > reaches[child] or (reaches[other] == reaches[child] and requests[other] < requests[child])
        ):
            child = other
        if reaches[at] > reaches[child] or (reaches[at] == reaches[child] and requests[at] < requests[child]):
            return
        reaches[at], reaches[child] = reaches[child], reaches[at]
        requests[at], requests[child] = requests[child], requests[at]
        at = child


@njit(cache=True)
def merged_counts(phi, sizes, anchors, seconds, minorant, price, counts):
    """Nodes per request that maximise reach less price x seconds, into `counts` (r,); returns their total.

    The orders of all requests are merged by reach, as `select_batch` does, and left as soon as no larger total can win.

    Args:
        phi: (A, N + 1) sum of the first n reaches. sizes: (A,) nodes there are. anchors: (r,) where each request stands.
        seconds, minorant: (M + 1,) of a round by total nodes, see LoadCurves. price: tokens per second.
    """
    limit, num_requests = len(seconds) - 1, len(anchors)
    reaches, requests = np.empty(num_requests), np.empty(num_requests, np.int64)
    taken, popped = np.zeros(num_requests, np.int64), np.empty(limit, np.int64)
    firsts = np.array([phi[a, 1] if sizes[a] > 0 else -1.0 for a in anchors])
    size = 0
    for i in np.argsort(-firsts, kind="mergesort"):
        if firsts[i] >= 0.0:
            reaches[size], requests[size] = firsts[i], i
            size += 1
    n, chosen, total, best = 0, 0, 0.0, -price * seconds[0]
    while size > 0 and n < limit:
        reach = reaches[0]
        # No reach to come is larger and the minorant's slope never falls: where the bound on n + 1 nodes does not win, no
        # bound on more does. (While slopes still pay, it lies above every value so far.)
        if total + reach - price * minorant[n + 1] <= best:
            break
        i = requests[0]
        popped[n] = i
        n, total, taken[i] = n + 1, total + reach, taken[i] + 1
        if taken[i] < sizes[anchors[i]]:
            reaches[0] = phi[anchors[i], taken[i] + 1] - phi[anchors[i], taken[i]]
        else:
            size -= 1
            reaches[0], requests[0] = reaches[size], requests[size]
        _sift_down(reaches, requests, size)
        value = total - price * seconds[n]
        if value > best:
            best, chosen = value, n
    counts[:] = 0
    for k in range(chosen):
        counts[popped[k]] += 1
    return chosen


@njit(cache=True)
def _play(phi, sizes, ranks, starts, contexts, queue, num_requests, mode, budget, price, table, minorant, plain, first_bucket):
    """Rounds until a request ends and no text waits; returns (tokens, seconds, rounds, nodes, accepted, expected)."""
    at, last = np.empty(num_requests, np.int64), np.empty(num_requests, np.int64)
    counts, waiting = np.zeros(num_requests, np.int64), num_requests
    at[:], last[:] = starts[queue[:num_requests]], starts[queue[:num_requests] + 1] - 1
    tokens, rounds, nodes, accepted, seconds, expected = 0, 0, 0, 0, 0.0, 0.0
    while True:
        bucket = int(np.rint(contexts[at].sum() / num_requests / CONTEXT_BUCKET_TOKENS)) - first_bucket
        bucket = min(max(bucket, 0), len(plain) - 1)
        if mode == MERGED:
            paid = merged_counts(phi, sizes, at, table[bucket], minorant[bucket], price, counts)
        else:
            counts[:], paid = budget, budget * num_requests
        seconds += plain[bucket] if mode == PLAIN else table[bucket, paid]
        rounds += 1
        ended = False
        for i in range(num_requests):
            a, n, hit = at[i], min(counts[i], sizes[at[i]]), 0
            while hit < ranks.shape[1] and ranks[a, hit] < n:
                hit += 1
            nodes, accepted, expected = nodes + n, accepted + hit, expected + phi[a, n]
            tokens += min(hit + 1, last[i] - a)  # a text's last round is cut where the text ends
            at[i] += hit + 1
            if at[i] >= last[i]:
                if waiting < len(queue):
                    at[i], last[i] = starts[queue[waiting]], starts[queue[waiting] + 1] - 1
                    waiting += 1
                else:
                    ended = True
        if ended:
            return tokens, seconds, rounds, nodes, accepted, expected


@dataclass(frozen=True)
class LoadRun:
    """What a batch did under one way of budgeting.

    `tokens`, `nodes`, `accepted` and `expected` (sum of reach) are of all requests; `rounds` are shared forwards.
    `budget` is nodes per request (uniform), `price` in tokens per second of the whole batch and `reach_scale` what
    reach was multiplied by (merged).
    """

    policy: str
    num_requests: int
    tokens: int
    seconds: float
    rounds: int
    nodes: int
    accepted: int
    expected: float
    budget: int | None = None
    price: float | None = None
    reach_scale: float = 1.0

    @property
    def measured_scale(self) -> float:
        """Accepted nodes over expected ones; 1 where nothing was expected."""
        return self.accepted / self.expected if self.expected > 0 else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Of one request in one round, the bonus token counted."""
        return self.tokens / (self.rounds * self.num_requests)

    @property
    def mean_nodes(self) -> float:
        """Of one request in one round."""
        return self.nodes / (self.rounds * self.num_requests)


def text_queue(orders: Orders, num_requests: int, texts: Iterable[int] | None = None, seed: int = 0) -> NDArray[np.int64]:
    """(Q,) texts in the order in which requests take them: shuffled passes over `texts` (default: each once).

    Whole passes, at least one and as many as give every place of the batch eight texts. Texts without a round are left out.
    Raises TraceError if none is left.
    """
    chosen = np.arange(orders.num_texts) if texts is None else np.asarray(list(texts), np.int64)
    chosen = chosen[orders.num_tokens[chosen] > 0]
    if not len(chosen):
        raise TraceError("no text of the trace has two generated tokens, so there is nothing to play")
    passes = 1 if num_requests == 1 else max(1, -(-TEXTS_PER_REQUEST * num_requests // len(chosen)))
    rng = np.random.default_rng((seed, num_requests))
    return np.concatenate([rng.permutation(chosen) for _ in range(passes)])


def play_load(
    orders: Orders, curves: LoadCurves, queue: NDArray[np.int64], policy: str, budget: int = 0, price: float = 0.0,
    reach_scale: float = 1.0,
) -> LoadRun:  # fmt: skip
    """Play one way of budgeting: "plain", "uniform" (`budget` nodes per request, short trees padded) or "merged" (`price`).

    Ends when a request ends and no text waits, so that every round counted has a full batch; one request plays all texts
    to their ends. With `reach_scale` every reach counts so many times, as in the live selector.
    """
    mode = {"plain": PLAIN, "uniform": UNIFORM, "merged": MERGED}[policy]
    used = budget if mode == UNIFORM else 0
    tokens, seconds, rounds, nodes, accepted, expected = _play(
        orders.phi, orders.sizes, orders.ranks, orders.text_starts, orders.context_tokens, queue, curves.num_requests, mode, used,
        float(price) / reach_scale, curves.table, curves.minorant, curves.plain, curves.first_bucket,
    )  # fmt: skip
    return LoadRun(
        policy, curves.num_requests, tokens, seconds, rounds, nodes, accepted, expected,
        budget=used if mode == UNIFORM else None, price=price if mode == MERGED else None, reach_scale=reach_scale,
    )  # fmt: skip


def best_uniform(orders: Orders, curves: LoadCurves, queue: NDArray[np.int64], grid: Sequence[int] = BUDGET_GRID) -> LoadRun:
    """The number of nodes per request with the highest throughput, over a grid; 0 nodes where no other fits."""
    largest = min(orders.max_nodes, curves.max_total_nodes // curves.num_requests)
    budgets = [n for n in grid if n <= largest] or [largest]
    return max((play_load(orders, curves, queue, "uniform", n) for n in budgets), key=lambda run: run.tokens_per_second)


def merged_at_fixed_point(
    orders: Orders, curves: LoadCurves, queue: NDArray[np.int64], price: float, tolerance: float = 1e-4, max_rounds: int = 20
) -> LoadRun:
    """Merged budgets at the price that equals their own throughput (Dinkelbach's method for ratios), from `price` on.

    Reach is scaled by what was accepted of it in the play before, as the live selector tracks it. With dependent rounds
    the iteration need not be monotone, so the best play that was seen is returned.
    """
    found: LoadRun | None = None
    scale = 1.0
    for _ in range(max_rounds):
        now = play_load(orders, curves, queue, "merged", price=price, reach_scale=scale)
        if found is None or now.tokens_per_second > found.tokens_per_second:
            found = now
        settled = abs(now.tokens_per_second - price) <= tolerance * price
        if settled and abs(now.measured_scale - scale) <= 10 * tolerance:
            break
        price, scale = now.tokens_per_second, now.measured_scale
    assert found is not None
    return found
