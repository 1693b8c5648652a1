"""What a scorer is worth on texts it never saw: calibration, tokens per round at equal budgets, and replayed throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.policies import FixedShape
from selector.reliability import Reliability, judge_edges
from selector.replaying.metrics import gain_interval, resamples
from selector.replaying.rounds import Rounds, play, play_plain
from selector.scorer.samples import collect
from selector.scoring import EdgeScorer, score_chunks
from selector.trace import Trace
from selector.tuning.candidates import Candidate, fit_candidate
from selector.tuning.parts import Part

BUDGETS = (4, 8, 16, 32, 63)
EDGES = (DRAFTED, CALIBRATED, SCORED)
KINDS = ("fixed", "unimodal", "exact", "priced")
BASE = ("fixed", DRAFTED)

Parts = Mapping[str, Part]
"""The same texts, searched by every one of EDGES; the scored ones are charged for scoring."""


@dataclass(frozen=True)
class BudgetRow:
    """Tokens per round with the first `num_nodes` nodes; the gain is over drafted, 95 % by resampling texts."""

    num_nodes: int
    edges: str
    tokens_per_round: float
    rounds: int
    gain: float
    gain_interval: tuple[float, float]


@dataclass(frozen=True)
class ThroughputRow:
    """One policy on one kind of edges; gains are over the best fixed budget as drafted, and the same policy as drafted."""

    kind: str
    edges: str
    policy: str
    tokens_per_second: float
    interval: tuple[float, float]
    tokens_per_round: float
    mean_nodes: float
    gain: float
    gain_interval: tuple[float, float]
    gain_over_drafted: float
    gain_over_drafted_interval: tuple[float, float]


def make_parts(trace: Trace, cost: Any, max_nodes: int, calibration: Calibration, scorer: EdgeScorer, seconds: float) -> Parts:
    """A trace searched three ways; `seconds` of scoring are charged to scored rounds."""
    drafted = Part.of(trace, cost, max_nodes)
    return {DRAFTED: drafted, CALIBRATED: drafted.calibrated(calibration), SCORED: drafted.scored(scorer, seconds)}


def judge_on(trace: Trace, calibration: Calibration, scorer: EdgeScorer) -> Reliability:
    """Log-loss and calibration error of all three on every reached prefix of a trace."""
    samples = collect(trace, scorer.top_k)
    chunks = score_chunks(scorer, samples.token_ids, samples.log_probs, samples.roots)
    edges = [part.astype(np.float32) for _, part in chunks]  # half the memory; nothing here needs more digits
    calibrated = calibration.apply_to_batch(samples.log_probs)
    return judge_edges({DRAFTED: samples.log_probs, CALIBRATED: calibrated, SCORED: np.concatenate(edges)}, samples)


def study_budgets(parts: Parts, budgets: Sequence[int] = BUDGETS, num_bootstrap: int = 1000, seed: int = 0) -> list[BudgetRow]:
    """Tokens per round of every kind of edges at the budgets that the parts were searched for."""
    weights = resamples(parts[DRAFTED].orders.num_texts, num_bootstrap, seed)
    rows = []
    for budget in (n for n in budgets if n <= parts[DRAFTED].orders.max_nodes):
        played = {edges: play(FixedShape("fixed", budget), part.orders, part.curves) for edges, part in parts.items()}
        base = played[DRAFTED].text_rounds
        for edges, rounds in played.items():
            count, tokens = int(rounds.text_rounds.sum()), int(rounds.text_tokens.sum())
            interval = gain_interval(rounds.text_rounds, base, weights)
            rows.append(BudgetRow(budget, edges, tokens / max(count, 1), count, float(base.sum()) / max(count, 1) - 1, interval))
    return rows


def study_throughput(
    fit_on: Parts, run_on: Parts, num_bootstrap: int = 1000, seed: int = 0
) -> tuple[list[ThroughputRow], list[ThroughputRow]]:
    """Tokens per second of every policy on every kind of edges, and, as a second list, of plain decoding alone.

    What is free in a policy (the budget, the price, the first scale of reach) is fitted on `fit_on`, nothing on `run_on`.
    """
    weights = resamples(run_on[DRAFTED].orders.num_texts, num_bootstrap, seed)
    played: dict[tuple[str, str], Rounds] = {}
    for kind in KINDS:
        for edges in EDGES:
            played[kind, edges] = fit_candidate(Candidate(kind, edges), fit_on[edges]).play(run_on[edges])
    rows = [_row(kind, edges, rounds, played, weights) for (kind, edges), rounds in played.items()]
    plain = play_plain(run_on[DRAFTED].orders, run_on[DRAFTED].curves)
    return rows, [_row("plain", DRAFTED, plain, {**played, ("plain", DRAFTED): plain}, weights)]


def _row(
    kind: str, edges: str, rounds: Rounds, played: Mapping[tuple[str, str], Rounds], weights: NDArray[np.float64]
) -> ThroughputRow:
    base, same = played[BASE], played[kind, DRAFTED]
    rates = (weights @ rounds.text_tokens) / np.maximum(weights @ rounds.text_seconds, 1e-300)
    low, high = np.quantile(rates, [0.025, 0.975])
    return ThroughputRow(
        kind, edges, rounds.policy, rounds.tokens_per_second, (float(low), float(high)),
        float(rounds.text_tokens.sum()) / max(len(rounds.nodes), 1), float(rounds.nodes.mean()),
        rounds.tokens_per_second / base.tokens_per_second - 1, gain_interval(rounds.text_seconds, base.text_seconds, weights),
        rounds.tokens_per_second / same.tokens_per_second - 1, gain_interval(rounds.text_seconds, same.text_seconds, weights),
    )  # fmt: skip
