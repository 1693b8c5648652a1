"""At temperature 1 the loop's texts have the target's own distribution, whatever is drafted."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from decoder.loop import Decoder
from decoder.target import Target
from tests.decoder.helpers import RandomDrafter, RandomTreeSelector, text_logits, tiny_target

PROMPT = [1, 4, 2]
VOCAB = 8


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=VOCAB, layers=2, hidden=16, scale=0.5)


def exact_probabilities(target: Target) -> np.ndarray:
    """Probability of every sequence of three tokens, (8, 8, 8), from whole forwards."""
    result = np.zeros((VOCAB,) * 3)
    for first, second in itertools.product(range(VOCAB), repeat=2):
        rows = torch.softmax(text_logits(target, [*PROMPT, first, second])[-3:].double(), dim=1).numpy()
        result[first, second] = rows[0, first] * rows[1, second] * rows[2]
    return result


def test_sequence_frequencies(target: Target) -> None:
    """Chi-square over the 512 sequences (rare ones pooled), at a threshold with odds of a false alarm of 1 in 10^6."""
    expected = exact_probabilities(target).ravel()
    assert expected.sum() == pytest.approx(1)
    decoder = Decoder(target, RandomDrafter(VOCAB, block_size=3), RandomTreeSelector(2, max_nodes=8, top_k=8, plain_share=0.1))
    counts, num_samples = np.zeros(VOCAB**3), 3000
    for seed in range(num_samples):
        a, b, c = decoder.generate(PROMPT, 3, temperature=1.0, seed=seed).token_ids
        counts[(a * VOCAB + b) * VOCAB + c] += 1
    assert sum(accepted for _, accepted in decoder.selector.observed) > num_samples // 10  # drafts did take part
    common = expected * num_samples >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * num_samples
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < chi2.isf(1e-6, len(observed) - 1)
    assert math.isfinite(statistic)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 3}])
def test_one_seed_gives_one_text_for_every_policy(target: Target, settings: dict[str, float]) -> None:
    """Each emitted token takes one draw in order, so drafting does not even change the sample."""
    for seed in range(5):
        plain = Decoder(target).generate(PROMPT, 20, temperature=1.0, seed=seed, **settings).token_ids  # type: ignore[arg-type]
        decoder = Decoder(target, RandomDrafter(VOCAB, block_size=4), RandomTreeSelector(seed, top_k=8))
        assert decoder.generate(PROMPT, 20, temperature=1.0, seed=seed, **settings).token_ids == plain  # type: ignore[arg-type]
    assert len(set(plain)) > 2
