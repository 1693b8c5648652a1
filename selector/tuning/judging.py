"""Cross-fitting: what is free in a candidate is fitted on one half of the texts and judged on the other, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import log_loss
from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.scoring import measure_scoring_seconds
from selector.trace import Trace
from selector.tuning.candidates import Candidate, candidates, fit_candidate
from selector.tuning.parts import Part, fit_calibration_on, split_halves
from selector.tuning.pricing import round_tokens
from selector.tuning.training import Trained, Trainer

Advance = Callable[[str], None]


@dataclass(eq=False)
class Judged:
    """One candidate over all texts, each text played with what was fitted on the other half.

    Attributes: text_seconds, text_rounds: (T,). contexts, tokens, seconds: of every round, pieces by half.
    """

    candidate: Candidate
    num_tokens: int
    text_seconds: NDArray[np.float64]
    text_rounds: NDArray[np.int64]
    policies: list[str] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    num_nodes: int = 0
    contexts: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    seconds: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all texts."""
        return self.num_tokens / float(self.text_seconds.sum())

    @property
    def mean_nodes(self) -> float:
        """Nodes per round."""
        return self.num_nodes / max(int(self.text_rounds.sum()), 1)


@dataclass(frozen=True, eq=False)
class Judgement:
    """All candidates, and what held-out texts say of the calibration and the scorer.

    Attributes: calibration_gain: nats of log-loss less than as drafted. scoring_seconds: of one round, measured here.
    """

    rows: list[Judged]
    calibration_gain: float
    scoring_seconds: float


def judge(
    trace: Trace, cost: Any, max_nodes: int, trainer: Trainer | None, training_seconds: float, advance: Advance
) -> Judgement:
    """Cross-fit all candidates over two halves of the texts.

    A scorer is trained on each half, for at most `training_seconds`. `advance` is called once per candidate and half.
    """
    halves = split_halves(trace)
    drafted = [Part.of(trace.select(indices), cost, max_nodes) for indices in halves]
    count, tokens = len(trace.texts), int(sum(max(text.num_anchors - 1, 0) for text in trace.texts))
    rows = [
        Judged(candidate, tokens, np.zeros(count), np.zeros(count, np.int64)) for candidate in candidates(trainer is not None)
    ]
    gains, scoring = [], [0.0]
    for fitted, judged in ((drafted[0], drafted[1]), (drafted[1], drafted[0])):
        calibration = fit_calibration_on(fitted)
        raw = judged.orders
        gains.append(log_loss(raw.log_edges, raw.hits) - log_loss(raw.log_edges, raw.hits, calibration))
        on_fit = {DRAFTED: fitted, CALIBRATED: fitted.calibrated(calibration)}
        on_judged = {DRAFTED: judged, CALIBRATED: judged.calibrated(calibration)}
        if trainer is not None:
            trained = trainer(fitted.trace, training_seconds)
            scoring.append(scoring_seconds(trained, fitted))
            on_fit[SCORED] = fitted.select(trained.aside).scored(trained.scorer, scoring[-1])
            on_judged[SCORED] = judged.scored(trained.scorer, scoring[-1])
        for row in rows:
            edges = row.candidate.edges
            _judge_half(row, on_fit[edges], on_judged[edges], halves[0] if judged is drafted[0] else halves[1])
            advance(row.candidate.label)
    return Judgement(rows, float(np.mean(gains)), float(np.mean(scoring[1:])) if trainer is not None else 0.0)


def scoring_seconds(trained: Trained, part: Part) -> float:
    """Seconds that scoring one round takes here."""
    anchors = part.orders.anchors
    return measure_scoring_seconds(trained.scorer, anchors.token_ids, anchors.log_edges, anchors.root_token_ids)


def _judge_half(row: Judged, fit_on: Part, judge_on: Part, indices: list[int]) -> None:
    """Fit on one half, play the other, and put what came of it into the row."""
    fit = fit_candidate(row.candidate, fit_on)
    played = fit.play(judge_on)
    row.text_seconds[indices], row.text_rounds[indices] = played.text_seconds, played.text_rounds
    row.num_nodes += int(played.nodes.sum())
    row.policies.append(fit.policy.name)
    row.settings.append(fit.settings)
    row.contexts.append(judge_on.orders.context_tokens[played.visited])
    row.tokens.append(round_tokens(played, judge_on.orders))
    row.seconds.append(played.seconds)
