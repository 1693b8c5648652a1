"""The price by range of contexts: what rounds there yielded per second, where there are rounds enough to tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from selector.price import PriceRange
from selector.replaying.orders import Orders
from selector.replaying.rounds import Rounds

NUM_RANGES, MIN_ROUNDS = 3, 200  # terciles of the contexts of rounds, joined where one would hold fewer rounds


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
    lows = [int(contexts.min()), *_cuts(contexts)]
    highs = [*(low - 1 for low in lows[1:]), int(contexts.max())]
    made = []
    for low, high in zip(lows, highs, strict=True):
        inside = (contexts >= low) & (contexts <= high)
        made.append(PriceRange(low, high, float(tokens[inside].sum()) / float(seconds[inside].sum())))
    return made


def _cuts(contexts: NDArray[np.int64]) -> list[int]:
    """First contexts of all ranges but the first: quantiles of the contexts, less those that leave a range too few rounds.

    Contexts repeat, so a quantile may leave any number of rounds below it.
    """
    count = max(1, min(NUM_RANGES, len(contexts) // MIN_ROUNDS))
    ordered, cuts, begin = np.sort(contexts), [], 0
    for cut in np.unique(np.ceil(np.quantile(contexts, np.arange(1, count) / count))).astype(np.int64).tolist():
        end = int(np.searchsorted(ordered, cut))
        if end - begin >= MIN_ROUNDS and len(ordered) - end >= MIN_ROUNDS:
            cuts.append(cut)
            begin = end
    return cuts
