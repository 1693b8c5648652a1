"""Everything that is free in training a scorer: sizes, losses, labels, weights and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from selector.errors import ScorerError


@dataclass(frozen=True)
class ScorerSettings:
    """How a scorer is built and trained. Defaults are what did best on held-out prompts (docs/results.md).

    Attributes:
        top_k: candidates per depth that are scored. token_features: numbers per token and role that are learned from the
            target's embedding. hidden: width of the hidden layer. embedding_components: principal components of the
            embedding that the projection starts from.
        kl_weight, reach_weight: weights of the two TAPS losses (local distribution; reach along the path).
        soft_share: share of the target's distribution in the labels where a trace has it, the rest is the token of the
            text. sharpening: exponent on the target's probabilities before they are labels (infinity: its argmax).
        unvisited_weight: weight of anchors from which decoding would start no round.
        validation_share: share of the texts kept for early stopping. calibration_folds: further networks, each blind to
            that fraction of the texts, on which the calibration is fitted; below 2, or where the time does not suffice, it
            is fitted on the texts kept aside.
        averaging: share of the past in the running mean of the weights, which is what is judged and kept.
        max_epochs, max_steps: whichever is shorter; the learning rate falls to nearly 0 until there. patience: epochs
            without a better held-out log-loss before it stops. max_seconds: training stops there in any case, best
            weights so far kept (and is then not repeatable). device: "cpu" or "cuda".
    """

    top_k: int = 16
    token_features: int = 32
    hidden: int = 32
    embedding_components: int = 576
    kl_weight: float = 1.0
    reach_weight: float = 0.5
    soft_share: float = 1.0
    sharpening: float = 1.0
    unvisited_weight: float = 0.5
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.4
    averaging: float = 0.98
    batch_anchors: int = 256
    max_epochs: int = 20
    max_steps: int = 4000
    patience: int = 5
    max_seconds: float = 400.0
    validation_share: float = 0.2
    calibration_folds: int = 4
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check ranges; raises ScorerError naming the field."""
        for name in (
            "top_k",
            "token_features",
            "hidden",
            "embedding_components",
            "batch_anchors",
            "max_epochs",
            "max_steps",
            "patience",
        ):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ScorerError(f"scorer settings: {name} must be at least 1 and whole, got {getattr(self, name)}")
        for name in ("calibration_folds", "seed"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ScorerError(f"scorer settings: {name} must not be negative and whole, got {getattr(self, name)}")
        for name in ("kl_weight", "reach_weight", "weight_decay", "learning_rate", "max_seconds", "sharpening"):
            value = getattr(self, name)
            if not value >= 0 or (value == math.inf and name != "sharpening"):
                raise ScorerError(f"scorer settings: {name} must not be negative or without end, got {value}")
        for name in ("soft_share", "unvisited_weight", "dropout", "averaging", "validation_share"):
            value, open_end = getattr(self, name), name in ("dropout", "averaging", "validation_share")  # 1 would learn nothing
            if not 0 <= value <= 1 or (open_end and value == 1):
                raise ScorerError(f"scorer settings: {name} must lie in [0, 1{')' if open_end else ']'}, got {value}")
        if self.kl_weight + self.reach_weight <= 0:
            raise ScorerError("scorer settings: kl_weight and reach_weight are both 0, nothing would be learned")
