"""Tuning: which policy, with which calibration, price and sizes, is fastest on texts it was not fitted on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration, fit_calibration, log_loss
from selector.errors import TraceMismatch, TuneError
from selector.metrics import resamples, throughput_ratio_interval
from selector.orders import Orders, build_orders
from selector.plan import Plan
from selector.policies import ByCost, Policy
from selector.registry import parse_policy
from selector.replay import best_chain, best_fixed, largest_replayable, what_if
from selector.rounds import Curves, Rounds, build_curves, measured_scale, play
from selector.trace import Trace

MIN_TEXTS = 4
WORTH_IT = 0.02  # a smaller gain over the best fixed budget is reported as "not worth it"
MIN_SPEEDUP = 1.02  # below this over plain decoding, or within its noise, the plan is plain


@dataclass(frozen=True)
class Candidate:
    """A way to decode that tuning compares: a kind of policy, on calibrated reach or on the drafter's own."""

    kind: str  # plain, chain, fixed, unimodal, exact, priced
    calibrated: bool

    @property
    def label(self) -> str:
        """Name in reports."""
        return f"{self.kind}, calibrated" if self.calibrated else self.kind


CANDIDATES = (
    Candidate("plain", False),
    Candidate("chain", False),
    *(Candidate(kind, calibrated) for kind in ("fixed", "unimodal", "exact", "priced") for calibrated in (False, True)),
)


@dataclass(frozen=True)
class Fit:
    """What was fitted on some texts for one candidate."""

    policy: str
    price: float | None
    reach_scale: float
    calibration: Calibration | None

    def play(self, orders: Orders, curves: Curves) -> Rounds:
        """Decode texts with it; `orders` were searched with the same calibration."""
        return play(parse_policy(self.policy), orders, curves, self.price, self.reach_scale)


def fit_calibration_on(trace: Trace, orders: Orders, curves: Curves, unvisited_weight: float = 0.25) -> Calibration:
    """Per-depth temperature and scale on the anchors that decoding with `exact` really starts rounds from.

    Rounds restart where a draft failed, which is a harder place than an average one; other anchors count a quarter.
    """
    visited = play(ByCost("exact"), orders, curves).visited
    weights = np.where(orders.visitable, unvisited_weight, 0.0)
    weights[visited] = 1.0
    return fit_calibration(orders.log_edges, orders.hits, weights)


def fit_candidate(candidate: Candidate, orders: Orders, curves: Curves, calibration: Calibration | None) -> Fit:
    """Choose what is free in a candidate (length, budget, price, scale) on the texts of `orders`."""
    name, price, scale = candidate.kind, None, 1.0
    if candidate.kind == "chain":
        name = best_chain(orders, curves).policy
    elif candidate.kind == "fixed":
        name = best_fixed(orders, curves).policy
    elif candidate.kind in ("exact", "priced"):
        policy: Policy = parse_policy(candidate.kind)
        rounds = play(policy, orders, curves)
        scale = float(np.clip(measured_scale(rounds), 0.25, 1.5))
        price = play(policy, orders, curves, reach_scale=scale).price
    return Fit(name, price, scale, calibration if candidate.calibrated else None)


@dataclass(frozen=True, eq=False)
class _Part:
    """Texts of one half with their searched anchors."""

    trace: Trace
    orders: Orders
    curves: Curves


def _part(trace: Trace, cost: Any, max_nodes: int, calibration: Calibration | None = None) -> _Part:
    orders = build_orders(trace, max_nodes, calibration)
    return _Part(trace, orders, build_curves(orders, cost))


def _recalibrated(part: _Part, calibration: Calibration) -> _Part:
    return _Part(part.trace, build_orders(part.trace, part.orders.max_nodes, calibration), part.curves)


def split_halves(trace: Trace) -> tuple[list[int], list[int]]:
    """Indices of two halves, alternating within every data set."""
    halves: tuple[list[int], list[int]] = ([], [])
    order = sorted(range(len(trace.texts)), key=lambda i: (trace.texts[i].dataset or "", i))
    for place, index in enumerate(order):
        halves[place % 2].append(index)
    return sorted(halves[0]), sorted(halves[1])


