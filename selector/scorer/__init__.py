"""Learned acceptance: chances of every edge of a round from its parent, its child and the draft's statistics."""

from __future__ import annotations

from selector.scorer.judging import tokens_per_round_by_budget
from selector.scorer.scorer import Scorer
from selector.scorer.settings import ScorerSettings
from selector.scorer.training import train_scorer

__all__ = ["Scorer", "ScorerSettings", "tokens_per_round_by_budget", "train_scorer"]
