"""Scorers for tuning: trained on the texts they are fitted on, given ready-made, or not to be had."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from selector.scoring import EdgeScorer
from selector.trace import Trace

TRAIN = "train"
TRAINING_SECONDS = 1000.0  # of all three trainings together: a quarter per half of the texts, half of it for all texts


@dataclass(frozen=True, eq=False)
class Trained:
    """A scorer, the texts, of those it was trained on, whose drafts it did not learn from, and what is to be known of it."""

    scorer: EdgeScorer
    aside: list[int]
    note: str = ""


Trainer = Callable[[Trace, float], Trained]
"""Makes a scorer from texts within so many seconds."""


def make_trainer(
    scorer: EdgeScorer | str | None, embedding: NDArray[Any] | None, settings: Any = None, trainer: Trainer | None = None
) -> tuple[Trainer | None, str | None]:
    """How to get a scorer for some texts, or None, and a note on what is to be known of it.

    Args:
        scorer: "train", a scorer that is used as it is, or None. embedding: (vocab, hidden) of the target, for training.
        settings: `selector.scorer.ScorerSettings`. trainer: another way to train.
    """
    if scorer is None:
        return None, None
    if scorer != TRAIN:
        given: Any = scorer
        note = "the scorer was given: texts it was trained on flatter it"
        return lambda trace, seconds: Trained(given, list(range(len(trace.texts)))), note
    if trainer is not None:
        return trainer, None
    if importlib.util.find_spec("torch") is None:
        return None, "no scorer: torch is not installed (pip install 'treebudget[decoder]'), so scored candidates were left out"
    if embedding is None:
        return None, "no scorer: the target's embedding was not given, so scored candidates were left out"
    return lambda trace, seconds: _train(trace, embedding, settings, seconds), None


def _train(trace: Trace, embedding: NDArray[Any], settings: Any, seconds: float) -> Trained:
    """Train within the time; the texts kept aside for stopping are told back, to fit on them what the scorer did not see."""
    from selector.scorer import ScorerSettings, train_scorer
    from selector.scorer.preparing import split_texts
    from selector.scorer.training import CALIBRATED_ASIDE

    settings = settings or ScorerSettings()
    settings = replace(settings, max_seconds=min(settings.max_seconds, seconds))
    trained, aside = train_scorer(trace, embedding, settings), split_texts(trace, settings)[1]
    few = settings.calibration_folds > 1 and trained.training["calibrated_on"] == CALIBRATED_ASIDE
    note = f"the scorer is calibrated on {len(aside)} of {len(trace.texts)} texts; with more training time it would be on all"
    return Trained(trained, aside, note if few else "")
