"""Where two greedy texts part, and whether rounding explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NEAR_TIE_STEPS = 4  # units in the last place of the larger logit


@dataclass(frozen=True)
class Difference:
    """The first place where a policy's text leaves plain decoding's.

    `gap` is the target's logit of plain's token less that of the policy's token there, `top2_gap` the distance of the two
    largest logits, `step` the spacing of numbers of that size in the dtype. A near-tie is a gap of at most
    `NEAR_TIE_STEPS` steps: products of another number of rows round differently by as much.
    """

    prompt: str
    position: int
    plain_token: int
    other_token: int
    gap: float
    top2_gap: float
    step: float

    @property
    def near_tie(self) -> bool:
        """True where rounding explains the difference."""
        return abs(self.gap) <= NEAR_TIE_STEPS * self.step

    def to_dict(self) -> dict[str, Any]:
        """For JSON records."""
        return {**self.__dict__, "near_tie": self.near_tie}


def first_difference(plain: list[int], other: list[int]) -> int | None:
    """The first index at which the texts differ (a missing token differs), or None."""
    for place in range(max(len(plain), len(other))):
        if place >= len(plain) or place >= len(other) or plain[place] != other[place]:
            return place
    return None


def explain_difference(plain: list[int], plain_logits: torch.Tensor, other: list[int], name: str) -> Difference | None:
    """Compare two texts after one prompt; None where they are the same.

    `plain_logits` (at least as many rows as plain tokens, vocab) are what plain decoding chose its tokens from, row by row.
    """
    place = first_difference(plain, other)
    if place is None:
        return None
    ours = plain[place] if place < len(plain) else -1
    theirs = other[place] if place < len(other) else -1
    if ours < 0 or theirs < 0:  # one text just ends: no rounding explains that
        return Difference(name, place, ours, theirs, float("inf"), float("inf"), 0.0)
    row = plain_logits[place]
    top = row.float().topk(2).values
    gap = float(row[ours].float() - row[theirs].float())
    return Difference(name, place, ours, theirs, gap, float(top[0] - top[1]), spacing(float(top[0]), row.dtype))


def spacing(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next number of that dtype."""
    exponent = torch.frexp(torch.tensor(abs(value), dtype=torch.float64)).exponent.item() - 1
    return float(torch.finfo(dtype).eps) * 2.0**exponent
