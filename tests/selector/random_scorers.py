"""Scorers with random weights and rounds for them to score: the real network, small."""

from __future__ import annotations

import numpy as np

from selector.scorer import Scorer
from selector.scorer.inference import Weights
from selector.scorer.network import shapes

VOCAB, SIZE, HIDDEN, DEPTH = 40, 4, 6, 3


def make_weights(rng: np.random.Generator | None = None, scale: float = 0.5) -> dict[str, np.ndarray]:
    sizes = shapes(SIZE, HIDDEN, DEPTH) | {"parent_table": (VOCAB, SIZE), "child_table": (VOCAB, SIZE)}
    made = {name: np.zeros(size) if rng is None else scale * rng.standard_normal(size) for name, size in sizes.items()}
    made["slopes"] = np.ones(DEPTH) if rng is None else rng.uniform(0.5, 1.5, DEPTH)
    made["gains"] = np.ones(DEPTH) if rng is None else rng.uniform(0.0, 1.5, DEPTH)
    made["none_offsets"] = np.zeros(DEPTH) if rng is None else rng.standard_normal(DEPTH)
    made = {name: np.asarray(value, np.float32) for name, value in made.items()}
    for name in ("parent_table", "child_table"):
        made[name] = made[name].astype(np.float16).astype(np.float32)
    return made


def make_scorer(rng: np.random.Generator | None = None, **changes: np.ndarray) -> Scorer:
    return Scorer(Weights(**(make_weights(rng) | changes)), 5, {"target": "toy", "drafter": "small", "block_size": 4})


def make_rounds(rng: np.random.Generator, batch: int, depth: int, width: int, pads: bool = True) -> tuple[np.ndarray, ...]:
    """Proposals by falling probability, some rows with pads at their end, some tokens outside the scorer's vocabulary."""
    p = -np.sort(-rng.dirichlet(np.full(width + 1, 0.4), (batch, depth))[..., :width], axis=-1)
    ids = np.array([[rng.permutation(VOCAB + 5)[:width] for _ in range(depth)] for _ in range(batch)]).reshape(p.shape)
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    if pads:
        cut = np.arange(width) >= rng.integers(1, width + 1, (batch, depth, 1))
        ids, logs = np.where(cut, -1, ids), np.where(cut, -np.inf, logs)
    return ids.astype(np.int64), logs, rng.integers(0, VOCAB + 5, batch)