@dataclass(frozen=True, eq=False)
class Judged:
    """One candidate over all texts, each text played with what was fitted on the other half."""

    candidate: Candidate
    policies: tuple[str, ...]  # per half
    text_seconds: NDArray[np.float64]
    text_rounds: NDArray[np.int64]
    num_tokens: int
    mean_nodes: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all texts."""
        return self.num_tokens / float(self.text_seconds.sum())


def judge(trace: Trace, cost: Any, max_nodes: int, advance: Callable[[], None] = lambda: None) -> tuple[list[Judged], float]:
    """Cross-fit all candidates over two halves; returns them and the calibration's held-out gain in log-loss (nats)."""
    halves = split_halves(trace)
    parts = [_part(trace.select(indices), cost, max_nodes) for indices in halves]
    calibrations = [fit_calibration_on(part.trace, part.orders, part.curves) for part in parts]
    gains = []
    seconds = np.zeros((len(CANDIDATES), len(trace.texts)))
    rounds = np.zeros((len(CANDIDATES), len(trace.texts)), np.int64)
    nodes, names = np.zeros(len(CANDIDATES)), [[""] * 2 for _ in CANDIDATES]
    for half, (fitted, judged) in enumerate(((0, 1), (1, 0))):
        calibration = calibrations[fitted]
        on_fit = {False: parts[fitted], True: _recalibrated(parts[fitted], calibration)}
        on_judged = {False: parts[judged], True: _recalibrated(parts[judged], calibration)}
        raw = parts[judged].orders
        gains.append(log_loss(raw.log_edges, raw.hits) - log_loss(raw.log_edges, raw.hits, calibration))
        for row, candidate in enumerate(CANDIDATES):
            source, target = on_fit[candidate.calibrated], on_judged[candidate.calibrated]
            fit = fit_candidate(candidate, source.orders, source.curves, calibration)
            played = fit.play(target.orders, target.curves)
            seconds[row, halves[judged]], rounds[row, halves[judged]] = played.text_seconds, played.text_rounds
            nodes[row] += played.nodes.sum()
            names[row][half] = fit.policy
            advance()
    tokens = int(sum(max(text.num_anchors - 1, 0) for text in trace.texts))
    rows = [
        Judged(candidate, tuple(names[i]), seconds[i], rounds[i], tokens, float(nodes[i] / max(rounds[i].sum(), 1)))
        for i, candidate in enumerate(CANDIDATES)
    ]
    return rows, float(np.mean(gains))


