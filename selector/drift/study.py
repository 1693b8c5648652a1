"""Does the drift alarm help: scorers trained on one kind of prompt and run on another, with and without the alarm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

from selector.calibration import Calibration
from selector.drift.alarm import DriftAlarm, DriftSettings
from selector.drift.play import AlarmPlay, gains_by_depth, play_with_alarm, round_gains, scored_rows
from selector.policies import ByCost
from selector.reliability import labelled_rows
from selector.replaying.metrics import gain_interval, resamples
from selector.replaying.orders import Orders, build_orders
from selector.replaying.rounds import Curves, play
from selector.scorer import Scorer
from selector.scorer.samples import Samples, collect
from selector.scoring import EdgeScorer
from selector.trace import Trace
from selector.tuning.parts import Part

KINDS = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("arena-hard-v2", "mt-bench")}
ALL, SHUFFLED = "all", "shuffled"
NUM_ORDERS = 10  # of texts, for each of which the alarm is played


@dataclass(frozen=True)
class DriftCell:
    """One scorer run on one kind of text. Gains are ratios of throughput less 1, intervals 95 % by resampling texts.

    Attributes:
        trained_on, run_on: kinds. num_rounds: of `exact` on scored edges. nats_per_round: by which the scorer foresaw the
            target better than the drafted (over_calibrated: the calibrated) probabilities, in those rounds.
        scorer, alarm, drafted, calibrated: tokens per second with the scorer always, with the alarm (mean over orders of the
            texts), with the draft's own probabilities, and with those calibrated on the kind trained on.
        share_alarmed: share of orders of the texts in which it fell back at all. rounds_until_alarm: median over those.
        fallbacks_per_1000: times it fell back in 1,000 rounds. share_scored: share of rounds on the scorer's edges;
            share_asked: share whose edges were scored, to check included.
    """

    trained_on: str
    run_on: str
    num_texts: int
    num_rounds: int
    nats_per_round: float
    nats_over_calibrated: float
    scorer: float
    alarm: float
    drafted: float
    calibrated: float
    scorer_over_drafted: float
    scorer_over_drafted_interval: tuple[float, float]
    alarm_over_scorer: float
    alarm_over_scorer_interval: tuple[float, float]
    alarm_over_drafted: float
    share_alarmed: float
    rounds_until_alarm: float | None
    fallbacks_per_1000: float
    share_scored: float
    share_asked: float


@dataclass(frozen=True, eq=False)
class Run:
    """Texts of a trace as one scorer sees them: searched by it, by the draft and by the calibration, and its gains in nats."""

    scored: Orders
    drafted: Orders
    calibrated: Orders
    curves: Curves
    gains: NDArray[np.float64]
    over_calibrated: NDArray[np.float64]

    @classmethod
    def of(cls, part: Part, samples: Samples, scorer: EdgeScorer, calibration: Calibration) -> Run:
        """Search and score; `part` is drafted, `samples` are of its trace with the scorer's top_k."""
        rows = scored_rows(scorer, samples)
        base = (samples.log_probs, calibration.apply_to_batch(samples.log_probs))
        gains = [gains_by_depth(rows, labelled_rows(edges, samples), samples) for edges in base]
        scored = build_orders(part.trace, part.orders.max_nodes, None, scorer)
        return cls(scored, part.orders, part.calibrated(calibration).orders, part.curves, gains[0], gains[1])

    def select(self, texts: Sequence[int]) -> Run:
        """Some of the texts."""
        at = self.drafted.anchors_of(texts)
        orders = (self.scored.select(texts), self.drafted.select(texts), self.calibrated.select(texts))
        return Run(*orders, self.curves.select(at), self.gains[at], self.over_calibrated[at])


def kind_of(label: str | None, kinds: Mapping[str, Sequence[str]]) -> str:
    """The kind that names a data set; one that no kind names is its own."""
    return next((kind for kind, labels in kinds.items() if label in labels), label or "unlabelled")


