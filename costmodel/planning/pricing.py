"""Seconds of rounds and plain steps for any batch, with interval and provenance, from a cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.cells import STAGES
from costmodel.intervals import PRIORS
from costmodel.model import CostModel

Array = NDArray[np.float64]
DEFAULT_BLOCK_SIZE = 16
BATCH_LOG_ERROR = 0.15  # of verifying, for every doubling beyond the measured batches: no rule is known to be closer


@dataclass(frozen=True, eq=False)
class Priced:
    """Seconds and the ends of their 90 % interval, each of the budgets' shape (m,)."""

    seconds: Array
    low: Array
    high: Array

    def case(self, name: str) -> Array:
        """Seconds where everything costs what is expected, its low end (`cheap`) or its high end (`dear`)."""
        return {"expected": self.seconds, "cheap": self.low, "dear": self.high}[name]


def cache_seconds(cost: CostModel, verify_tokens: Array, context_tokens: float, num_requests: int) -> Array:
    """What the cache of a context adds to a forward at the smallest measured one, seconds (n,), never falling with the context.

    Rising by isotonic regression over the measured contexts: where the cache is hidden behind the host's launch time, 2 % of
    noise at one context would otherwise become 20 % of a batch 64 times larger. Beyond the largest context as there.
    """
    contexts = np.array(sorted({cell.context_tokens for cell in cost.profile.verify if cell.num_requests == num_requests}), float)
    values = np.stack([np.asarray(cost.verify_seconds(verify_tokens, context, num_requests)) for context in contexts], 1)
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    n = len(contexts)
    means = [[(sums[:, b + 1] - sums[:, a]) / (b + 1 - a) for b in range(a, n)] for a in range(n)]
    rising = np.stack([np.max([np.min(means[a][k - a :], axis=0) for a in range(k + 1)], axis=0) for k in range(n)], 1)
    at = np.interp(context_tokens, contexts, np.arange(n, dtype=float))
    low, part = int(at), at - int(at)
    here = rising[:, low] + (part * (rising[:, low + 1] - rising[:, low]) if part else 0.0)
    return np.asarray(here - rising[:, 0])


