"""The load study: plain decoding, the best uniform budget and merged budgets at batch 1 to 256, from a trace and a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from profiles.errors import UsageError
from selector.calibration import Calibration
from selector.errors import CostCurveError, TraceError
from selector.load.curves import LoadCurves, load_curves
from selector.load.play import best_uniform, merged_at_fixed_point, play_load, text_queue
from selector.policies import is_flat
from selector.replaying.caveats import what_if
from selector.replaying.orders import Orders, build_orders
from selector.replaying.replay import largest_replayable
from selector.trace import Trace

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Interval = tuple[float, float]


@dataclass(frozen=True)
class LoadRow:
    """One batch size. Throughputs are tokens per second of the whole batch; intervals are 95 % by resampling texts, paired.

    `uniform_nodes` is the best budget per request; `merged_nodes` a request's mean. `price` is what the merged budget
    charged a second of the batch, `reach_scale` what it multiplied reach by. `provenance` is of the costs.
    """

    num_requests: int
    provenance: str
    plain_tokens_per_second: float
    uniform_tokens_per_second: float
    merged_tokens_per_second: float
    uniform_speedup: float
    uniform_speedup_interval: Interval
    merged_speedup: float
    merged_speedup_interval: Interval
    merged_gain_over_uniform: float
    merged_gain_over_uniform_interval: Interval
    uniform_nodes: int
    merged_nodes: float
    uniform_tokens_per_round: float
    merged_tokens_per_round: float
    price: float
    reach_scale: float


@dataclass(frozen=True)
class LoadStudy:
    """All batch sizes on one profile. `stops_paying_at_*` is the first batch played at which plain decoding is as fast."""

    profile: str
    profile_provenance: str
    rows: list[LoadRow]
    stops_paying_at_uniform: int | None
    stops_paying_at_merged: int | None
    what_if: dict[str, list[Any]]
    context_tokens: Interval
    num_texts: int
    max_nodes: int
    calibrated: bool
    num_bootstrap: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return asdict(self)


def study_load(
    trace: Trace,
    cost: Any,
    name: str,
    batches: Sequence[int] = BATCHES,
    context_tokens: int | None = None,
    max_nodes: int | None = None,
    calibration: Calibration | None = None,
    num_bootstrap: int = 100,
    seed: int = 0,
) -> LoadStudy:
    """Play a trace under every batch size on one cost model.

    The best uniform budget, and price and scale of the merged one, are found on all texts and kept in the resamples.

    Args:
        trace: texts and drafts. cost: `costmodel.CostModel`; name: of its profile, for the record.
        context_tokens: charge every round this context; None charges the mean of the requests' own.
        max_nodes: per request, default 256 and never beyond what the profile measured.

    Raises TraceError if no text has two generated tokens, CostCurveError where a batch costs the same for every budget.
    """
    if num_bootstrap < 1 or not all(isinstance(batch, int) and batch >= 1 for batch in batches):
        raise UsageError(f"num_bootstrap and batches are whole numbers of at least 1, got {num_bootstrap} and {batches}")
    trace = trace.with_rounds()  # another text gives nothing to resample
    if not trace.texts:
        raise TraceError("no text of the trace has two generated tokens, so there is nothing to play")
    orders = build_orders(trace, largest_replayable(cost, max_nodes), calibration)
    played = orders.context_tokens[orders.visitable]
    low, high = (float(played.min()), float(played.max())) if context_tokens is None else (float(context_tokens),) * 2
    rows = []
    for batch in batches:
        curves = load_curves(cost, batch, low, high, orders.max_nodes)
        if any(is_flat(curve) for curve in curves.table):
            raise CostCurveError(
                f"at batch {batch} a round costs the same for every number of nodes, so no budget can be found",
                hint="measure this batch again with: costmodel profile",
            )
        rows.append(_study_batch(orders, curves, num_bootstrap, seed))
    stops = [
        next((row.num_requests for row in rows if speedup(row) <= 1), None)
        for speedup in (lambda row: row.uniform_speedup, lambda row: row.merged_speedup)
    ]
    return LoadStudy(
        name, str(cost.provenance), rows, stops[0], stops[1], what_if(trace.identity, cost), (low, high), orders.num_texts,
        orders.max_nodes, calibration is not None, num_bootstrap, seed,
    )  # fmt: skip


def _study_batch(orders: Orders, curves: LoadCurves, num_bootstrap: int, seed: int) -> LoadRow:
    queue = text_queue(orders, curves.num_requests, None, seed)
    plain = play_load(orders, curves, queue, "plain")
    uniform = best_uniform(orders, curves, queue)
    merged = merged_at_fixed_point(orders, curves, queue, uniform.tokens_per_second)
    rng, samples = np.random.default_rng(seed), []
    for number in range(num_bootstrap):
        texts = rng.integers(orders.num_texts, size=orders.num_texts)
        again = text_queue(orders, curves.num_requests, texts, seed + 1 + number)
        samples.append([
            play_load(orders, curves, again, "plain").tokens_per_second,
            play_load(orders, curves, again, "uniform", uniform.budget or 0).tokens_per_second,
            play_load(orders, curves, again, "merged", 0, merged.price or 0.0, merged.reach_scale).tokens_per_second,
        ])  # fmt: skip
    rates = np.array(samples)

    def interval(over: int, under: int, less: float = 0.0) -> Interval:
        ends = np.quantile(rates[:, over] / rates[:, under], [0.025, 0.975]) - less
        return float(ends[0]), float(ends[1])

    return LoadRow(
        num_requests=curves.num_requests,
        provenance=curves.provenance,
        plain_tokens_per_second=plain.tokens_per_second,
        uniform_tokens_per_second=uniform.tokens_per_second,
        merged_tokens_per_second=merged.tokens_per_second,
        uniform_speedup=uniform.tokens_per_second / plain.tokens_per_second,
        uniform_speedup_interval=interval(1, 0),
        merged_speedup=merged.tokens_per_second / plain.tokens_per_second,
        merged_speedup_interval=interval(2, 0),
        merged_gain_over_uniform=merged.tokens_per_second / uniform.tokens_per_second - 1,
        merged_gain_over_uniform_interval=interval(2, 1, 1.0),
        uniform_nodes=uniform.budget or 0,
        merged_nodes=merged.mean_nodes,
        uniform_tokens_per_round=uniform.tokens_per_round,
        merged_tokens_per_round=merged.tokens_per_round,
        price=merged.price or 0.0,
        reach_scale=merged.reach_scale,
    )
