"""Rounds played over searched anchors: which anchors a policy visits, with how many nodes, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.errors import PolicyError
from selector.policies import ByCost, FixedShape, Plain, Policy, is_flat
from selector.replaying.orders import Orders
from selector.search.kernels import EXACT, FIRST_DESCENT, PRICED

CONTEXT_BUCKET_TOKENS = 16  # contexts are rounded to this, as the cost model does
_CHAIN, _FIXED, _BY_COST = 0, 1, 2
# How reach is tracked; the same numbers as selector.price.ReachScale
_SCALE_HALF_LIFE, _SCALE_PRIOR_NODES, _SCALE_LOW, _SCALE_HIGH = 256.0, 40.0, 0.25, 1.5


@dataclass(frozen=True, eq=False)
class Curves:
    """Round costs at every context a trace visits.

    Attributes:
        table, convex: (B, N + 1) seconds of a round of n nodes at index n. plain: (B,) seconds of a plain step.
        bucket: (A,) row of every anchor. flat: whether the curve does not depend on size.
    """

    table: NDArray[np.float64]
    convex: NDArray[np.float64]
    plain: NDArray[np.float64]
    bucket: NDArray[np.int64]
    flat: bool

    def plus(self, seconds: float) -> Curves:
        """The curves of rounds that each take so many seconds more; plain steps do not."""
        return replace(self, table=self.table + seconds, convex=self.convex + seconds)

    def select(self, anchors: NDArray[np.int64]) -> Curves:
        """The curves for some of the anchors."""
        return replace(self, bucket=self.bucket[anchors])


def build_curves(orders: Orders, cost: Any) -> Curves:
    """Ask the cost model for the curves of every context (rounded to 16 tokens) that the anchors have."""
    contexts = (CONTEXT_BUCKET_TOKENS * np.round(orders.context_tokens / CONTEXT_BUCKET_TOKENS)).astype(np.int64)
    values, bucket = np.unique(contexts, return_inverse=True)
    size = orders.max_nodes + 1
    table = np.array([cost.round_seconds(size, int(c), 1, "table") for c in values]).reshape(len(values), size)
    convex = np.array([cost.round_seconds(size, int(c), 1, "convex") for c in values]).reshape(len(values), size)
    plain = np.array([cost.plain_seconds(int(c)) for c in values])
    degenerate = bool(getattr(getattr(cost, "diagnostics", None), "degenerate", False))
    whole = max(size, int(cost.max_verify_tokens))
    flat = degenerate or any(is_flat(cost.round_seconds(whole, int(c), 1, form)) for c in values for form in ("table", "convex"))
    return Curves(table, convex, plain, bucket.astype(np.int64), flat)


@njit(cache=True)
def _best_size(phi, size, cost, rule, price, bonus):
    """Nodes of the highest value among 0..size, by looking at all of them (FIRST_DESCENT: up to the first fall)."""
    chosen = 0
    best = bonus - price * cost[0] if rule == PRICED else bonus / cost[0]
    for n in range(1, size + 1):
        total = bonus + phi[n]
        value = total - price * cost[n] if rule == PRICED else total / cost[n]
        if value > best:
            best, chosen = value, n
        elif rule == FIRST_DESCENT:
            break
    return chosen


@njit(cache=True)
def _play(phi, sizes, ranks, chain_reached, chain_lengths, starts, cost, bucket, kind, number, rule, price, scale0, adapt):
    """Nodes chosen (A,), -1 where no round started, and nodes accepted (A,); `price` is one per anchor."""
    anchors = phi.shape[0]
    chosen, accepted = np.full(anchors, -1, np.int32), np.zeros(anchors, np.int32)
    keep, fade = 0.5 ** (1.0 / _SCALE_HALF_LIFE), np.zeros(2)
    for text in range(len(starts) - 1):
        a, last = starts[text], starts[text + 1] - 1
        while a < last:
            if kind == _CHAIN:
                n = min(number, chain_lengths[a])
                hit = min(chain_reached[a], n)
            else:
                n = min(number, sizes[a])
                if kind == _BY_COST:
                    scale = scale0
                    if adapt:
                        scale = (fade[0] + scale0 * _SCALE_PRIOR_NODES) / (fade[1] + _SCALE_PRIOR_NODES)
                        scale = min(max(scale, _SCALE_LOW), _SCALE_HIGH)
                    n = _best_size(phi[a], n, cost[bucket[a]], rule, price[a] / scale, 1.0 / scale)
                hit = 0
                while hit < ranks.shape[1] and ranks[a, hit] < n:
                    hit += 1
                fade[0], fade[1] = keep * fade[0] + hit, keep * fade[1] + phi[a, n]
            chosen[a], accepted[a] = n, hit
            a += hit + 1
    return chosen, accepted


@dataclass(frozen=True, eq=False)
class Rounds:
    """What one policy did over all texts.

    Attributes:
        policy: its name. nodes, accepted: (R,) counts. visited: (R,) anchors at which a round started, in their order.
        seconds: (R,) of every round. text_seconds, text_tokens, text_rounds: (T,). depths: (R,) of the deepest node.
        expected: (R,) sum of reach, NaN where it is not known. price: what a second was charged (mean over anchors).
    """

    policy: str
    nodes: NDArray[np.int64]
    accepted: NDArray[np.int64]
    visited: NDArray[np.int64]
    seconds: NDArray[np.float64]
    text_seconds: NDArray[np.float64]
    text_tokens: NDArray[np.int64]
    text_rounds: NDArray[np.int64]
    depths: NDArray[np.int64]
    expected: NDArray[np.float64]
    price: float | None = None

    @classmethod
    def of(
        cls, policy: str, orders: Orders, visited: NDArray[np.int64], nodes: NDArray[np.int64], accepted: NDArray[np.int64],
        seconds: NDArray[np.float64], depths: NDArray[np.int64], expected: NDArray[np.float64], price: float | None = None,
    ) -> Rounds:  # fmt: skip
        """Rounds over all texts of `orders`, with the sums by text."""
        text, count = np.searchsorted(orders.text_starts, visited, side="right") - 1, orders.num_texts
        per_text = np.bincount(text, seconds, count).astype(np.float64)
        rounds = np.bincount(text, minlength=count)
        return cls(policy, nodes, accepted, visited, seconds, per_text, orders.num_tokens, rounds, depths, expected, price)

    @cached_property
    def total_seconds(self) -> float:
        """Seconds of all rounds."""
        return float(self.text_seconds.sum())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all texts over seconds of all rounds; 0 without any round."""
        return float(self.text_tokens.sum()) / self.total_seconds if self.total_seconds > 0 else 0.0


