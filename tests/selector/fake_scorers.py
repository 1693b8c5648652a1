"""Scorers whose edges are known in advance, for tests of everything around the real one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from selector.errors import ScorerError


class FakeScorer:
    """Base: identity, checks and a file; counts how it was asked."""

    def __init__(self, top_k: int = 16, identity: dict | None = None) -> None:
        self.top_k, self.identity, self.batches = top_k, identity or {}, []

    def check(self, identity) -> None:
        for name, value in identity.items():
            if None not in (value, self.identity.get(name)) and self.identity[name] != value:
                raise ScorerError(f"{name} differs", field=name)

    def save(self, path) -> Path:
        Path(path).write_text(json.dumps(self.identity))
        return Path(path)

    def edges(self, token_ids, log_probs, root_token_ids):
        k = min(self.top_k, token_ids.shape[2])
        self.batches.append(len(token_ids))
        out = np.full((*token_ids.shape[:2], k, k), -np.inf)
        for b in range(len(token_ids)):
            for d in range(token_ids.shape[1]):
                parents = [int(root_token_ids[b])] if d == 0 else token_ids[b, d - 1, :k].tolist()
                for p, parent in enumerate(parents):
                    out[b, d, p] = self.row(d, parent, token_ids[b, d, :k], log_probs[b, d, :k])
        out[np.isnan(out)] = -np.inf
        return out

    def row(self, depth, parent, children, log_probs):
        raise NotImplementedError


class MarginalScorer(FakeScorer):
    """Says what the drafter says, whatever the parent."""

    def row(self, depth, parent, children, log_probs):
        return log_probs


class ArbitraryScorer(FakeScorer):
    """Some function of parent, child and depth that depends on all three; leaves a tenth to none of these."""

    def row(self, depth, parent, children, log_probs):
        scores = np.sin(1.7 * parent + 0.9 * np.asarray(children, float) ** 1.1 + depth) * 2
        real = np.isfinite(log_probs)
        p = np.where(real, np.exp(scores), 0.0)
        with np.errstate(divide="ignore"):
            return np.log(0.9 * p / max(p.sum(), 1e-9))


class TransitionScorer(FakeScorer):
    """Knows the chain that `markov_trace` draws its texts from: the child that follows its parent has 70 % and the rest of
    what the drafter says."""

    def __init__(self, transition, share: float = 0.7, **kwargs) -> None:
        super().__init__(**kwargs)
        self.transition, self.share = transition, share

    def row(self, depth, parent, children, log_probs):
        follows = np.asarray(children) == (self.transition[parent] if parent >= 0 else -1)
        p = np.where(follows, self.share, (1 - self.share) * np.exp(log_probs) * 0.5)
        with np.errstate(divide="ignore"):
            return np.where(np.isfinite(log_probs), np.log(p), -np.inf)


def markov_transition(vocab: int = 30, seed: int = 0):
    """The transition of `markov_trace` with that seed: its first draw."""
    return np.random.default_rng(seed).permutation(vocab)
