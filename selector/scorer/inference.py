"""The scorer compiled: all edges of a round in one call, without torch. The formulas are those of `network.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.scorer import network

LOG_FLOOR, ODDS_LIMIT = np.float32(network.LOG_FLOOR), np.float32(network.ODDS_LIMIT)
MISSING_FLOOR = np.float32(network.MISSING_FLOOR)
NUM_ROW, NUM_PARENT, NUM_CHILD = network.NUM_ROW, network.NUM_PARENT, network.NUM_CHILD
_REORDER = {"reassoc", "contract", "nsz"}  # sums may be vectorised; infinities keep their meaning


class Weights(NamedTuple):
    """All of a scorer's numbers, float32; names and shapes as in `network.SHAPES`, tables (V, d), calibration (D,)."""

    parent_table: NDArray[np.float32]
    child_table: NDArray[np.float32]
    parent_in: NDArray[np.float32]
    child_in: NDArray[np.float32]
    row_features: NDArray[np.float32]
    parent_features: NDArray[np.float32]
    child_features: NDArray[np.float32]
    depth_bias: NDArray[np.float32]
    out: NDArray[np.float32]
    scale: NDArray[np.float32]
    same: NDArray[np.float32]
    none_hidden: NDArray[np.float32]
    none_out: NDArray[np.float32]
    none_bias: NDArray[np.float32]
    slopes: NDArray[np.float32]
    gains: NDArray[np.float32]
    none_offsets: NDArray[np.float32]


@njit(cache=True, inline="always")
def _listed(token, others, logs):
    """Log-probability that a token has in another row, the floor where it is not listed."""
    if token >= 0:
        for j in range(others.shape[0]):
            if others[j] == token:
                return logs[j]
    return LOG_FLOOR


@njit(cache=True, fastmath=_REORDER)
def _statistics(log_probs, logs, rows, missing):
    """Clipped log-probabilities (D, k), row features (D, 8) and log of the missing mass (D,) of one round."""
    depth, k = log_probs.shape
    chain = np.float32(0.0)
    for d in range(depth):
        mass, entropy = np.float32(0.0), np.float32(0.0)
        for c in range(k):
            log_p = np.float32(log_probs[d, c])
            logs[d, c] = max(log_p, LOG_FLOOR)
            p = np.exp(log_p)
            mass += p
            entropy -= p * logs[d, c]
        rest = max(np.float32(1.0) - mass, MISSING_FLOOR)
        missing[d] = np.log(rest)
        entropy -= rest * missing[d]
        rows[d, 0], rows[d, 1], rows[d, 2] = entropy / 2, logs[d, 0] / 4, missing[d] / 4
        rows[d, 5] = max(chain, LOG_FLOOR) / 4
        chain += logs[d, 0]
        rows[d, 3] = rows[d - 1, 0] if d > 0 else np.float32(0.0)
        rows[d, 4] = rows[d - 1, 1] if d > 0 else np.float32(0.0)
    for d in range(depth):
        rows[d, 6] = rows[d + 1, 0] if d + 1 < depth else np.float32(0.0)
        rows[d, 7] = rows[d + 1, 1] if d + 1 < depth else np.float32(0.0)


@njit(cache=True, inline="always")
def _add_row(out, vector, matrix):
    """out (h,) += vector (n,) @ matrix (n, h)."""
    for i in range(matrix.shape[0]):
        v = vector[i]
        if v != np.float32(0.0):
            for j in range(out.shape[0]):
                out[j] += v * matrix[i, j]


@njit(cache=True, inline="always")
def _parent_features(features, p, is_root, logs, top, at_once):
    features[0] = np.float32(0.0) if is_root else logs / 4
    features[1] = np.float32(0.0) if is_root else np.log1p(np.float32(p)) / 2
    features[2] = np.float32(1.0) if p == 0 else np.float32(0.0)
    features[3] = np.float32(0.0) if is_root else (logs - top) / 4
    features[4] = at_once / 4
    features[5] = np.float32(1.0) if is_root else np.float32(0.0)


@njit(cache=True, inline="always")
def _child_features(features, c, log_p, top, above, below):
    odds = log_p - np.log(max(np.float32(1.0) - np.exp(log_p), np.float32(1e-7)))
    features[0], features[1] = log_p / 4, min(max(odds, -ODDS_LIMIT), ODDS_LIMIT) / 4
    features[2] = np.log1p(np.float32(c)) / 2
    features[3] = np.float32(1.0) if c == 0 else np.float32(0.0)
    features[4], features[5], features[6] = (log_p - top) / 4, above / 4, below / 4


@njit(cache=True, fastmath=_REORDER)
def _softmax_row(logits, none, out):
    """Log-softmax over siblings and none of these; out (k,) float64."""
    peak = none
    for c in range(logits.shape[0]):
        peak = max(peak, logits[c])
    total = np.exp(none - peak)
    for c in range(logits.shape[0]):
        total += np.exp(logits[c] - peak)
    normaliser = peak + np.log(total)
    for c in range(logits.shape[0]):
        out[c] = logits[c] - normaliser