def _finish(name: str, orders: Orders, curves: Curves, chosen: Any, accepted: Any, is_chain: bool, price: float | None) -> Rounds:
    visited = np.flatnonzero(chosen >= 0)
    nodes, hits = chosen[visited].astype(np.int64), accepted[visited].astype(np.int64)
    seconds = curves.table[curves.bucket[visited], nodes]
    depths = nodes if is_chain else orders.deepest[visited, nodes].astype(np.int64)
    expected = np.full(len(visited), np.nan) if is_chain else orders.phi[visited, nodes]
    return Rounds.of(name, orders, visited, nodes, hits, seconds, depths, expected, price)


def play_plain(orders: Orders, curves: Curves) -> Rounds:
    """Plain decoding: one step per token."""
    visited = np.flatnonzero(orders.visitable)
    seconds = curves.plain[curves.bucket[visited]]
    zeros = np.zeros(len(visited), np.int64)
    return Rounds.of("plain", orders, visited, zeros, zeros, seconds, zeros, zeros.astype(float))


def play(
    policy: Policy,
    orders: Orders,
    curves: Curves,
    price: float | NDArray[np.float64] | None = None,
    reach_scale: float = 1.0,
    adapt: bool = True,
) -> Rounds:
    """Play one policy over all texts, as the live decoder would in greedy decoding.

    Args:
        policy: from `parse_policy`. orders, curves: of the trace and the cost model.
        price: for `priced`, one for all rounds or one per anchor (A,); None finds it by fixed point.
        reach_scale: initial scale of reach; adapt: track it, as the live selector does (`exact`, `priced`).
    """
    if isinstance(policy, Plain):
        return play_plain(orders, curves)
    kind, number, rule, cost = _BY_COST, orders.max_nodes, EXACT, curves.table
    if isinstance(policy, FixedShape):
        number = min(policy.num_nodes or orders.ranks.shape[1], orders.max_nodes)
        kind = _CHAIN if policy.kind == "chain" else _FIXED
    elif not isinstance(policy, ByCost):
        raise PolicyError(f"policy {policy.name} has no compiled replay: use `playing.play_policy`")
    else:
        if curves.flat:  # as the policy does: as many nodes as the draft is deep
            kind, number = _FIXED, min(orders.ranks.shape[1], orders.max_nodes)
        elif policy.name == "unimodal":
            rule, cost, adapt, reach_scale = FIRST_DESCENT, curves.convex, False, 1.0
        elif policy.name == "priced":
            if price is None:
                return play_at_fixed_point(orders, curves, reach_scale, adapt)
            rule = PRICED
    chosen, accepted = _play(
        orders.phi, orders.sizes, orders.ranks, orders.chain_reached, orders.chain_lengths, orders.text_starts,
        cost, curves.bucket, kind, number, rule, _per_anchor(price, len(orders.sizes)), float(reach_scale), adapt,
    )  # fmt: skip
    used = float(np.mean(price)) if rule == PRICED and price is not None else None
    return _finish(policy.name, orders, curves, chosen, accepted, kind == _CHAIN, used)


def _per_anchor(price: float | NDArray[np.float64] | None, count: int) -> NDArray[np.float64]:
    """(A,) the price at every anchor; 0 where there is none."""
    return np.ascontiguousarray(np.broadcast_to(np.float64(0.0) if price is None else np.asarray(price, np.float64), (count,)))


def play_at_fixed_point(
    orders: Orders, curves: Curves, reach_scale: float = 1.0, adapt: bool = True, tolerance: float = 1e-4, max_rounds: int = 20
) -> Rounds:
    """`priced` with the price at which its throughput equals the price (Dinkelbach's method for ratios).

    Starts from the throughput of `exact`. With dependent rounds the iteration need not be monotone, so the best play
    that was seen is returned.
    """
    best = play(ByCost("exact"), orders, curves, None, reach_scale, adapt)
    price, found = best.tokens_per_second, None
    for _ in range(max_rounds):
        now = play(ByCost("priced"), orders, curves, price, reach_scale, adapt)
        if found is None or now.tokens_per_second > found.tokens_per_second:
            found = now
        if abs(now.tokens_per_second - price) <= tolerance * max(price, 1e-12):
            break
        price = now.tokens_per_second
    assert found is not None
    return found


def measured_scale(rounds: Rounds) -> float:
    """Accepted nodes over expected ones over all rounds; 1 where nothing was expected."""
    expected = float(np.nansum(rounds.expected))
    return float(rounds.accepted.sum()) / expected if expected > 0 else 1.0
