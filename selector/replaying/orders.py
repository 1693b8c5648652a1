"""Every anchor of a trace searched once: what any policy needs to be replayed, whatever it costs and charges.

The order of nodes does not depend on the policy, only the number of nodes taken does. So per anchor the running sum of
reach and the places of the target's own path in the order are enough: a policy is then a rule on one row of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.scoring import EdgeScorer, score_chunks, scored
from selector.search.expansion import order_all
from selector.trace import Trace
from selector.trellis import Trellis


@dataclass(frozen=True, eq=False)
class Anchors:
    """The drafts of all texts of a trace, one after the other, before any search.

    Attributes: token_ids, log_edges: (A, depth, K), nothing below an empty row. next_tokens: (A, depth), -2 beyond the text.
    root_token_ids: (A,).
    """

    token_ids: NDArray[np.int64]
    log_edges: NDArray[np.float64]
    next_tokens: NDArray[np.int64]
    root_token_ids: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace) -> Anchors:
        """Stack the texts of a trace."""
        depth, top_k = trace.depth, trace.top_k
        token_ids = _stack([text.draft_token_ids for text in trace.texts], np.int64, (0, depth, top_k))
        drafted = _stack([text.draft_logprobs for text in trace.texts], np.float64, (0, depth, top_k))
        drafted = np.where((token_ids >= 0) & (drafted > -np.inf), drafted, -np.inf)  # NaN and pads never enter
        drafted[np.isneginf(drafted.max(axis=2, initial=-np.inf)).cumsum(axis=1) > 0] = -np.inf  # nothing below an empty row
        next_tokens = _stack([text.next_tokens() for text in trace.texts], np.int64, (0, depth))
        roots = _stack([text.token_ids[text.num_prompt_tokens :] for text in trace.texts], np.int64, (0,))
        return cls(token_ids, drafted, next_tokens, roots)

    def select(self, at: NDArray[np.int64]) -> Anchors:
        """Some of the anchors."""
        return Anchors(self.token_ids[at], self.log_edges[at], self.next_tokens[at], self.root_token_ids[at])

    @cached_property
    def hits(self) -> NDArray[np.int64]:
        """(A, depth) column of the target's own token, -1 not listed, -2 beyond the text."""
        found = self.token_ids == self.next_tokens[:, :, None]
        hits = np.where(found.any(axis=2), found.argmax(axis=2), -1)
        hits[self.next_tokens == -2] = -2
        return hits


@dataclass(frozen=True, eq=False)
class Orders:
    """Searched anchors of all texts of a trace, one after the other; A is their total.

    Attributes:
        phi: (A, N + 1) float64, sum of the first n reaches at n. deepest: (A, N + 1) int16, depth of the first n nodes.
        sizes: (A,) nodes the trellis had, at most N. ranks: (A, depth) place in the order of the target's own token at
        every depth, NEVER if it is not there. chain_reached: (A,) leading depths at which the chain (the best child of the
        best child and so on) is the target's own path. chain_lengths: (A,) depths of the chain. context_tokens: (A,).
        text_starts: (T + 1,). anchors: the drafts. calibration, scorer: what they were searched with, if anything.
    """

    phi: NDArray[np.float64]
    deepest: NDArray[np.int16]
    sizes: NDArray[np.int32]
    ranks: NDArray[np.int32]
    chain_reached: NDArray[np.int32]
    chain_lengths: NDArray[np.int32]
    context_tokens: NDArray[np.int64]
    text_starts: NDArray[np.int64]
    anchors: Anchors
    calibration: Calibration | None = None
    scorer: EdgeScorer | None = None

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

    @property
    def log_edges(self) -> NDArray[np.float64]:
        """(A, depth, K) as drafted."""
        return self.anchors.log_edges

    @property
    def hits(self) -> NDArray[np.int64]:
        """(A, depth) column of the target's own token, -1 not listed, -2 beyond the text."""
        return self.anchors.hits

    def anchors_of(self, texts: Sequence[int]) -> NDArray[np.int64]:
        """Indices of the anchors of some texts, text by text."""
        ranges = [np.arange(self.text_starts[i], self.text_starts[i + 1]) for i in texts]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def select(self, texts: Sequence[int]) -> Orders:
        """The searched anchors of some texts."""
        at = self.anchors_of(texts)
        lengths = np.diff(self.text_starts)[list(texts)]
        return replace(
            self, phi=self.phi[at], deepest=self.deepest[at], sizes=self.sizes[at], ranks=self.ranks[at],
            chain_reached=self.chain_reached[at], chain_lengths=self.chain_lengths[at],
            context_tokens=self.context_tokens[at], text_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            anchors=self.anchors.select(at),
        )  # fmt: skip

    def trellis(self, anchor: int) -> Trellis:
        """The trellis that was searched at an anchor: as drafted, calibrated or scored."""
        drafted = Trellis(self.anchors.token_ids[anchor], self.log_edges[anchor])
        if self.scorer is not None:
            return scored(self.scorer, drafted, int(self.anchors.root_token_ids[anchor]))
        return drafted if self.calibration is None else replace(drafted, log_edges=self.calibration.apply(drafted.log_edges))


