"""What a second is worth: the live decoder's running throughput, and how far its reach is off."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR_TOKENS = 2.0  # of a round that a price found elsewhere is worth


@dataclass
class RunningRatio:
    """Sum of numerators over sum of denominators, old terms fading by half every `half_life` updates.

    `prior_weight` terms of an expected ratio may be put in first; they fade like all the others.
    """

    half_life: float
    numerator: float = 0.0
    denominator: float = 0.0
    count: float = 0.0  # effective number of terms held

    def add(self, numerator: float, denominator: float) -> None:
        """Take in one term."""
        keep = 0.5 ** (1.0 / self.half_life)
        self.numerator = keep * self.numerator + numerator
        self.denominator = keep * self.denominator + denominator
        self.count = keep * self.count + 1.0

    def fade(self, factor: float) -> None:
        """Give all terms held `factor` of their weight."""
        self.numerator *= factor
        self.denominator *= factor
        self.count *= factor

    def put_prior(self, ratio: float, denominator: float, weight: float) -> None:
        """Act as if `weight` terms of this ratio, each of size `denominator`, had been seen."""
        self.numerator += ratio * denominator * weight
        self.denominator += denominator * weight
        self.count += weight

    @property
    def value(self) -> float | None:
        """The ratio, or None before anything was taken in."""
        return self.numerator / self.denominator if self.denominator > 0 else None


class PriceTracker:
    """The price: long-run tokens per second of everything the decoder does (renewal-reward; Dinkelbach's parameter).

    A round-based decoder that charges every second its own long-run throughput maximises that throughput; tracking it
    from the last few hundred rounds is the fixed-point iteration, done while decoding.
    """

    def __init__(self, initial: float | None = None, half_life_rounds: float = 256.0, min_rounds: int = 8) -> None:
        self.min_rounds = min_rounds
        self._initial = initial
        self._ratio = RunningRatio(half_life_rounds)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one round or plain step: tokens committed and seconds spent."""
        if self._initial is not None and self._ratio.count == 0:
            # Rounds as the initial price has them: the first one's own seconds hold what is done only once.
            self._ratio.put_prior(self._initial, PRIOR_TOKENS / self._initial, 4 * self.min_rounds)
        self._ratio.add(num_tokens, seconds)

    @property
    def price(self) -> float | None:
        """Tokens per second, the initial price until rounds were seen, or None while fewer than `min_rounds` were."""
        if self._ratio.count < self.min_rounds * 0.9:
            return self._initial
        return self._ratio.value


@dataclass(frozen=True)
class PriceRange:
    """The price that replay found for rounds at contexts from `context_low` to `context_high` tokens, both included."""

    context_low: int
    context_high: int
    price: float


def prices_at(ranges: Sequence[PriceRange], contexts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(A,) the price of the range of every context, as `RangedPrice` finds it: beyond all, the nearest below or the first."""
    ordered = sorted(ranges, key=lambda item: item.context_low)
    place = np.searchsorted([item.context_low for item in ordered], contexts, side="right") - 1
    return np.array([item.price for item in ordered])[np.maximum(place, 0)]


class RangedPrice:
    """A price tracker for every range of contexts; a context outside all of them goes to the nearest one below, or the first.

    Where a text has to get through every context anyway, a token saved at one context is worth a round's time at that
    context: so each range has its own price. Without ranges there is one tracker.
    """

    def __init__(self, ranges: Sequence[PriceRange] = (), initial: float | None = None) -> None:
        ordered = sorted(ranges, key=lambda item: item.context_low)
        self._lows = [item.context_low for item in ordered]
        self._trackers = [PriceTracker(item.price) for item in ordered] or [PriceTracker(initial)]

    def at(self, context_tokens: int) -> PriceTracker:
        """The tracker of a context."""
        return self._trackers[max(bisect_right(self._lows, context_tokens) - 1, 0)]


class ReachScale:
    """Accepted nodes over the sum of reach that was expected of them: 1 if reach is right, below 1 if too hopeful.

    Shrunk towards the start value by as much as `prior_nodes` expected nodes, and kept within [0.25, 1.5].
    """

    def __init__(self, initial: float = 1.0, half_life_rounds: float = 256.0, prior_nodes: float = 40.0) -> None:
        self.initial = initial
        self.prior_nodes = prior_nodes
        self._ratio = RunningRatio(half_life_rounds)

    def observe(self, num_accepted: int, expected_accepted: float) -> None:
        """Take in one drafting round."""
        self._ratio.add(float(num_accepted), expected_accepted)

    @property
    def value(self) -> float:
        """The factor reach is to be multiplied with."""
        raw = (self._ratio.numerator + self.initial * self.prior_nodes) / (self._ratio.denominator + self.prior_nodes)
        return min(max(raw, 0.25), 1.5)