def tune(
    trace: Trace,
    cost: Any,
    max_nodes: int | None = None,
    num_bootstrap: int = 1000,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Plan:
    """Compare plain decoding, chains, fixed budgets, `unimodal`, `exact` and `priced`, and plan with the fastest.

    Texts are split in halves; what is free is fitted on one and judged on the other, both ways. The plan is `plain`
    where nothing beats plain decoding by more than 2 % and its noise. The winner is fitted again on all texts.

    Raises TuneError for fewer than 4 texts with two generated tokens, TraceMismatch if trace and profile differ in
    block size. `advance` is called 20 times as it goes.
    """
    usable = trace.select(i for i, text in enumerate(trace.texts) if text.num_anchors >= 2)
    if len(usable.texts) < MIN_TEXTS:
        raise TuneError(
            f"tuning needs at least {MIN_TEXTS} texts of two generated tokens or more, the trace has {len(usable.texts)}",
            hint="record a trace over more prompts",
        )
    differing = what_if(trace.identity, cost)
    if "block_size" in differing:
        raise TraceMismatch("block_size", differing["block_size"][1], differing["block_size"][0])
    size = largest_replayable(cost, max_nodes)
    judged, calibration_gain = judge(usable, cost, size, advance)
    weights = resamples(len(usable.texts), num_bootstrap, seed)
    rows = {row.candidate: _record(row, judged, weights) for row in judged}
    winner, reason = _choose(judged, rows)
    record = rows[winner.candidate]
    return _make_plan(usable, cost, size, winner, reason, list(rows.values()), record, calibration_gain, differing)


def _best(judged: list[Judged], *kinds: str) -> Judged:
    return max((row for row in judged if row.candidate.kind in kinds), key=lambda row: row.tokens_per_second)


def _record(row: Judged, judged: list[Judged], weights: NDArray[np.float64]) -> dict[str, Any]:
    """One candidate beside the baselines, JSON types; gains are ratios of throughput less 1."""
    bases = {"plain": _best(judged, "plain"), "best_chain": _best(judged, "chain")}
    bases["best_fixed"] = next(other for other in judged if other.candidate == Candidate("fixed", False))
    record: dict[str, Any] = {
        "name": row.candidate.label,
        "policies": list(row.policies),
        "calibrated": row.candidate.calibrated,
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_round": row.num_tokens / max(int(row.text_rounds.sum()), 1),
        "mean_nodes": row.mean_nodes,
    }
    for name, base in bases.items():
        low, high = throughput_ratio_interval(row.text_seconds, base.text_seconds, weights)
        record[f"gain_over_{name}"] = row.tokens_per_second / base.tokens_per_second - 1
        record[f"gain_over_{name}_interval"] = [low - 1, high - 1]
    record["speedup_over_plain"] = record["gain_over_plain"] + 1
    return record


def _choose(judged: list[Judged], rows: dict[Candidate, dict[str, Any]]) -> tuple[Judged, str]:
    """The winner and why, in words."""
    plain = _best(judged, "plain")
    winner = max(judged, key=lambda row: row.tokens_per_second)
    drafting = _best(judged, "chain", "fixed", "unimodal", "exact", "priced")
    record = rows[drafting.candidate]
    low, high = (1 + bound for bound in record["gain_over_plain_interval"])
    speedup = record["speedup_over_plain"]
    found = f"{drafting.candidate.label} decodes {speedup:.3f} times as fast as plain decoding (95 %: {low:.3f} to {high:.3f})"
    if winner is plain or speedup < MIN_SPEEDUP or low <= 1.0:
        return plain, f"drafting does not pay here: the best way to draft, {found}, is not faster by more than 2 % and its noise"
    gain, bounds = record["gain_over_best_fixed"], record["gain_over_best_fixed_interval"]
    reason = f"{found}"
    if drafting.candidate.kind != "fixed" or drafting.candidate.calibrated:
        against = f"{gain:+.1%} over the best fixed budget (95 %: {bounds[0]:+.1%} to {bounds[1]:+.1%})"
        reason += f", {against}" + ("" if gain >= WORTH_IT else ": not worth it, the fixed budget would do as well")
    return winner, reason


def _make_plan(
    trace: Trace,
    cost: Any,
    max_nodes: int,
    winner: Judged,
    reason: str,
    rows: list[dict[str, Any]],
    record: dict[str, Any],
    calibration_gain: float,
    differing: dict[str, list[Any]],
) -> Plan:
    """Fit the winner once more, on all texts."""
    part, calibration = _part(trace, cost, max_nodes), None
    if part.curves.flat:
        reason += "; the cost curve is flat, so it cannot size a tree: policies by cost take as many nodes as the draft is deep"
    if winner.candidate.calibrated:
        calibration = fit_calibration_on(part.trace, part.orders, part.curves)
        part = _recalibrated(part, calibration)
    fit = fit_candidate(winner.candidate, part.orders, part.curves, calibration)
    price = fit.price if fit.price is not None else fit.play(part.orders, part.curves).tokens_per_second
    gains = {key: value for key, value in record.items() if key != "name"}
    gains["worth_it"] = record["gain_over_best_fixed"] >= WORTH_IT
    gains["calibration_log_loss_gain"] = calibration_gain
    gains["num_texts"], gains["num_tokens"] = len(trace.texts), winner.num_tokens
    return Plan(
        policy=fit.policy,
        price=price,
        calibration=calibration,
        reach_scale=fit.reach_scale,
        top_k=max(trace.top_k, 1),
        max_nodes=max_nodes,
        gains=gains,
        rows=rows,
        identity=plan_identity(trace, cost) | ({"what_if": differing} if differing else {}),
        provenance=getattr(cost, "provenance", "measured"),
        reason=reason,
    )


def plan_identity(trace: Trace, cost: Any) -> dict[str, Any]:
    """What a plan is for: the profile's identity, and the trace's target, drafter and block size."""
    profile = getattr(cost, "identity", None)
    fields = asdict(profile) if profile is not None else {}
    traced = {name: trace.identity[name] for name in ("target", "drafter", "block_size", "dtype") if name in trace.identity}
    return {name: value for name, value in (fields | traced).items() if value is not None}
