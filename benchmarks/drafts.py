"""Draft logits as a block drafter has them, made up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def draft_logits(depth: int, vocab: int, seed: int = 0) -> NDArray[np.float32]:
    """Logits as a block drafter has them: a noisy floor and a few hundred raised tokens, less sure with depth."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((depth, vocab), dtype=np.float32)
    for d in range(depth):
        raised = rng.choice(vocab, 400, replace=False)
        fall = (0.9 - 0.5 * d / depth) * np.log1p(np.arange(400)) * 3.0
        logits[d, raised] += (14.0 - 2.0 * d / depth - fall + rng.standard_normal(400)).astype(np.float32)
    return logits
