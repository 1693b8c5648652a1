"""What may be said of rounds that were played or decoded: rates, and intervals by resampling texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiles.errors import UsageError


def acceptance_rate(tokens_per_round: float, num_verify_tokens: float) -> float | None:
    """Accepted nodes per drafted node, (tokens_per_round - 1) / (num_verify_tokens - 1); None without nodes.

    It falls as trees grow although decoding gets faster: never rank by it.
    """
    nodes = num_verify_tokens - 1
    return (tokens_per_round - 1) / nodes if nodes > 0 else None


def acceptance_by_depth(num_accepted: ArrayLike, tree_depths: ArrayLike, max_depth: int) -> list[float | None]:
    """Pr(a node of depth d is accepted | one of depth d - 1 was), for d = 1..max_depth; None where nothing was offered.

    Args:
        num_accepted: (R,) accepted nodes per round. tree_depths: (R,) depth of the deepest node of the round.
    """
    accepted, depths = np.asarray(num_accepted), np.asarray(tree_depths)
    rates: list[float | None] = []
    for d in range(1, max_depth + 1):
        offered = (accepted >= d - 1) & (depths >= d)
        rates.append(float((accepted[offered] >= d).mean()) if offered.any() else None)
    return rates


def resamples(num_texts: int, num_samples: int, seed: int = 0) -> NDArray[np.float64]:
    """(num_samples, num_texts) how often each text is in each bootstrap sample; the same for every policy (paired).

    Raises UsageError for fewer than one sample, which would leave no interval.
    """
    if num_samples < 1:
        raise UsageError(f"num_bootstrap must be at least 1, got {num_samples}")
    return np.random.default_rng(seed).multinomial(num_texts, np.full(num_texts, 1 / num_texts), num_samples).astype(float)


def throughput_ratio_interval(
    seconds: NDArray[np.float64], base_seconds: NDArray[np.float64], weights: NDArray[np.float64], level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of the ratio of two throughputs over the same texts: base seconds over seconds.

    Args:
        seconds, base_seconds: (T,) per text. weights: (samples, T) from `resamples`.
    """
    ratios = (weights @ base_seconds) / np.maximum(weights @ seconds, 1e-300)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def gain_interval(seconds: NDArray[Any], base_seconds: NDArray[Any], weights: NDArray[np.float64]) -> tuple[float, float]:
    """`throughput_ratio_interval` as a gain: the ratio less 1."""
    low, high = throughput_ratio_interval(seconds.astype(np.float64), base_seconds.astype(np.float64), weights)
    return low - 1, high - 1


def group_indices(labels: Sequence[str | None]) -> dict[str, list[int]]:
    """Indices by label, in order of first appearance; None is left out."""
    groups: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        if label is not None:
            groups.setdefault(label, []).append(index)
    return groups
