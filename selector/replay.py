"""Replay: tokens per second of any policy from a trace and a cost model, without running a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.errors import TraceError
from selector.metrics import acceptance_by_depth, acceptance_rate, group_indices, resamples, throughput_ratio_interval
from selector.orders import Orders, build_orders
from selector.playing import play_policy
from selector.policies import FixedShape
from selector.registry import parse_policy
from selector.rounds import Curves, Rounds, build_curves, measured_scale, play, play_plain
from selector.trace import Trace

DEFAULT_POLICIES = ("chain", "fixed:8", "fixed:16", "unimodal", "exact", "priced")
DEFAULT_MAX_NODES = 256
BUDGET_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63, 64, 80, 96, 127, 128, 160, 192, 224, 255, 256)
WHAT_IF_FIELDS = ("device", "target", "drafter", "dtype", "block_size", "attention", "engine", "mode")


@dataclass(frozen=True)
class ReplayRow:
    """One policy's outcome. Intervals are 95 % by resampling texts, paired between policies.

    `gain_over_*` are ratios of throughput less 1. `mean_depth` is that of the deepest node. `role` is "plain", "best
    chain", "best fixed" or "asked". `acceptance_by_depth` holds None where no round offered that depth.
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
    acceptance_rate: float | None
    acceptance_by_depth: list[float | None]
    reach_scale: float | None
    price: float | None
    datasets: dict[str, dict[str, float]] = field(default_factory=dict)
    mean_dataset_speedup: float | None = None


@dataclass(frozen=True)
class Replay:
    """All rows, what they rest on, and where trace and profile part (a what-if)."""

    rows: list[ReplayRow]
    provenance: str
    what_if: dict[str, list[Any]]
    max_nodes: int
    calibrated: bool
    num_texts: int
    identity: dict[str, Any]
    notes: list[str]

    def row(self, name: str) -> ReplayRow:
        """The row of a policy by name or role; raises KeyError."""
        for row in self.rows:
            if name in (row.name, row.role):
                return row
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, schema treebudget.replay."""
        return {"schema": "treebudget.replay", "version": 1, **asdict(self)}


def largest_replayable(cost: Any, max_nodes: int | None = None) -> int:
    """Nodes of the largest tree the profile measured, at most `max_nodes` (default 256)."""
    return max(0, min(DEFAULT_MAX_NODES if max_nodes is None else max_nodes, int(cost.max_verify_tokens) - 1))


def best_chain(orders: Orders, curves: Curves) -> Rounds:
    """The chain length with the highest throughput on this trace (lengths 1 to the draft's depth)."""
    lengths = range(1, max(1, min(orders.ranks.shape[1], orders.max_nodes)) + 1)
    return max((play(FixedShape("chain", n), orders, curves) for n in lengths), key=lambda rounds: rounds.tokens_per_second)


def best_fixed(orders: Orders, curves: Curves, grid: Iterable[int] = BUDGET_GRID) -> Rounds:
    """The fixed number of nodes with the highest throughput on this trace, over a grid of budgets."""
    budgets = [n for n in grid if n <= orders.max_nodes] or [max(1, orders.max_nodes)]
    return max((play(FixedShape("fixed", n), orders, curves) for n in budgets), key=lambda rounds: rounds.tokens_per_second)


def what_if(trace_identity: dict[str, Any], cost: Any) -> dict[str, list[Any]]:
    """Fields in which trace and profile differ, as {field: [trace, profile]}; unknown on either side is no difference."""
    profile = getattr(cost, "identity", None)
    pairs = {name: [trace_identity.get(name), getattr(profile, name, None)] for name in WHAT_IF_FIELDS}
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def replay(
    trace: Trace,
    cost: Any,
    policies: Sequence[str] = DEFAULT_POLICIES,
    max_nodes: int | None = None,
    calibration: Calibration | None = None,
    price: float | None = None,
    reach_scale: float = 1.0,
    adapt: bool = True,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> Replay:
    """Tokens per second of plain decoding, the best chain, the best fixed budget and the asked policies.

    Exact for greedy decoding: rounds start at the first generated token (it comes from the prompt's forward and is not
    counted), every round commits accepted nodes and one more, cut at the end of the text, and costs what `cost` says.

    Args:
        trace: texts and drafts. cost: `costmodel.CostModel` (or its like). policies: names; price: for `priced`, None
            finds it by fixed point. max_nodes: default 256, never beyond what the profile measured.
        calibration, reach_scale, adapt: as in TreeSelector.

    Raises TraceError if no text has two generated tokens.
    """
    parsed = [parse_policy(name) for name in policies]
    orders = build_orders(trace, largest_replayable(cost, max_nodes), calibration)
    if orders.num_tokens.sum() == 0:
        raise TraceError("no text of the trace has two generated tokens, so there is nothing to replay")
    curves = build_curves(orders, cost)
    plain, chain, fixed = play_plain(orders, curves), best_chain(orders, curves), best_fixed(orders, curves)
    played = [(plain, "plain"), (chain, "best chain"), (fixed, "best fixed")]
    known = {plain.policy, chain.policy, fixed.policy}
    for policy in parsed:
        if policy.name not in known:
            known.add(policy.name)
            played.append((play_policy(policy, orders, curves, calibration, price, reach_scale, adapt), "asked"))
    weights = resamples(orders.num_texts, num_bootstrap, seed)
    labels = [text.dataset for text in trace.texts]
    rows = [make_row(rounds, role, plain, chain, fixed, weights, labels, trace.depth) for rounds, role in played]
    notes = ["the cost curve is flat: policies by cost take as many nodes as the draft is deep"] if curves.flat else []
    return Replay(
        rows, getattr(cost, "provenance", "measured"), what_if(trace.identity, cost), orders.max_nodes,
        calibration is not None, orders.num_texts, trace.identity, notes,
    )  # fmt: skip


def make_row(
    rounds: Rounds,
    role: str,
    plain: Rounds,
    chain: Rounds,
    fixed: Rounds,
    weights: NDArray[np.float64],
    labels: Sequence[str | None],
    depth: int,
) -> ReplayRow:
    """The record of one policy beside its three baselines."""
    throughput, count = rounds.tokens_per_second, max(len(rounds.nodes), 1)
    tokens = int(rounds.text_tokens.sum())
    low, high = throughput_ratio_interval(rounds.text_seconds, fixed.text_seconds, weights)
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
        gain_over_best_fixed_interval=(low - 1, high - 1),
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
