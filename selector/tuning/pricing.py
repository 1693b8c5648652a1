"""The price by range of contexts: what rounds there yielded per second, where there are rounds enough to tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from selector.orders import Orders
from selector.price import PriceRange
from selector.rounds import Rounds

NUM_RANGES, MIN_ROUNDS = 3, 200  # terciles of the contexts of rounds, fewer where a range would hold fewer rounds


def round_tokens(rounds: Rounds, orders: Orders) -> NDArray[np.int64]:
    """(R,) tokens that every round committed: accepted nodes and one more, cut at the end of the text."""
    text = np.searchsorted(orders.text_starts, rounds.visited, side="right") - 1
    left = orders.text_starts[text + 1] - 1 - rounds.visited
    return np.minimum(rounds.accepted + 1, left)


def price_ranges(contexts: NDArray[np.int64], tokens: NDArray[np.int64], seconds: NDArray[np.float64]) -> list[PriceRange]:
    """Tokens per second by quantile of context, for rounds given by (R,) context, tokens and seconds; none without rounds.

    Ranges touch, and together they go from the smallest to the largest context.
    """
    if len(contexts) == 0:
        return []
    count = max(1, min(NUM_RANGES, len(contexts) // MIN_ROUNDS))
    shares = np.arange(1, count) / count
    cuts = np.unique(np.ceil(np.quantile(contexts, shares)).astype(np.int64)) if len(shares) else np.zeros(0, np.int64)
    cuts = cuts[cuts > contexts.min()]
    place = np.searchsorted(cuts, contexts, side="right")
    lows = [int(contexts.min()), *cuts.tolist()]
    highs = [*(cuts - 1).tolist(), int(contexts.max())]
    made = []
    for i, (low, high) in enumerate(zip(lows, highs, strict=True)):
        spent = float(seconds[place == i].sum())
        made.append(PriceRange(low, high, float(tokens[place == i].sum()) / spent))
    return made


def prices_at(ranges: Sequence[PriceRange], contexts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(A,) the price of the range of every context; outside all of them the nearest below, or the first."""
    lows = np.array([item.context_low for item in ranges])
    return np.array([item.price for item in ranges])[np.maximum(np.searchsorted(lows, contexts, side="right") - 1, 0)]
