"""What a round of r requests costs by its total of nodes, at every context: measured batches, and estimates beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.pricing import cache_seconds
from selector.batch import batch_curve
from selector.errors import CostCurveError
from selector.replaying.rounds import CONTEXT_BUCKET_TOKENS
from selector.search.kernels import convex_minorant

Array = NDArray[np.float64]
DEFAULT_BLOCK_SIZE = 16  # of the drafter, where the profile does not say


@dataclass(frozen=True, eq=False)
class LoadCurves:
    """Round costs of one batch size at the contexts that a load visits.

    Attributes:
        num_requests: r. provenance: the profile's, or "estimated" for a batch outside what it measured.
        table, minorant: (B, M + 1) seconds of a drafting round with n nodes in all (n + r verify tokens) at index n, and
            the largest convex curve below. plain: (B,) seconds of a plain step of the batch.
        first_bucket: row 0 is for contexts that round to this many times 16 tokens.
    """

    num_requests: int
    provenance: str
    table: Array
    minorant: Array
    plain: Array
    first_bucket: int

    @property
    def max_total_nodes(self) -> int:
        """Nodes of all requests in the largest round, M."""
        return self.table.shape[1] - 1


def load_curves(cost: Any, num_requests: int, min_context_tokens: float, max_context_tokens: float, max_nodes: int) -> LoadCurves:
    """The curves for mean contexts from `min_context_tokens` to `max_context_tokens`, at most `max_nodes` per request.

    Never beyond the verify tokens that the profile measured. A batch that was measured, or lies between two that were, costs
    what `cost` (a `costmodel.CostModel`) says. Any other is estimated from the nearest measured batch r0, by the rule of
    `costmodel.planning.pricing.Pricer`: products follow the total of verify tokens, the cache is read once per request,
    drafting grows as verifying as many tokens does, selecting and committing are repeated per request.

    Raises CostCurveError if r alone exceeds the measured verify tokens.
    """
    r = int(num_requests)
    size = min(int(cost.max_verify_tokens) - r, max_nodes * r)
    if r < 1 or size < 0:
        raise CostCurveError(f"a batch of {r} requests needs 1 to {cost.max_verify_tokens} verify tokens for its roots alone")
    measured = sorted({cell.num_requests for cell in cost.profile.verify})
    base = min(max(r, measured[0]), measured[-1])
    buckets = np.rint(np.array([min_context_tokens, max_context_tokens]) / CONTEXT_BUCKET_TOKENS).astype(int)
    rows, plain = [], []
    for context in range(CONTEXT_BUCKET_TOKENS * buckets[0], CONTEXT_BUCKET_TOKENS * buckets[1] + 1, CONTEXT_BUCKET_TOKENS):
        if base == r:
            rows.append(batch_curve(cost, r, size, context))
            plain.append(cost.plain_seconds(context, r))
        else:
            rows.append(_estimated_rounds(cost, r, base, size, context))
            step = _estimated_verify(cost, np.array([float(r)]), r, base, context)[0]
            plain.append(step + r / base * cost.commit_seconds(1, context, base))
    minorants = np.array([convex_minorant(row) for row in rows])
    provenance = str(cost.provenance) if base == r else "estimated"
    return LoadCurves(r, provenance, np.array(rows), minorants, np.array(plain, float), int(buckets[0]))


def _first_context(cost: Any) -> int:
    return min(cell.context_tokens for cell in cost.profile.verify)


def _estimated_verify(cost: Any, tokens: Array, num_requests: int, base: int, context: int) -> Array:
    """V(t, c0) + r / r0 x (V(t r0 / r, c) - V(t r0 / r, c0)), V at r0, c0 the smallest context; see `cache_seconds`."""
    share, first = num_requests / base, _first_context(cost)
    each = np.maximum(tokens / share, 1.0)
    cached = cache_seconds(cost, each, context, base)
    return np.asarray(cost.verify_seconds(tokens, first, base) + share * cached, float)


def _estimated_rounds(cost: Any, num_requests: int, base: int, size: int, context: int) -> Array:
    tokens = num_requests + np.arange(size + 1, dtype=float)
    block, first = cost.identity.block_size or DEFAULT_BLOCK_SIZE, _first_context(cost)
    draft = float(cost.draft_seconds(context, base))
    if draft:
        many, few = cost.verify_seconds(np.array([num_requests * block, base * block], float), first, base)
        draft *= float(many / few)
    select = np.asarray(cost.select_seconds(base * tokens / num_requests - 1, context, base))
    host = num_requests / base * (select + cost.commit_seconds(None, context, base))
    return np.asarray(_estimated_verify(cost, tokens, num_requests, base, context) + draft + host, float)