def build_orders(
    trace: Trace, max_nodes: int, calibration: Calibration | None = None, scorer: EdgeScorer | None = None
) -> Orders:
    """Search every anchor of a trace for its first `max_nodes` nodes (about 10 microseconds each).

    With a scorer, edges are its own (it carries its own calibration, `calibration` is not applied), scored in chunks of
    anchors so that memory stays small.
    """
    anchors = Anchors.of(trace)
    parts = []
    if scorer is not None:
        calibration = None
        for part, edges in score_chunks(scorer, anchors.token_ids, anchors.log_edges, anchors.root_token_ids):
            parts.append(_search(edges, anchors.token_ids[part, :, : edges.shape[3]], anchors.next_tokens[part], max_nodes))
    if not parts:  # no scorer, or nothing to score
        edges = anchors.log_edges if calibration is None else calibration.apply_to_batch(anchors.log_edges)
        parts = [_search(edges[:, :, None, :], anchors.token_ids, anchors.next_tokens, max_nodes)]
    phi, deepest, sizes, ranks, chain_reached, chain_lengths = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
    contexts = [text.num_prompt_tokens + np.arange(text.num_anchors) for text in trace.texts]
    return Orders(
        phi, deepest, sizes, ranks, chain_reached, chain_lengths, _stack(contexts, np.int64, (0,)),
        np.concatenate([[0], np.cumsum([text.num_anchors for text in trace.texts])]).astype(np.int64),
        anchors, calibration, scorer,
    )  # fmt: skip


def _search(edges: NDArray[np.float64], token_ids: NDArray[np.int64], next_tokens: NDArray[np.int64], max_nodes: int) -> Any:
    """Orders of (B, depth, P, K) edges and, beside them, how far the chain goes and how much of it is right."""
    ids = np.ascontiguousarray(token_ids)
    return *order_all(np.ascontiguousarray(edges), ids, next_tokens, int(max_nodes)), *_chains(edges, ids, next_tokens)


def _chains(
    edges: NDArray[np.float64], token_ids: NDArray[np.int64], next_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(B,) leading depths at which the chain follows the target, and (B,) depths of the chain, for (B, depth, P, K) edges.

    The chain takes the most probable child of its last node, ties by lower token id.
    """
    count, depth, num_parents, _ = edges.shape
    rows, parent = np.arange(count), np.zeros(count, np.intp)
    alive, right = np.ones(count, bool), np.ones(count, bool)
    reached, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for d in range(depth):
        children = edges[rows, d, parent]  # (B, K)
        best = children.max(axis=1, keepdims=True, initial=-np.inf)
        alive &= best[:, 0] > -np.inf
        column = np.where(children == best, token_ids[:, d], np.iinfo(np.int64).max).argmin(axis=1)
        right &= alive & (token_ids[rows, d, column] == next_tokens[:, d])
        lengths += alive
        reached += right
        parent = column if num_parents > 1 else parent
    return reached, lengths


def _stack(arrays: list[NDArray], dtype: type, empty_shape: tuple[int, ...]) -> NDArray:
    return np.ascontiguousarray(np.concatenate(arrays), dtype) if arrays else np.zeros(empty_shape, dtype)
