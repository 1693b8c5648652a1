"""The numbers under the figures, as plain JSON types: ranks, coverage, sweeps over budgets, and a round's stages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.policies import FixedShape
from selector.replaying.ceilings import listed_depths
from selector.replaying.orders import Orders
from selector.replaying.replay import BUDGET_GRID
from selector.replaying.rounds import CONTEXT_BUCKET_TOKENS, Curves, play
from selector.trace import Trace

COVERAGE_BUDGETS = (8, 16, 32, 64, 128, 256, 512)


def rank_shares(trace: Trace) -> dict[str, Any]:
    """How often the target's own token is the drafter's r-th candidate, by depth, over every place of the texts.

    Ranks by the drafter's log-probability, ties to the earlier listed. `shares` (depth, len(ranks)); the last of
    `ranks` is "not listed". `places` (depth,) is over how many anchors.
    """
    bounds = _doubling(trace.top_k)
    labels = [str(high) if low == high else f"{low}-{high}" for low, high in bounds] + ["not listed"]
    counts = np.zeros((trace.depth, len(labels)), np.int64)
    for text in trace.texts:
        next_tokens = text.next_tokens()
        found = text.draft_token_ids == next_tokens[:, :, None]  # (A, depth, K)
        known = np.where(np.isnan(text.draft_logprobs), -np.inf, text.draft_logprobs)
        own = np.where(found, known, -np.inf).max(axis=2, initial=-np.inf)
        column = found.argmax(axis=2)
        earlier = np.arange(trace.top_k) < column[:, :, None]
        rank = 1 + ((known > own[:, :, None]) | ((known == own[:, :, None]) & earlier)).sum(axis=2)
        listed = found.any(axis=2) & (own > -np.inf)
        for index, (low, high) in enumerate(bounds):
            counts[:, index] += (listed & (rank >= low) & (rank <= high)).sum(axis=0)
        counts[:, -1] += (~listed & (next_tokens >= 0)).sum(axis=0)
    places = counts.sum(axis=1)
    shares = counts / np.maximum(places, 1)[:, None]
    return {"depths": list(range(1, trace.depth + 1)), "ranks": labels, "shares": shares.tolist(), "places": places.tolist()}


def _doubling(top_k: int) -> list[tuple[int, int]]:
    """1, 2, 3-4, 5-8, ... up to K."""
    bounds, low = [(1, 1)], 2
    while low <= top_k:
        bounds.append((low, min(2 * (low - 1), top_k)))
        low = 2 * (low - 1) + 1
    return bounds


def coverage(orders: Orders, budgets: tuple[int, ...] = COVERAGE_BUDGETS) -> dict[str, Any]:
    """How often the target's own path is in the tree of the first n nodes down to each depth, over every place of the texts.

    `shares` (len(budgets), depth); `listed` (depth,) the same for a tree of all candidates; `accepted_nodes` (len(budgets),)
    mean accepted nodes of a round that starts anywhere.
    """
    depths = np.arange(1, orders.ranks.shape[1] + 1)
    exists = orders.hits > -2  # (A, depth)
    places = np.maximum(exists.sum(axis=0), 1)
    covered = [(orders.ranks < n) & exists for n in budgets]
    listed = listed_depths(orders)[:, None] >= depths
    starts = max(int(orders.visitable.sum()), 1)
    return {
        "depths": depths.tolist(),
        "budgets": list(budgets),
        "shares": [(found.sum(axis=0) / places).tolist() for found in covered],
        "listed": (listed.sum(axis=0) / places).tolist(),
        "accepted_nodes": [float(found.sum() / starts) for found in covered],
        "places": places.tolist(),
    }


def sweep(orders: Orders, curves: Curves, kind: str) -> dict[str, list[float]]:
    """Every budget of the grid (`fixed`) or every length (`chain`) played: what it yields and how much of it is accepted."""
    limit = min(orders.ranks.shape[1], orders.max_nodes) if kind == "chain" else orders.max_nodes
    sizes = range(1, limit + 1) if kind == "chain" else [n for n in BUDGET_GRID if n <= limit]
    columns: dict[str, list[float]] = {"nodes": [], "accepted_per_verified": [], "tokens_per_round": [], "tokens_per_second": []}
    for size in sizes:
        rounds = play(FixedShape(kind, size), orders, curves)
        columns["nodes"].append(size)
        columns["accepted_per_verified"].append(float(rounds.accepted.sum() / max(rounds.nodes.sum(), 1)))
        columns["tokens_per_round"].append(float(rounds.text_tokens.sum() / max(len(rounds.nodes), 1)))
        columns["tokens_per_second"].append(rounds.tokens_per_second)
    return columns


def stage_seconds(cost: Any, orders: Orders, scoring_seconds: float = 0.0) -> dict[str, Any]:
    """Seconds of every stage of a round of n nodes, at the median context of the trace; they sum to the round's seconds.

    Scoring, where there is any, is a stage of its own.
    """
    at = np.median(orders.context_tokens[orders.visitable]) if orders.visitable.any() else 0
    context = int(CONTEXT_BUCKET_TOKENS * round(at / CONTEXT_BUCKET_TOKENS))
    nodes = np.arange(orders.max_nodes + 1)
    constant = np.ones(len(nodes))
    stages: dict[str, NDArray[np.float64]] = {
        "draft": constant * cost.draft_seconds(context),
        "select": constant * cost.select_seconds(nodes.astype(float), context),
        "verify": constant * cost.verify_seconds(nodes + 1.0, context),
        "commit": constant * cost.commit_seconds(None, context),
    }
    if scoring_seconds > 0:
        stages["score"] = constant * scoring_seconds
    seconds = {name: values.tolist() for name, values in stages.items()}
    return {"context_tokens": context, "nodes": nodes.tolist(), "seconds": seconds, "plain": float(cost.plain_seconds(context))}
