"""Every anchor of a trace searched once: what any policy needs to be replayed, whatever it costs and charges.

The order of nodes does not depend on the policy, only the number of nodes taken does. So per anchor the running sum of
reach and the places of the target's own path in the order are enough: a policy is then a rule on one row of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.kernels import order_all
from selector.trace import Trace


@dataclass(frozen=True, eq=False)
class Orders:
    """Searched anchors of all texts of a trace, one after the other; A is their total.

    Attributes:
        phi: (A, N + 1) float64, sum of the first n reaches at n. deepest: (A, N + 1) int16, depth of the first n nodes.
        sizes: (A,) nodes the trellis had, at most N. ranks: (A, depth) place in the order of the target's own token at
        every depth, NEVER if it is not there. chain_reached: (A,) leading depths at which the top candidate is the target's.
        chain_lengths: (A,) depths that have a candidate. hits: (A, depth) column of the target's own token, -1 not
        listed, -2 beyond the text. log_edges: (A, depth, K) as drafted. context_tokens: (A,). text_starts: (T + 1,).
    """

    phi: NDArray[np.float64]
    deepest: NDArray[np.int16]
    sizes: NDArray[np.int32]
    ranks: NDArray[np.int32]
    chain_reached: NDArray[np.int32]
    chain_lengths: NDArray[np.int32]
    hits: NDArray[np.int64]
    log_edges: NDArray[np.float64]
    context_tokens: NDArray[np.int64]
    text_starts: NDArray[np.int64]

    @property
    def max_nodes(self) -> int:
        """Largest tree that can be replayed, N."""
        return self.phi.shape[1] - 1

    @property
    def num_texts(self) -> int:
        """Number of texts, T."""
        return len(self.text_starts) - 1

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """(T,) tokens that decoding rounds have to produce: all generated ones but the first."""
        return np.maximum(np.diff(self.text_starts) - 1, 0)

    @property
    def visitable(self) -> NDArray[np.bool_]:
        """(A,) whether a round can start at the anchor: every one but the last of a text."""
        mask = np.ones(len(self.sizes), bool)
        mask[self.text_starts[1:][np.diff(self.text_starts) > 0] - 1] = False
        return mask


def build_orders(trace: Trace, max_nodes: int, calibration: Calibration | None = None) -> Orders:
    """Search every anchor of a trace for its first `max_nodes` nodes (about 10 microseconds each)."""
    depth, top_k = trace.depth, trace.top_k
    token_ids = _stack([text.draft_token_ids for text in trace.texts], np.int64, (0, depth, top_k))
    drafted = _stack([text.draft_logprobs for text in trace.texts], np.float64, (0, depth, top_k))
    drafted = np.where((token_ids >= 0) & (drafted > -np.inf), drafted, -np.inf)  # NaN and pads never enter
    drafted[np.isneginf(drafted.max(axis=2, initial=-np.inf)).cumsum(axis=1) > 0] = -np.inf  # nothing below an empty row
    next_tokens = _stack([text.next_tokens() for text in trace.texts], np.int64, (0, depth))
    edges = drafted if calibration is None else calibration.apply_to_batch(drafted)
    phi, deepest, sizes, ranks = order_all(edges, token_ids, next_tokens, int(max_nodes))
    found = token_ids == next_tokens[:, :, None]
    hits = np.where(found.any(axis=2), found.argmax(axis=2), -1)
    hits[next_tokens == -2] = -2
    top = np.take_along_axis(token_ids, _top_columns(edges, token_ids)[:, :, None], axis=2)[:, :, 0]
    real = edges.max(axis=2, initial=-np.inf) > -np.inf
    return Orders(
        phi, deepest, sizes, ranks,
        ((top == next_tokens) & real).cumprod(axis=1).sum(axis=1).astype(np.int32),
        real.cumprod(axis=1).sum(axis=1).astype(np.int32),
        hits, drafted,
        np.concatenate([text.num_prompt_tokens + np.arange(text.num_anchors) for text in trace.texts] or [np.zeros(0, np.int64)]),
        np.concatenate([[0], np.cumsum([text.num_anchors for text in trace.texts])]).astype(np.int64),
    )  # fmt: skip


def _stack(arrays: list[NDArray], dtype: type, empty_shape: tuple[int, ...]) -> NDArray:
    return np.ascontiguousarray(np.concatenate(arrays), dtype) if arrays else np.zeros(empty_shape, dtype)


def _top_columns(edges: NDArray[np.float64], token_ids: NDArray[np.int64]) -> NDArray[np.intp]:
    """Column of the most probable candidate of every row, ties by lower token id."""
    best = edges.max(axis=2, keepdims=True, initial=-np.inf)
    return np.where(edges == best, token_ids, np.iinfo(np.int64).max).argmin(axis=2)
