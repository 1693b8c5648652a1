"""The record of one policy's replay beside its baselines: rates, gains with intervals, and its share of what was possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from selector.replaying.ceilings import share_of_gap
from selector.replaying.metrics import (
    acceptance_by_depth,
    acceptance_rate,
    gain_interval,
    group_indices,
    throughput_ratio_interval,
)
from selector.replaying.rounds import Rounds, measured_scale


@dataclass(frozen=True, eq=False)
class Baselines:
    """What every policy is held against: rounds of plain decoding, the best chain, the best fixed budget and the oracle.

    `drafted` is the best fixed budget on the drafter's own probabilities: `fixed` itself where nothing corrects them.
    """

    plain: Rounds
    chain: Rounds
    fixed: Rounds
    drafted: Rounds
    oracle: Rounds


@dataclass(frozen=True)
class ReplayRow:
    """One policy's outcome. Intervals are 95 % by resampling texts, paired between policies.

    `gain_over_*` are ratios of throughput less 1. `mean_depth` is that of the deepest node. `role` is "plain", "best
    chain", "best fixed", "best fixed as drafted" (where a calibration or scorer is used: without it), "asked", "limit of
    selection" (the oracle) or "limit of drafting" (the oracle drafter). `share_of_gap` is where it lies between the best
    fixed budget as drafted (0) and the oracle (1), None where these are equal: neither end depends on a plan.
    `acceptance_by_depth` holds None where no round offered that depth.
    """

    name: str
    role: str
    tokens_per_second: float
    tokens_per_round: float
    mean_nodes: float
    mean_depth: float
    rounds: int
    tokens: int
    seconds: float
    speedup_over_plain: float
    speedup_interval: tuple[float, float]
    gain_over_best_chain: float
    gain_over_best_fixed: float
    gain_over_best_fixed_interval: tuple[float, float]
    share_of_gap: float | None
    acceptance_rate: float | None
    acceptance_by_depth: list[float | None]
    reach_scale: float | None
    price: float | None
    datasets: dict[str, dict[str, float]] = field(default_factory=dict)
    mean_dataset_speedup: float | None = None


def make_row(
    rounds: Rounds,
    role: str,
    base: Baselines,
    weights: NDArray[np.float64],
    labels: Sequence[str | None],
    depth: int,
) -> ReplayRow:
    """The record of one policy beside its baselines; `weights` from `metrics.resamples`, `labels` the texts' data sets."""
    plain, chain, fixed = base.plain, base.chain, base.fixed
    throughput, count = rounds.tokens_per_second, max(len(rounds.nodes), 1)
    tokens = int(rounds.text_tokens.sum())
    datasets = _dataset_rows(rounds, plain, labels)
    mean_nodes = float(rounds.nodes.mean()) if len(rounds.nodes) else 0.0
    return ReplayRow(
        name=rounds.policy,
        role=role,
        tokens_per_second=throughput,
        tokens_per_round=tokens / count,
        mean_nodes=mean_nodes,
        mean_depth=float(rounds.depths.mean()) if len(rounds.depths) else 0.0,
        rounds=len(rounds.nodes),
        tokens=tokens,
        seconds=rounds.total_seconds,
        speedup_over_plain=throughput / plain.tokens_per_second,
        speedup_interval=throughput_ratio_interval(rounds.text_seconds, plain.text_seconds, weights),
        gain_over_best_chain=throughput / chain.tokens_per_second - 1,
        gain_over_best_fixed=throughput / fixed.tokens_per_second - 1,
        gain_over_best_fixed_interval=gain_interval(rounds.text_seconds, fixed.text_seconds, weights),
        share_of_gap=share_of_gap(throughput, base.drafted.tokens_per_second, base.oracle.tokens_per_second),
        acceptance_rate=acceptance_rate(1 + float(rounds.accepted.mean()) if len(rounds.nodes) else 1.0, mean_nodes + 1),
        acceptance_by_depth=acceptance_by_depth(rounds.accepted, rounds.depths, depth),
        reach_scale=None if np.isnan(rounds.expected).any() or rounds.policy == "plain" else measured_scale(rounds),
        price=rounds.price,
        datasets=datasets,
        mean_dataset_speedup=float(np.mean([row["speedup_over_plain"] for row in datasets.values()])) if datasets else None,
    )


def _dataset_rows(rounds: Rounds, plain: Rounds, labels: Sequence[str | None]) -> dict[str, dict[str, float]]:
    rows = {}
    for name, indices in group_indices(labels).items():
        seconds, base = float(rounds.text_seconds[indices].sum()), float(plain.text_seconds[indices].sum())
        tokens, count = int(rounds.text_tokens[indices].sum()), int(rounds.text_rounds[indices].sum())
        if seconds > 0:
            rows[name] = {
                "tokens_per_second": tokens / seconds,
                "tokens_per_round": tokens / max(count, 1),
                "speedup_over_plain": base / seconds,
            }
    return rows
