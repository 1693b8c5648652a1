"""The convex cost: monotone convex in verify tokens at every context, from few points.

The form the stopping rule of CaDDTree (arXiv 2606.01813) needs and the one that extrapolates; real curves are not
convex, so `table` stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from costmodel.errors import FitError

Array = NDArray[np.float64]
MAX_TOKEN_KNOTS = 16
MAX_CONTEXT_KNOTS = 10
SLANT_SHARES = (0.25, 0.5, 1.0, 2.0)  # tokens of the range per context of the range
SLANT_KNOTS = 8
SLANT_RESIDUAL = 2e-3  # relative, root mean square
NO_SLANTS = np.empty((0, 2))


@dataclass(frozen=True, eq=False)
class ConvexCost:
    """A hinge surface g(t, c) = sum_ij coefficients_ij phi_i(t) psi_j(c) + sum_k slant_coefficients_k (t + s_k c - u_k)+,
    anchored at what one token was measured to cost.

    phi = {1, (t - token_knots_i)+}, psi = {1, (c - context_knots_j)+}, coefficients not negative: g is monotone and convex
    in t. The slanted hinges let the knee move with the context. The anchor makes t = 1 exact at every context where it was
    measured and keeps both properties: where the
    measured b lies above g(1, c) the curve is max(g, b); where it lies below, the curve is the tangent from (1, b) to g up
    to the point of touch, and g from there on. Between those contexts the difference b - g(1, c) is interpolated. Nothing
    is ever charged less than `floor`, half the fastest point measured.
    """

    token_knots: Array  # (I - 1,)
    context_knots: Array  # (J - 1,)
    coefficients: Array  # (I, J)
    anchor_contexts: Array  # (A,), empty where t = 1 was never measured
    anchor_offsets: Array  # (A,) measured seconds of one token less g(1, c)
    floor: float
    slants: Array = field(default_factory=lambda: NO_SLANTS)  # (K, 2): s_k tokens per context token, u_k tokens
    slant_coefficients: Array = field(default_factory=lambda: NO_SLANTS[:, 0])  # (K,)

    def seconds(self, verify_tokens: object, context_tokens: object = 0) -> Array:
        """Seconds for t and c that broadcast, float64."""
        tokens, contexts = np.broadcast_arrays(np.asarray(verify_tokens, float), np.asarray(context_tokens, float))
        surface = self._surface(tokens, contexts)
        if not self.anchor_contexts.size:
            return np.maximum(surface, self.floor)
        result = np.empty(tokens.shape)
        for context in np.unique(contexts):
            chosen = contexts == context
            result[chosen] = self._anchored(tokens[chosen], surface[chosen], float(context))
        return np.maximum(result, self.floor)

    def slope(self, verify_tokens: float, context_tokens: float = 0) -> float:
        """Seconds per further verify token beyond `verify_tokens`."""
        here, next_one = self.seconds(np.array([verify_tokens, verify_tokens + 1.0]), context_tokens)
        return float(next_one - here)

    def _surface(self, tokens: Array, contexts: Array) -> Array:
        phi, psi = _basis(tokens, self.token_knots), _basis(contexts, self.context_knots)
        surface = np.einsum("...i,ij,...j->...", phi, self.coefficients, psi)
        return surface + _slanted(tokens, contexts, self.slants) @ self.slant_coefficients

    def _anchored(self, tokens: Array, surface: Array, context: float) -> Array:
        first = float(self._surface(np.asarray(1.0), np.asarray(context)))
        anchor = first + float(np.interp(context, self.anchor_contexts, self.anchor_offsets))
        if anchor >= first:
            return np.maximum(surface, anchor)
        # g is piecewise linear, so (g(t) - b) / (t - 1) is smallest at a knot or, far out, at the last slope.
        knots = np.concatenate([self.token_knots, self.slants[:, 1] - self.slants[:, 0] * context])
        knots = np.unique(knots[knots > 1])
        at_knots = (self._surface(knots, np.full(knots.shape, context)) - anchor) / (knots - 1)
        last_slope = float(self.coefficients[1:].sum(axis=0) @ _basis(np.asarray(context), self.context_knots))
        last_slope += float(self.slant_coefficients.sum())
        tangent = min(float(at_knots.min(initial=np.inf)), last_slope)
        touch = float(knots[at_knots.argmin()]) if knots.size and at_knots.min() <= last_slope else np.inf
        return np.where(tokens < touch, anchor + tangent * (tokens - 1), surface)


def _basis(values: Array, knots: Array) -> Array:
    """{1, (v - k)+} for every value, of shape (..., knots + 1)."""
    return np.concatenate([np.ones((*values.shape, 1)), np.maximum(values[..., None] - knots, 0.0)], axis=-1)


def _slanted(tokens: Array, contexts: Array, slants: Array) -> Array:
    """(t + s c - u)+ for every slant, of shape (..., K)."""
    return np.maximum(tokens[..., None] + contexts[..., None] * slants[:, 0] - slants[:, 1], 0.0)


def _make_slants(tokens: Array, contexts: Array) -> Array:
    """Candidates: four slopes about the diagonal of what was measured, and for each some knots; none for one context."""
    if np.unique(contexts).size < 2 or np.unique(tokens).size < 3:
        return NO_SLANTS
    found = []
    for share in SLANT_SHARES:
        slope = share * tokens.max() / contexts.max()
        along = np.unique(tokens + slope * contexts)[1:-1]
        found += [(slope, knot) for knot in _spread(along, SLANT_KNOTS)]
    return np.array(found).reshape(-1, 2)


def fit_convex(
    verify_tokens: object,
    context_tokens: object,
    seconds: object,
    max_token_knots: int = MAX_TOKEN_KNOTS,
    max_context_knots: int = MAX_CONTEXT_KNOTS,
) -> ConvexCost:
    """Fit points of shape (n,) by one non-negative least squares with relative weights, then anchor it at t = 1.

    Knots lie on measured sizes, in tokens and not in positions of the grid. Exact t = 1 matters because a plain step
    decides whether to speculate at all. Raises FitError for unusable points.
    """
    tokens, contexts, values = (np.asarray(item, dtype=float).ravel() for item in (verify_tokens, context_tokens, seconds))
    if not tokens.size or not tokens.size == contexts.size == values.size:
        raise FitError(f"expected as many sizes as contexts and seconds, got {tokens.size}, {contexts.size}, {values.size}")
    if not (np.all(np.isfinite(values)) and np.all(values > 0) and np.all(tokens >= 1) and np.all(contexts >= 0)):
        raise FitError("points need t >= 1, contexts >= 0 and positive finite seconds")
    token_knots = _spread(np.unique(tokens)[:-1], max_token_knots)
    context_knots = _spread(np.unique(contexts)[:-1], max_context_knots)
    phi, psi = _basis(tokens, token_knots), _basis(contexts, context_knots)
    slants = _make_slants(tokens, contexts)
    columns = np.einsum("ni,nj->nij", phi, psi).reshape(tokens.size, -1)
    num_tensor = columns.shape[1]
    solution = _solve(columns, values, 1.0 / values)
    if np.sqrt(np.mean((columns @ solution / values - 1) ** 2)) > SLANT_RESIDUAL:
        columns = np.concatenate([columns, _slanted(tokens, contexts, slants)], axis=1)
        solution = _solve(columns, values, 1.0 / values)
    else:
        slants = NO_SLANTS  # where the straight hinges do, they extrapolate better
    coefficients = solution[:num_tensor].reshape(token_knots.size + 1, context_knots.size + 1)
    used = solution[num_tensor:] > 0
    slants, slant_coefficients = slants[used], solution[num_tensor:][used]
    anchors = np.unique(contexts[tokens == 1])
    measured = np.array([values[(tokens == 1) & (contexts == context)].mean() for context in anchors])
    surface = np.einsum("i,ij,nj->n", _basis(np.asarray(1.0), token_knots), coefficients, _basis(anchors, context_knots))
    surface = surface + _slanted(np.ones(anchors.shape), anchors, slants) @ slant_coefficients
    floor = 0.5 * float(values.min())
    offsets = measured - surface
    return ConvexCost(token_knots, context_knots, coefficients, anchors, offsets, floor, slants, slant_coefficients)


def _solve(columns: Array, values: Array, weights: Array) -> Array:
    """Non-negative coefficients by weighted least squares; columns are scaled to unit length first."""
    weighted = columns * weights[:, None]
    lengths = np.linalg.norm(weighted, axis=0)
    lengths[lengths == 0] = 1.0
    try:
        solution, _ = nnls(weighted / lengths, values * weights)
    except RuntimeError as error:
        raise FitError(f"non-negative least squares did not converge: {error}") from error
    return solution / lengths


def _spread(candidates: Array, most: int) -> Array:
    """At most `most` of the candidates, first and last kept, evenly spread over their order."""
    if candidates.size <= most:
        return candidates
    return candidates[np.unique(np.round(np.linspace(0, candidates.size - 1, most)).astype(int))]