def by_kind(trace: Trace, kinds: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Indices of the texts that a round can start in, by kind, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, text in enumerate(trace.texts):
        if text.num_anchors >= 2:
            found.setdefault(kind_of(text.dataset, kinds), []).append(index)
    return found


def critical_exponent(losses: NDArray[np.float64]) -> float | None:
    """The exponent at which the mean of exp(exponent x loss) is 1: below it a falling sum seldom climbs far (Lundberg).

    Args:
        losses: nats by which the scorer did worse, one per independent block of rounds, such as a text.

    0 where the mean is not negative (there is none: the scorer is no better), None where no block is above 0 (any will do).
    """
    if len(losses) == 0 or losses.max() <= 0:
        return None
    if losses.mean() >= 0:
        return 0.0
    high = 1.0
    while logsumexp(high * losses) <= math.log(len(losses)):
        high *= 2
    return float(brentq(lambda x: logsumexp(x * losses) - math.log(len(losses)), high * 1e-9, high))


def held_out_exponent(part: Part, scorer: EdgeScorer, scoring_seconds: float) -> dict[str, Any]:
    """`critical_exponent` of a scorer on drafted texts that it did not learn from, by text and by round, as the alarm counts."""
    samples = collect(part.trace, scorer.top_k)
    gains = gains_by_depth(scored_rows(scorer, samples), labelled_rows(samples.log_probs, samples), samples)
    scored = part.scored(scorer, scoring_seconds)
    played = play(ByCost("exact"), scored.orders, scored.curves)
    losses = np.minimum(-round_gains(played, gains), DriftSettings().largest_step)
    text = np.searchsorted(scored.orders.text_starts, played.visited, side="right") - 1
    totals = np.bincount(text, losses, scored.orders.num_texts).astype(np.float64)
    return {
        "num_texts": len(totals), "num_rounds": len(losses), "texts_worse": int((totals > 0).sum()),
        "by_text": critical_exponent(totals), "by_round": critical_exponent(losses),
    }  # fmt: skip


def shuffled(scorer: Scorer, seed: int = 0) -> Scorer:
    """The scorer with its token tables' rows dealt out anew: a control that knows nothing of tokens but thinks it does."""
    order = np.random.default_rng(seed).permutation(len(scorer.weights.child_table))
    weights = scorer.weights._replace(
        parent_table=scorer.weights.parent_table[order], child_table=scorer.weights.child_table[order]
    )
    return replace(scorer, weights=weights, _on_device={})


def study_drift(
    part: Part,
    scorers: Mapping[str, tuple[EdgeScorer, Calibration]],
    kinds: Mapping[str, Sequence[str]],
    scoring_seconds: float,
    num_orders: int = NUM_ORDERS,
    num_bootstrap: int = 1000,
    seed: int = 0,
    settings: DriftSettings | None = None,
) -> list[DriftCell]:
    """Every scorer, by the name of what it was trained on, run on every kind of text of a drafted part, and on all of them."""
    groups = by_kind(part.trace, kinds)
    groups[ALL] = sorted(index for indices in groups.values() for index in indices)
    cells = []
    for trained_on, (scorer, calibration) in scorers.items():
        run = Run.of(part, collect(part.trace, scorer.top_k), scorer, calibration)
        for run_on, texts in groups.items():
            rng = np.random.default_rng(seed)
            orders = [np.arange(len(texts)), *(rng.permutation(len(texts)) for _ in range(num_orders - 1))]
            weights = resamples(len(texts), num_bootstrap, seed)
            cells.append(_cell(trained_on, run_on, run.select(texts), scoring_seconds, orders, weights, settings))
    return cells


def _cell(
    trained_on: str, run_on: str, run: Run, scoring_seconds: float, orders: list[NDArray[np.int64]],
    weights: NDArray[np.float64], settings: DriftSettings | None,
) -> DriftCell:  # fmt: skip
    exact = ByCost("exact")
    always = play(exact, run.scored, run.curves.plus(scoring_seconds))
    drafted, calibrated = play(exact, run.drafted, run.curves), play(exact, run.calibrated, run.curves)
    alarmed = [
        play_with_alarm(run.scored, run.drafted, run.curves, scoring_seconds, run.gains, DriftAlarm(settings), order.tolist())
        for order in orders
    ]
    seconds = np.mean([one.text_seconds for one in alarmed], axis=0)
    throughput = float(drafted.text_tokens.sum()) / max(float(seconds.sum()), 1e-300)
    return DriftCell(
        trained_on, run_on, len(run.drafted.num_tokens), len(always.nodes),
        float(round_gains(always, run.gains).mean()), float(round_gains(always, run.over_calibrated).mean()),
        always.tokens_per_second, throughput, drafted.tokens_per_second, calibrated.tokens_per_second,
        always.tokens_per_second / drafted.tokens_per_second - 1,
        gain_interval(always.text_seconds, drafted.text_seconds, weights),
        throughput / always.tokens_per_second - 1, gain_interval(seconds, always.text_seconds, weights),
        throughput / drafted.tokens_per_second - 1, **_alarms(alarmed),
    )  # fmt: skip


def _alarms(plays: list[AlarmPlay]) -> dict[str, Any]:
    """What the alarm did, over plays of the same texts in different orders."""
    rounds = sum(one.num_rounds for one in plays)
    first = [one.fallbacks[0] for one in plays if one.fallbacks]
    return {
        "share_alarmed": len(first) / len(plays),
        "rounds_until_alarm": float(np.median(first)) if first else None,
        "fallbacks_per_1000": 1000 * sum(len(one.fallbacks) for one in plays) / max(rounds, 1),
        "share_scored": sum(one.num_scored for one in plays) / max(rounds, 1),
        "share_asked": sum(one.num_asked for one in plays) / max(rounds, 1),
    }
