"""Tuning: which policy, with which scorer, calibration, prices and sizes, is fastest on texts it was not fitted on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.errors import TraceMismatch, TuneError
from selector.plan import Plan
from selector.replaying.caveats import what_if
from selector.replaying.metrics import resamples
from selector.replaying.replay import largest_replayable
from selector.scoring import EdgeScorer
from selector.trace import Trace
from selector.tuning.candidates import CANDIDATES, candidates, fit_candidate
from selector.tuning.choosing import choose, evidence, record
from selector.tuning.judging import Judged, judge, scoring_seconds
from selector.tuning.keeping import keeping
from selector.tuning.parts import Part, fit_calibration_on, split_halves
from selector.tuning.pricing import price_ranges
from selector.tuning.training import TRAIN, TRAINING_SECONDS, Trainer, make_trainer

__all__ = ["CANDIDATES", "TRAINING_SECONDS", "candidates", "split_halves", "tune"]

MIN_TEXTS, MIN_SCORER_TEXTS = 4, 8  # a scorer is trained on each half
PLAN_FIELDS = ("target", "drafter", "block_size", "dtype", "target_sha256", "drafter_sha256", "prompts_sha256")
FLAT = "the cost curve is flat, so it cannot size a tree: policies by cost take as many nodes as the draft is deep"
FALLBACK = {
    "pause": "plain steps while drafting yields less than they do, probed again with back-off",
    "out_of_range": "the price of the nearest range of contexts, counted and said once",
}


def tune(
    trace: Trace,
    cost: Any,
    max_nodes: int | None = None,
    num_bootstrap: int = 1000,
    seed: int = 0,
    advance: Callable[[str], None] = lambda note: None,
    *,
    scorer: EdgeScorer | str | None = None,
    embedding: NDArray[Any] | None = None,
    scorer_settings: Any = None,
    training_seconds: float = TRAINING_SECONDS,
    trainer: Trainer | None = None,
    allow_overlap: bool = False,
    keep: Path | None = None,
) -> Plan:
    """Compare plain decoding, chains, fixed budgets, `unimodal`, `exact`, `priced`, `taps` and `smart`; plan with the fastest.

    Texts are split in halves; what is free is fitted on one and judged on the other, both ways. The plan is `plain`
    where nothing beats plain decoding by more than 2 % and its noise. The winner is fitted again on all texts.

    Args:
        scorer: None, "train" (on each half, and on all texts if it wins), or a scorer to use as it is. With one, policies
            are compared on scored probabilities too, every round charged what scoring takes here.
        embedding: (vocab, hidden) of the target, for training. scorer_settings: `selector.scorer.ScorerSettings`.
            training_seconds: limit of all three trainings together. trainer: another way to train. Where torch or the
            embedding is missing, tuning goes on without and `Plan.notes` says so.
        allow_overlap: tune although the drafter was trained on prompts of the trace.
        keep: folder for trained scorers while tuning goes on; the same call goes on with them after an interruption.
            `selector.tuning.keeping.forget` removes it.
        advance: called after each candidate and half, with its name.

    Raises TuneError for fewer than 4 texts with two generated tokens or for overlap, TraceMismatch if trace and profile
    differ in block size.
    """
    usable, notes = _usable_texts(trace, cost, allow_overlap)
    train, note = _trainer(scorer, embedding, scorer_settings, trainer, len(usable.texts), keep)
    notes += [note] if note else []
    size = largest_replayable(cost, max_nodes)
    judgement = judge(usable, cost, size, train, training_seconds / 4, advance)
    weights = resamples(len(usable.texts), num_bootstrap, seed)
    winner, reason = choose(judgement.rows, weights)
    gains = evidence(winner, judgement.rows, weights) | {
        "calibration_log_loss_gain": judgement.calibration_gain,
        "scoring_seconds": judgement.scoring_seconds,
        "num_texts": len(usable.texts),
        "num_tokens": winner.num_tokens,
    }
    plan, flat = _fit_plan(usable, cost, size, winner, train, training_seconds / 2)
    return replace(
        plan,
        top_k=max(trace.top_k, 1),
        max_nodes=size,
        gains=gains,
        rows=[record(row, judgement.rows, weights) for row in judgement.rows],
        identity=plan_identity(usable, cost),
        provenance=getattr(cost, "provenance", "measured"),
        reason=f"{reason}; {FLAT}" if flat else reason,
        notes=notes + plan.notes,
    )


def _usable_texts(trace: Trace, cost: Any, allow_overlap: bool) -> tuple[Trace, list[str]]:
    """The texts to tune on, and notes on the trace; raises for one that cannot be tuned on."""
    generated = trace.with_rounds()
    usable = generated.without_repeats()
    if len(usable.texts) < MIN_TEXTS:
        raise TuneError(
            f"tuning needs at least {MIN_TEXTS} texts of two generated tokens or more, of as many prompts; the trace has "
            f"{len(usable.texts)}",
            hint="record a trace over more prompts",
        )
    differing = what_if(trace.identity, cost)
    if "block_size" in differing:
        raise TraceMismatch("block_size", differing["block_size"][1], differing["block_size"][0])
    notes = _on_overlap(trace, allow_overlap)
    repeated = len(generated.texts) - len(usable.texts)
    return usable, notes + ([f"{repeated} texts were left out: they repeat the prompts of others"] if repeated else [])


def _on_overlap(trace: Trace, allow_overlap: bool) -> list[str]:
    """Raise where the drafter was trained on prompts of the trace, unless allowed; a note on that, or where it is not known."""
    saw = trace.identity.get("drafter_saw")
    if saw is None:
        return ["the trace does not say whether the drafter was trained on its prompts; if so, gains are promised too high"]
    if saw and not allow_overlap:
        raise TuneError(
            f"the drafter was trained on {saw} prompts of the trace's {len(trace.texts)}, where it drafts better than in life",
            hint="record a trace of other prompts, or pass allow_overlap=True (--allow-overlap)",
        )
    return [f"the drafter was trained on {saw} prompts of this trace: gains are promised too high"] if saw else []


def _trainer(
    scorer: EdgeScorer | str | None, embedding: NDArray[Any] | None, settings: Any, trainer: Trainer | None, num_texts: int,
    keep: Path | None,
) -> tuple[Trainer | None, str | None]:  # fmt: skip
    """What gives each half its scorer, or None, and a note where one was wished for and cannot be had."""
    if isinstance(scorer, str) and scorer != TRAIN:
        raise TuneError(f"scorer must be {TRAIN!r}, a scorer or None, got {scorer!r}")
    train, note = make_trainer(scorer, embedding, settings, trainer)
    if train is None or scorer != TRAIN:
        return train, note
    if num_texts < MIN_SCORER_TEXTS:
        return None, f"no scorer: to train one on each half {MIN_SCORER_TEXTS} texts are needed, there are {num_texts}"
    if keep is not None:
        table = None if embedding is None else hashlib.sha256(np.ascontiguousarray(embedding).data).hexdigest()
        train = keeping(train, keep, (settings, table))
    return train, note


def _fit_plan(
    trace: Trace, cost: Any, max_nodes: int, winner: Judged, train: Trainer | None, training_seconds: float
) -> tuple[Plan, bool]:
    """Fit the winner once more, on all texts, and whether the cost curve is flat; prices are those of held-out rounds."""
    edges, scorer, seconds, note = winner.candidate.edges, None, 0.0, ""
    part = Part.of(trace, cost, max_nodes)
    calibration = None if edges == DRAFTED else fit_calibration_on(part)
    if edges == CALIBRATED and calibration is not None:
        part = part.calibrated(calibration)
    elif edges == SCORED and train is not None:
        trained = train(trace, training_seconds)
        scorer, seconds, note = trained.scorer, scoring_seconds(trained, part), trained.note
        part = part.select(trained.aside).scored(scorer, seconds)
    fit = fit_candidate(winner.candidate, part)
    contexts, tokens = np.concatenate(winner.contexts), np.concatenate(winner.tokens)
    plan = Plan(
        policy=fit.policy.name,
        policy_settings=fit.settings,
        price=winner.tokens_per_second,
        prices=price_ranges(contexts, tokens, np.concatenate(winner.seconds)),
        calibration=calibration,
        reach_scale=fit.reach_scale,
        attached=scorer,
        scoring_seconds=seconds,
        notes=[note] if note else [],
        fallback={**FALLBACK, "drift": "the calibration" if calibration else "the drafter's own probabilities"},
    )
    return plan, part.curves.flat


def plan_identity(trace: Trace, cost: Any) -> dict[str, Any]:
    """What a plan is for: the profile's identity, the trace's target, drafter and block size, and the contexts it covers."""
    profile = getattr(cost, "identity", None)
    made = asdict(profile) if profile is not None else {}
    made |= {name: trace.identity[name] for name in PLAN_FIELDS if name in trace.identity}
    contexts, differing = trace.context_range, what_if(trace.identity, cost)
    made["context_tokens"] = list(contexts) if contexts is not None else None
    made["what_if"] = differing or None
    return {name: value for name, value in made.items() if value is not None}
