"""What a trace says about edges: one labelled group of siblings per prefix that was really reached, nothing else.

An anchor speaks of depth d only if the text goes that far and the true tokens of all shallower depths are among the
candidates; what lies beyond is unknown and never counted. Only the true parent's row is labelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.trace import Trace, TraceText

CHUNK_ANCHORS = 4096
END_OF_TEXT = -2


@dataclass(frozen=True, eq=False)
class Samples:
    """Anchors of texts and their labelled groups; A anchors, G groups, k candidates.

    Attributes:
        token_ids: (A, depth, k) int64. log_probs: (A, depth, k) float64. roots: (A,) int64. next_tokens: (A, depth).
        hits: (A, depth) column of the true token, -1 not listed, -2 beyond the text. text: (A,) index of the text.
        group_anchor, group_depth: (G,). parent_column: (G,) 0 for the root. parent_token: (G,).
        label: (G,) column of the true token, k where none of the candidates is it.
        soft: (G, k + 1) float32 the target's own distribution on candidates and none, or None without one; a row of
            NaN where a text has none.
    """

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    roots: NDArray[np.int64]
    next_tokens: NDArray[np.int64]
    hits: NDArray[np.int64]
    text: NDArray[np.int64]
    group_anchor: NDArray[np.int64]
    group_depth: NDArray[np.int64]
    parent_column: NDArray[np.int64]
    parent_token: NDArray[np.int64]
    label: NDArray[np.int64]
    soft: NDArray[np.float32] | None


def reached_mask(hits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(A, depth) whether every shallower true token is listed and the text goes that far."""
    listed = hits >= 0
    above = np.concatenate([np.ones((len(hits), 1), bool), listed[:, :-1]], axis=1)
    return np.logical_and.accumulate(above, axis=1) & (hits > END_OF_TEXT)


def collect(trace: Trace, top_k: int, sharpening: float = 1.0) -> Samples:
    """All labelled groups of a trace's texts, candidates cut to the first `top_k`."""
    texts = [text for text in trace.texts if text.num_anchors > 0]
    k, depth = min(top_k, trace.top_k), trace.depth
    token_ids = _join([text.draft_token_ids[:, :, :k] for text in texts], np.int64, (0, depth, k))
    log_probs = _join([text.draft_logprobs[:, :, :k] for text in texts], np.float64, (0, depth, k))
    log_probs = np.where((token_ids >= 0) & (log_probs > -np.inf), log_probs, -np.inf)
    roots = _join([text.token_ids[text.num_prompt_tokens :] for text in texts], np.int64, (0,))
    following = _join([text.next_tokens() for text in texts], np.int64, (0, depth))
    found = (token_ids == following[:, :, None]) & (log_probs > -np.inf)
    hits = np.where(found.any(axis=2), found.argmax(axis=2), -1)
    hits[following == END_OF_TEXT] = END_OF_TEXT
    anchor, level = np.nonzero(reached_mask(hits))
    above = np.maximum(level - 1, 0)
    column = np.where(level > 0, hits[anchor, above], 0)
    parent = np.where(level > 0, following[anchor, above], roots[anchor])
    label = np.where(hits[anchor, level] >= 0, hits[anchor, level], k)
    text = np.repeat(np.arange(len(texts)), [t.num_anchors for t in texts])
    soft = _soft_labels(texts, token_ids, anchor, level, sharpening)
    return Samples(token_ids, log_probs, roots, following, hits, text, anchor, level, column, parent, label, soft)


def _join(arrays: Sequence[NDArray[Any]], dtype: Any, empty_shape: tuple[int, ...]) -> NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(arrays), dtype) if arrays else np.zeros(empty_shape, dtype)


def _soft_labels(
    texts: list[TraceText], token_ids: NDArray[np.int64], anchor: NDArray[np.intp], level: NDArray[np.intp], sharpening: float
) -> NDArray[np.float32] | None:
    """The target's distribution at every group's prefix on its candidates and none of them, row a + d of its text."""
    width = max((text.target_token_ids.shape[1] for text in texts if text.target_token_ids is not None), default=0)
    if width == 0:
        return None
    ids = np.full((len(token_ids), width), -1, np.int64)
    logs = np.full((len(token_ids), width), np.nan)
    start = 0
    for text in texts:
        own, chances = text.target_token_ids, text.target_logprobs
        if own is not None and chances is not None:
            ids[start : start + text.num_anchors, : own.shape[1]] = own
            logs[start : start + text.num_anchors, : own.shape[1]] = chances
        start += text.num_anchors
    soft = np.empty((len(anchor), token_ids.shape[2] + 1), np.float32)
    for begin in range(0, len(anchor), CHUNK_ANCHORS):
        rows = slice(begin, begin + CHUNK_ANCHORS)
        known = np.where(ids[anchor[rows] + level[rows]] >= 0, np.exp(logs[anchor[rows] + level[rows]]), 0.0)
        soft[rows] = _project(token_ids[anchor[rows], level[rows]], ids[anchor[rows] + level[rows]], known, sharpening)
    return soft


def _project(
    candidates: NDArray[np.int64], ids: NDArray[np.int64], probabilities: NDArray[np.float64], sharpening: float
) -> NDArray[np.float64]:
    """(G, k + 1): sharpened probabilities of the target at the candidates, the rest at the last column; NaN rows unknown."""
    peak = probabilities.max(axis=1, keepdims=True)
    unknown = ~(peak[:, 0] > 0)
    scaled = (probabilities / np.where(peak > 0, peak, 1.0)) ** sharpening
    rest = np.maximum(1.0 - probabilities.sum(axis=1), 0.0) if sharpening == 1.0 else np.zeros(len(peak))
    total = scaled.sum(axis=1) / np.where(unknown, 1.0, 1.0 - rest)
    same = (candidates[:, :, None] == ids[:, None, :]) & (candidates >= 0)[:, :, None]
    on = np.where(same, scaled[:, None, :], 0.0).sum(axis=2) / np.where(total > 0, total, 1.0)[:, None]
    projected = np.concatenate([on, np.maximum(1.0 - on.sum(axis=1, keepdims=True), 0.0)], axis=1)
    projected[unknown] = np.nan
    return projected  # type: ignore[no-any-return]
