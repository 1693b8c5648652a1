"""Labelled groups as tensors: features, token indices, labels and weights, and the network's logits of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.scorer.judging import path_ranks, play_budget, text_starts
from selector.scorer.network import group_residuals, round_features
from selector.scorer.samples import CHUNK_ANCHORS, Samples
from selector.scorer.settings import ScorerSettings
from selector.trace import Trace

VISIT_BUDGET = 16  # nodes per round of the play that says where rounds start
CHUNK_GROUPS = 8192


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples as tensors of one device: everything a step needs of a group, and where the groups of an anchor are."""

    rows: Any  # (G, 8)
    parents: Any  # (G, 6)
    children: Any  # (G, k, 7)
    drafted: Any  # (G, k + 1) the draft's own logits: log-probabilities, and the log of the missing mass
    depth: Any  # (G,)
    parent_index: Any  # (G,) row of the reduced embedding
    child_index: Any  # (G, k)
    same: Any  # (G, k)
    label: Any  # (G,)
    labels: Any  # (G, k + 1) what the local loss compares with
    weight: Any  # (G,)
    start: Any  # (A,) first group of an anchor
    count: Any  # (A,) groups of an anchor


def anchor_weights(trace: Trace, samples: Samples, unvisited: float) -> NDArray[np.float32]:
    """(A,) 1 where decoding on the drafter's own probabilities starts rounds, which is harder than an average place."""
    if unvisited == 1.0:
        return np.ones(len(samples.roots), np.float32)
    ranks = path_ranks(samples.log_probs, samples.token_ids, samples.next_tokens, VISIT_BUDGET)
    visited, _ = play_budget(ranks, text_starts(trace).tolist(), VISIT_BUDGET)
    weights = np.full(len(samples.roots), unvisited, np.float32)
    weights[visited] = 1.0
    return weights


def _features(torch: Any, samples: Samples) -> list[Any]:
    """Row, parent and child features and log missing mass of every group."""
    found: list[list[Any]] = [[], [], [], []]
    for begin in range(0, len(samples.roots), CHUNK_ANCHORS):
        chunk = slice(begin, begin + CHUNK_ANCHORS)
        inputs = (samples.token_ids[chunk], samples.log_probs[chunk].astype(np.float32), samples.roots[chunk])
        rows, parents, children, missing = round_features(torch, *(torch.from_numpy(x) for x in inputs))
        own = (samples.group_anchor >= begin) & (samples.group_anchor < begin + CHUNK_ANCHORS)
        a, d = torch.from_numpy(samples.group_anchor[own] - begin), torch.from_numpy(samples.group_depth[own])
        column = torch.from_numpy(samples.parent_column[own])
        for held, value in zip(found, (rows[a, d], parents[a, d, column], children[a, d], missing[a, d]), strict=True):
            held.append(value)
    return [torch.cat(held) for held in found]


def make_groups(torch: Any, samples: Samples, trace: Trace, tokens: NDArray[np.int64], settings: ScorerSettings) -> Groups:
    """Tensors on the settings' device; `tokens` are the sorted ids that have a row in the reduced embedding."""
    anchor, level, k = samples.group_anchor, samples.group_depth, samples.token_ids.shape[2]
    features = _features(torch, samples)
    ids = samples.token_ids[anchor, level]
    labels = np.eye(k + 1, dtype=np.float32)[samples.label]
    if samples.soft is not None:
        mixed = settings.soft_share * samples.soft + (1 - settings.soft_share) * labels
        labels = np.where(np.isnan(samples.soft), labels, mixed).astype(np.float32)
    weight = anchor_weights(trace, samples, settings.unvisited_weight)[anchor]
    count = np.bincount(anchor, minlength=len(samples.roots))
    arrays = (
        level,
        np.searchsorted(tokens, samples.parent_token), np.searchsorted(tokens, np.maximum(ids, tokens[0])),
        ((ids == samples.parent_token[:, None]) & (ids >= 0)).astype(np.float32), samples.label, labels, weight,
        np.cumsum(count) - count, count,
    )  # fmt: skip
    drafted = torch.cat([torch.from_numpy(samples.log_probs[anchor, level].astype(np.float32)), features[3][:, None]], 1)
    rest = [torch.from_numpy(x) for x in arrays]
    return Groups(*(x.to(settings.device) for x in (*features[:3], drafted, *rest)))


def residuals_of(torch: Any, weights: Mapping[str, Any], groups: Groups, index: Any, reduced: Any, dropout: float = 0.0) -> Any:
    """(g, k + 1) what the network adds to the draft's logits of some groups; dropout on the token vectors."""
    parent = _vectors(torch, groups.parent_index[index], reduced, weights["parent_projection"], dropout)
    child = _vectors(torch, groups.child_index[index], reduced, weights["child_projection"], dropout)
    features = (groups.rows[index], groups.parents[index][:, None], groups.children[index])
    same = groups.same[index][:, None]
    return group_residuals(torch, weights, groups.depth[index], parent[:, None], child, features, same)[:, 0]


def _vectors(torch: Any, tokens: Any, reduced: Any, projection: Any, dropout: float) -> Any:
    """Token vectors, each different token projected once: a batch names few of them many times."""
    different, place = torch.unique(tokens, return_inverse=True)
    vectors = torch.nn.functional.embedding(place, reduced[different] @ projection)
    return torch.nn.functional.dropout(vectors, dropout, dropout > 0)


def all_residuals(torch: Any, weights: Mapping[str, Any], groups: Groups, reduced: Any) -> Any:
    """(G, k + 1) residuals of all groups, without gradients."""
    with torch.no_grad():
        parts = torch.arange(len(groups.label), device=groups.label.device).split(CHUNK_GROUPS)
        return torch.cat([residuals_of(torch, weights, groups, index, reduced) for index in parts])
