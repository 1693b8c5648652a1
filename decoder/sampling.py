"""How a token is chosen from one row of the target's logits: exactly the same way in plain and in tree decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from decoder.errors import LogitsError, UsageError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the largest logit (lowest id on ties); above it, tokens are drawn, after top-k and top-p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise UsageError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def greedy_ids(logits: torch.Tensor) -> np.ndarray:
    """Largest logit of every row, (t,) int64, the lowest id on ties; a NaN anywhere raises LogitsError.

    On CPU through numpy, whose argmax promises the first occurrence and treats NaN as the largest.
    """
    if logits.device.type == "cpu":
        rows = logits.float().numpy()
        ids = rows.argmax(axis=1)
        if np.isnan(rows[np.arange(len(rows)), ids]).any():
            raise LogitsError("the target's logits contain NaN")
        return ids
    return _greedy_on_device(logits)


def _greedy_on_device(logits: torch.Tensor) -> np.ndarray:
    """The same where the logits are, without relying on which of several maxima a kernel's argmax returns."""
    largest = logits.amax(dim=1, keepdim=True)  # NaN if the row has one
    places = torch.arange(logits.shape[1], device=logits.device)
    ids = torch.where(logits == largest, places, logits.shape[1]).amin(dim=1).cpu().numpy()
    if (ids == logits.shape[1]).any():
        raise LogitsError("the target's logits contain NaN")
    return ids


def token_probabilities(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution (vocab,) float64 that tokens are drawn from: softmax at the temperature, then top-k, then top-p.

    Top-p keeps the smallest set of most likely tokens whose probability reaches `top_p`.
    """
    probabilities = torch.softmax(row.double().cpu() / sampling.temperature, dim=0)
    if sampling.top_k is None and sampling.top_p is None:
        return probabilities
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k:] = 0
        ordered /= ordered.sum()
    if sampling.top_p is not None:
        before = torch.cumsum(ordered, dim=0) - ordered
        ordered[before >= sampling.top_p] = 0
    kept = torch.zeros_like(probabilities)
    kept[ids] = ordered
    return kept / kept.sum()


class TokenChooser:
    """Chooses one token per emitted position; at a temperature, with one uniform draw each, in order of emission.

    So with one seed, plain and tree decoding draw the same numbers for the same positions.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.random = torch.Generator().manual_seed(sampling.seed)

    def prepare(self, logits: torch.Tensor) -> RowChoice:
        """Take the logits (t, vocab) of one forward; raises LogitsError for NaN before anything is chosen."""
        if self.sampling.temperature == 0:
            return RowChoice(self, greedy_ids(logits), None)
        if bool(torch.isnan(logits).any()):
            raise LogitsError("the target's logits contain NaN")
        return RowChoice(self, None, logits)

    def draw(self, row: torch.Tensor) -> int:
        """Draw one token from one row (vocab,) by inverting the cumulative distribution."""
        cumulative = torch.cumsum(token_probabilities(row, self.sampling), dim=0)
        if not 0 < float(cumulative[-1]) < math.inf:
            raise LogitsError(f"the target's logits give no distribution at temperature {self.sampling.temperature}")
        point = torch.rand((), generator=self.random, dtype=torch.float64) * cumulative[-1]
        token = int(torch.searchsorted(cumulative, point, right=True))
        return min(token, int(torch.searchsorted(cumulative, cumulative[-1])))


@dataclass(frozen=True)
class RowChoice:
    """The rows of one forward, ready to give a token for a slot."""

    chooser: TokenChooser
    ids: np.ndarray | None
    logits: torch.Tensor | None

    def token(self, slot: int) -> int:
        """The target's token after the given slot; at a temperature every call draws anew."""
        if self.ids is not None:
            return int(self.ids[slot])
        assert self.logits is not None
        return self.chooser.draw(self.logits[slot])