@njit(cache=True, fastmath=_REORDER)
def _child_parts(weights, d, token_ids, logs, parts, vectors):
    """Every candidate's share of the hidden layer at depth d (0-based), parts (k, h), and its token vector, vectors (k, s)."""
    depth, k = token_ids.shape
    features = np.empty(NUM_CHILD, np.float32)
    for c in range(k):
        token = token_ids[d, c]
        above = _listed(token, token_ids[d - 1], logs[d - 1]) if d > 0 else LOG_FLOOR
        below = _listed(token, token_ids[d + 1], logs[d + 1]) if d + 1 < depth else LOG_FLOOR
        _child_features(features, c, logs[d, c], logs[d, 0], above, below)
        parts[c, :] = np.float32(0.0)
        _add_row(parts[c], features, weights.child_features)
        if 0 <= token < weights.child_table.shape[0]:
            vectors[c, :] = weights.child_table[token]
            _add_row(parts[c], vectors[c], weights.child_in)
        else:
            vectors[c, :] = np.float32(0.0)


@njit(cache=True, fastmath=_REORDER)
def _parent_part(weights, d, p, token, token_ids, logs, base, features, part):
    """The share of the hidden layer of parent p (a candidate of depth d - 1, or the root) at depth d: part (h,)."""
    at_once = _listed(token, token_ids[d], logs[d])
    if d > 0:
        _parent_features(features, p, False, logs[d - 1, p], logs[d - 1, 0], at_once)
    else:
        _parent_features(features, 0, True, LOG_FLOOR, LOG_FLOOR, at_once)
    part[:] = base
    _add_row(part, features, weights.parent_features)
    if 0 <= token < weights.parent_table.shape[0]:
        _add_row(part, weights.parent_table[token], weights.parent_in)


@njit(cache=True, fastmath=_REORDER)
def _row_logits(weights, at, parent, token, children, log_probs, missing, parts, vectors, logits):
    """Calibrated logits (k,) of one parent's children; returns that of none of these."""
    h, size, vocab = weights.out.shape[0], weights.parent_table.shape[1], weights.parent_table.shape[0]
    none = weights.none_bias[at]
    for j in range(h):
        none += weights.none_out[j] * max(parent[j] + weights.none_hidden[at, j], np.float32(0.0))
    known = 0 <= token < vocab
    own, out = weights.parent_table[token if known else 0], weights.out
    for c in range(children.shape[0]):
        score = np.float32(0.0)
        for j in range(h):
            z = parent[j] + parts[c, j]
            score += out[j] * (z if z > np.float32(0.0) else np.float32(0.0))
        if known:
            product = np.float32(0.0)
            for i in range(size):
                product += own[i] * vectors[c, i]
            score += weights.scale[at] * product
            if children[c] == token:
                score += weights.same[at]
        logits[c] = weights.slopes[at] * np.float32(log_probs[c]) + weights.gains[at] * score
    return weights.slopes[at] * missing + weights.gains[at] * none + weights.none_offsets[at]


@njit(cache=True, fastmath=_REORDER)
def score_rounds(weights, token_ids, log_probs, roots, edges):
    """Fill edges (B, D, k, k) float64, which come as -inf, from token_ids (B, D, k) int64 and log_probs (B, D, k) float64.

    Depths beyond the weights' last use the last. Tokens outside the tables have the zero vector. Pads (-inf) stay -inf.
    """
    batch, depth, k = token_ids.shape
    h = weights.out.shape[0]
    logs, rows = np.empty((depth, k), np.float32), np.empty((depth, NUM_ROW), np.float32)
    missing, base, logits = np.empty(depth, np.float32), np.empty(h, np.float32), np.empty(k, np.float32)
    vectors = np.empty((k, weights.child_table.shape[1]), np.float32)
    parts, parent, features = np.empty((k, h), np.float32), np.empty(h, np.float32), np.empty(NUM_PARENT, np.float32)
    for b in range(batch):
        _statistics(log_probs[b], logs, rows, missing)
        for d in range(depth):
            at = min(d, weights.depth_bias.shape[0] - 1)
            base[:] = weights.depth_bias[at]
            _add_row(base, rows[d], weights.row_features)
            _child_parts(weights, d, token_ids[b], logs, parts, vectors)
            for p in range(k if d > 0 else 1):
                if d > 0 and not log_probs[b, d - 1, p] > -np.inf:
                    continue
                token = token_ids[b, d - 1, p] if d > 0 else roots[b]
                _parent_part(weights, d, p, token, token_ids[b], logs, base, features, parent)
                children, chances = token_ids[b, d], log_probs[b, d]
                none = _row_logits(weights, at, parent, token, children, chances, missing[d], parts, vectors, logits)
                _softmax_row(logits, none, edges[b, d, p])
