"""The cost of a mixture of experts: a convex part, and a concave part that ends when every expert is awake.

Reading the weights of the experts that t tokens wake costs in proportion to their expected number,
E (1 - (1 - k/E)^t). Routing is skewed, so popular experts fill up first: the concave part is a non-negative mixture of
such terms with several k. All of it is one non-negative least squares; one token stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from costmodel.errors import FitError
from costmodel.experts import expected_experts

Array = NDArray[np.float64]
POPULARITIES = (4.0, 2.0, 1.0, 0.5, 0.25, 0.1)  # of the experts that fill up together, times k
MAX_KNOTS = 6
FIRST_KNOT = 16.0  # below, only the expert terms bend the curve


@dataclass(frozen=True, eq=False)
class ExpertCost:
    """seconds(t, c) = first(c) + sum_j a_j (D_j(t) - D_j(1)) + sum_i b_i (t - k_i)+ ; a, b not negative.

    D_j is the expected number of distinct experts at k_j per token; first(c), linear between the measured contexts, is
    what one token was measured to cost, so that t = 1 is exact.
    """

    num_experts: int
    per_token: Array  # (J,)
    expert_seconds: Array  # (J,) a_j: seconds to read one expert in all layers
    knots: Array  # (I,)
    slopes: Array  # (I,)
    contexts: Array  # (C,)
    first_seconds: Array  # (C,)

    def seconds(self, verify_tokens: object, context_tokens: object = 0) -> Array:
        """Seconds for t and c that broadcast, float64."""
        tokens, contexts = np.broadcast_arrays(np.asarray(verify_tokens, float), np.asarray(context_tokens, float))
        first = np.interp(contexts, self.contexts, self.first_seconds)
        return first + _columns(tokens, self.num_experts, self.per_token, self.knots) @ np.concatenate(
            [self.expert_seconds, self.slopes]
        )

    def concave_seconds(self, verify_tokens: object) -> Array:
        """The expert part alone: what it adds to one token."""
        tokens = np.asarray(verify_tokens, float)
        return _columns(tokens, self.num_experts, self.per_token, np.empty(0)) @ self.expert_seconds


def _columns(tokens: Array, num_experts: int, per_token: Array, knots: Array) -> Array:
    """(..., J + I)."""
    woken = [np.asarray(expected_experts(tokens, num_experts, k)) - expected_experts(1.0, num_experts, k) for k in per_token]
    hinges = [np.maximum(tokens - knot, 0.0) - max(1.0 - knot, 0.0) for knot in knots]
    return np.stack([*woken, *hinges], axis=-1)


def fit_experts(
    verify_tokens: object, context_tokens: object, seconds: object, num_experts: int, experts_per_token: float
) -> ExpertCost | None:
    """Fit points of shape (n,) with relative weights; None where one token or three sizes were not measured."""
    tokens, contexts, values = (np.asarray(item, dtype=float).ravel() for item in (verify_tokens, context_tokens, seconds))
    alone = tokens == 1
    if not alone.any() or np.unique(tokens).size < 3 or not 0 < experts_per_token < num_experts:
        return None
    places = np.unique(contexts[alone])
    first = np.array([values[alone & (contexts == place)].mean() for place in places])
    above = np.maximum(values - np.interp(contexts, places, first), 0.0)
    wide = np.unique(tokens[tokens >= FIRST_KNOT])[:-1]
    chosen = np.unique(np.linspace(0, wide.size - 1, MAX_KNOTS).astype(int)) if wide.size else np.empty(0, int)
    knots = np.concatenate([[1.0], wide[chosen]])
    per_token = np.array([p * experts_per_token for p in POPULARITIES if p * experts_per_token < num_experts])
    columns = _columns(tokens, num_experts, per_token, knots) / values[:, None]
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0
    try:
        solution, _ = nnls(columns / lengths, above / values)
    except RuntimeError as error:
        raise FitError(f"non-negative least squares did not converge: {error}") from error
    solution = solution / lengths
    return ExpertCost(num_experts, per_token, solution[: per_token.size], knots, solution[per_token.size :], places, first)