class Pricer:
    """Prices rounds of r requests with n nodes each: draft(c, r) + select + verify(r (n + 1), c, r) + commit, as CostModel does.

    A batch that the profile measured, or that lies between two it measured, costs what the profile says. A larger batch r
    than the largest measured, r0, is estimated: products follow the total of verify tokens, the cache is read once per
    request, `verify = V(t, c0) + r / r0 x (V(t r0 / r, c) - V(t r0 / r, c0))` with V measured at r0 and c0 the smallest
    context, the difference by `cache_seconds`; the low end of its interval reads the cache as often as r0 did
    (the profile rule total_tokens), and both ends go 15 % further for every doubling of the batch. Drafting then grows as
    verifying as many tokens does, selecting and committing with r.
    """

    def __init__(self, name: str, cost: CostModel, draft_seconds: float | None = None) -> None:
        """`draft_seconds` (one drafter pass of the whole batch) replaces what the profile says."""
        self.name = name
        self.cost = cost
        self._draft_seconds = draft_seconds
        self._cells = cost.profile.verify
        self.measured_requests = sorted({cell.num_requests for cell in self._cells})
        self.block_size = cost.identity.block_size or DEFAULT_BLOCK_SIZE
        self._priced: dict[tuple[int, int, int], Priced] = {}

    @property
    def tensor_parallel(self) -> int:
        """GPUs that one copy of the target occupies."""
        return self.cost.identity.tensor_parallel or 1

    @property
    def not_charged(self) -> tuple[str, ...]:
        """Stages that neither the profile nor the caller gives; they cost 0 and every answer says so."""
        known = {cell.stage for cell in self.cost.profile.stages}
        known |= {"draft"} if self._draft_seconds is not None else set()
        return tuple(stage for stage in STAGES if stage not in known)

    def is_estimated(self, num_requests: int) -> bool:
        """Whether this batch lies outside what was measured."""
        return not self.measured_requests[0] <= num_requests <= self.measured_requests[-1]

    def provenance(self, num_requests: int) -> str:
        """The profile's provenance, or `estimated` for a batch outside what it measured."""
        return "estimated" if self.is_estimated(num_requests) else self.cost.provenance

    def priced_by(self, num_requests: int) -> str:
        """How a batch is priced, in words."""
        if num_requests in self.measured_requests:
            return "batch in the profile"
        if self.is_estimated(num_requests):
            return f"estimated from batch {self._base(num_requests)[0]}: cache read once per request"
        return "interpolated between batches"

    def outside(self, budget: int, context_tokens: int, num_requests: int) -> tuple[str, ...]:
        """What of this shape lies beyond the measured sizes and contexts."""
        found = []
        size, low, high = self.cost.measured_range(num_requests)
        if num_requests * (budget + 1) > size:
            found.append(f"{num_requests * (budget + 1)} verify tokens exceed the measured {size}")
        if context_tokens > high:
            found.append(f"context exceeds the measured {high}, which is charged")
        if context_tokens < low:
            found.append(f"context is below the measured {low}, which is charged")
        return tuple(found)

    def rounds(self, max_nodes: int, context_tokens: int, num_requests: int) -> Array:
        """Seconds of rounds with 1..max_nodes nodes per request, float64 of shape (max_nodes,)."""
        nodes = np.arange(1, max_nodes + 1, dtype=float)
        verify = self._verify(num_requests * (nodes + 1), context_tokens, num_requests)
        return verify + self._draft(context_tokens, num_requests) + self._host(nodes, context_tokens, num_requests)

    def plain(self, context_tokens: int, num_requests: int) -> float:
        """Seconds of one plain step of the batch."""
        verify = self._verify(np.array([float(num_requests)]), context_tokens, num_requests)
        base, share = self._base(num_requests)
        return float(verify[0]) + share * float(self.cost.commit_seconds(1, context_tokens, base))

    def round_interval(self, nodes: int, context_tokens: int, num_requests: int) -> Priced:
        """The round at one budget (0 is a plain step) with its interval, arrays of shape (1,)."""
        priced = self.budgets(nodes, context_tokens, num_requests)
        return Priced(priced.seconds[-1:], priced.low[-1:], priced.high[-1:])

    def budgets(self, max_nodes: int, context_tokens: int, num_requests: int) -> Priced:
        """Rounds with 0..max_nodes nodes per request (0 is a plain step) and their intervals, arrays (max_nodes + 1,).

        The ends of the parts add up, as if all erred in one direction: wide rather than too narrow. Kept once asked.
        """
        key = (max_nodes, context_tokens, num_requests)
        if key not in self._priced:
            self._priced[key] = self._price(*key)
        return self._priced[key]

    def _price(self, max_nodes: int, context_tokens: int, num_requests: int) -> Priced:
        nodes = np.arange(max_nodes + 1, dtype=float)
        tokens = num_requests * (nodes + 1)
        verify = self._verify(tokens, context_tokens, num_requests)
        low, high = self._verify_ends(tokens, verify, context_tokens, num_requests)
        rest = np.full((3, nodes.size), self.plain(context_tokens, num_requests) - float(verify[0]))
        if max_nodes:
            factors = (1.0, *self._draft_factors(context_tokens, num_requests))
            drafts = self._draft(context_tokens, num_requests) * np.array(factors)
            rest[:, 1:] = self._host(nodes[1:], context_tokens, num_requests) + drafts[:, None]
        return Priced(verify + rest[0], low + rest[1], high + rest[2])

    def _base(self, num_requests: int) -> tuple[int, float]:
        """The batch to ask the cost model for, and how many of it make this one."""
        if not self.is_estimated(num_requests):
            return num_requests, 1.0
        base = self.measured_requests[-1] if num_requests > self.measured_requests[-1] else self.measured_requests[0]
        return base, num_requests / base

    def _verify(self, tokens: Array, context_tokens: int, num_requests: int) -> Array:
        base, share = self._base(num_requests)
        if share == 1.0:
            return np.asarray(self.cost.verify_seconds(tokens, context_tokens, base))
        first = min(cell.context_tokens for cell in self._cells)
        total, each = np.maximum(tokens, 1.0), np.maximum(tokens / share, 1.0)
        cached = cache_seconds(self.cost, each, context_tokens, base)
        return np.asarray(self.cost.verify_seconds(total, first, base) + share * cached)

    def _verify_ends(self, tokens: Array, seconds: Array, context_tokens: int, num_requests: int) -> tuple[Array, Array]:
        base, share = self._base(num_requests)
        low, high = self.cost.verify_interval(tokens, context_tokens, base)
        if share == 1.0:
            return low, high
        alone = self.cost.verify_seconds(tokens, context_tokens, base)
        wider = np.exp(BATCH_LOG_ERROR * abs(np.log2(share)))
        return np.minimum(low, seconds * low / alone) / wider, np.maximum(high, seconds * high / alone) * wider

    def _draft(self, context_tokens: int, num_requests: int) -> float:
        if self._draft_seconds is not None:
            return self._draft_seconds
        base, share = self._base(num_requests)
        seconds = float(self.cost.draft_seconds(context_tokens, base))
        if share == 1.0 or seconds == 0:
            return seconds
        first = min(cell.context_tokens for cell in self._cells)
        sizes = np.array([num_requests * self.block_size, base * self.block_size], float)
        many, few = self.cost.verify_seconds(sizes, first, base)
        return seconds * float(many / few)

    def _draft_factors(self, context_tokens: int, num_requests: int) -> tuple[float, float]:
        """What the ends of the nearest draft cell are, relative to its seconds, widened by the provenance's prior."""
        cells = [cell for cell in self.cost.profile.stages if cell.stage == "draft" and cell.seconds > 0]
        if self._draft_seconds is not None or not cells:
            return 1.0, 1.0
        near = min(cells, key=lambda cell: (abs(cell.num_requests - num_requests), abs(cell.context_tokens - context_tokens),
                                            abs(cell.size - self.block_size)))  # fmt: skip
        prior = np.exp(PRIORS[self.cost.provenance])
        low = near.seconds if near.low_seconds is None else near.low_seconds
        high = near.seconds if near.high_seconds is None else near.high_seconds
        return float(low / near.seconds / prior), float(high / near.seconds * prior)

    def _host(self, nodes: Array, context_tokens: int, num_requests: int) -> Array:
        """Selecting and committing; where the batch is estimated, they are repeated for every further request."""
        base, share = self._base(num_requests)
        select = self.cost.select_seconds(base * (nodes + 1) - 1, context_tokens, base)
        return share * (np.asarray(select) + self.cost.commit_seconds(None, context_tokens, base))
