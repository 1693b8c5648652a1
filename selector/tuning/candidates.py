"""What tuning compares, and how what is free in a candidate is chosen on some texts."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.policies import SCALED_POLICIES, Policy
from selector.price import PriceRange, prices_at
from selector.registry import parse_policy
from selector.replaying.playing import play_policy
from selector.replaying.replay import best_chain, best_fixed
from selector.replaying.rounds import Rounds, measured_scale, play
from selector.tuning.parts import Part
from selector.tuning.pricing import price_ranges, round_tokens
from selector.tuning.settings import tune_smart, tune_taps_in_turn

BY_REACH = ("fixed", "unimodal", "exact", "priced")
ASKED = ("taps", "smart")  # played round by round, which is slow: their settings are found on fewer texts
ASKED_TOKENS = 2500  # generated tokens of those texts, at most
SCALE_BOUNDS = (0.25, 1.5)


@dataclass(frozen=True)
class Candidate:
    """A way to decode that tuning compares: a kind of policy, on drafted, calibrated or scored probabilities."""

    kind: str  # plain, chain, fixed, unimodal, exact, priced, taps, smart
    edges: str = DRAFTED

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.kind if self.edges == DRAFTED else f"{self.kind}, {self.edges}"


def candidates(with_scorer: bool) -> tuple[Candidate, ...]:
    """All candidates, the scored ones only where there is a scorer."""
    pairs = [(kind, edges) for kind in BY_REACH for edges in (DRAFTED, CALIBRATED, SCORED)]
    pairs += [(kind, edges) for kind in ASKED for edges in (DRAFTED, CALIBRATED)]
    made = (Candidate("plain"), Candidate("chain"), *(Candidate(*pair) for pair in pairs))
    return tuple(one for one in made if with_scorer or one.edges != SCORED)


CANDIDATES = candidates(False)


@dataclass(frozen=True)
class Fit:
    """What was fitted on some texts for one candidate."""

    policy: Policy
    price: float | None = None
    reach_scale: float = 1.0
    prices: tuple[PriceRange, ...] = ()

    def play(self, part: Part) -> Rounds:
        """Decode texts with it; the part was searched with the candidate's own probabilities."""
        price = prices_at(self.prices, part.orders.context_tokens) if self.prices else self.price
        return play_policy(self.policy, part.orders, part.curves, price, self.reach_scale)

    @property
    def settings(self) -> dict[str, Any]:
        """What the policy's name leaves open, by field."""
        named = parse_policy(self.policy.name)
        if not is_dataclass(self.policy):
            return {}
        values = {item.name: getattr(self.policy, item.name) for item in fields(self.policy)}
        return {name: value for name, value in values.items() if value != getattr(named, name)}


def fit_candidate(candidate: Candidate, part: Part) -> Fit:
    """Choose what is free in a candidate (length, budget, settings, price, scale) on texts searched with its probabilities."""
    orders, curves = part.orders, part.curves
    if candidate.kind == "chain":
        return Fit(parse_policy(best_chain(orders, curves).policy))
    if candidate.kind == "fixed":
        return Fit(parse_policy(best_fixed(orders, curves).policy))
    if candidate.kind == "taps":
        few = part.thinned(ASKED_TOKENS)
        return Fit(tune_taps_in_turn(few.orders, few.curves))
    if candidate.kind == "smart":
        few = part.thinned(ASKED_TOKENS)
        return Fit(tune_smart(few.orders, few.curves)[0])
    policy = parse_policy(candidate.kind)
    if candidate.kind not in SCALED_POLICIES:
        return Fit(policy)
    scale = float(np.clip(measured_scale(play(policy, orders, curves)), *SCALE_BOUNDS))
    found = play(policy, orders, curves, reach_scale=scale)
    if candidate.kind == "exact" or curves.flat:
        return Fit(policy, found.price, scale)
    contexts = orders.context_tokens[found.visited]
    return Fit(policy, found.price, scale, tuple(price_ranges(contexts, round_tokens(found, orders), found.seconds)))
