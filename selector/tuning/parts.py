"""Texts of a trace, searched and priced: what one half of a cross-fit works with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from selector.calibration import Calibration, fit_calibration
from selector.policies import ByCost
from selector.replaying.orders import Orders, build_orders
from selector.replaying.rounds import Curves, build_curves, play
from selector.scoring import EdgeScorer
from selector.trace import Trace

UNVISITED_WEIGHT = 0.25  # of anchors that decoding does not start a round from, in fitting a calibration


@dataclass(frozen=True, eq=False)
class Part:
    """Texts with their searched anchors and the cost of rounds there."""

    trace: Trace
    orders: Orders
    curves: Curves

    @classmethod
    def of(cls, trace: Trace, cost: Any, max_nodes: int) -> Part:
        """Search by the drafter's own probabilities."""
        orders = build_orders(trace, max_nodes)
        return cls(trace, orders, build_curves(orders, cost))

    def calibrated(self, calibration: Calibration) -> Part:
        """The same texts, searched by calibrated probabilities."""
        return replace(self, orders=build_orders(self.trace, self.orders.max_nodes, calibration))

    def scored(self, scorer: EdgeScorer, scoring_seconds: float) -> Part:
        """The same texts, searched by scored probabilities; every drafting round takes the seconds of scoring more."""
        orders = build_orders(self.trace, self.orders.max_nodes, None, scorer)
        return Part(self.trace, orders, self.curves.plus(scoring_seconds))

    def select(self, indices: list[int]) -> Part:
        """Some of the texts."""
        orders = self.orders.select(indices)
        return Part(self.trace.select(indices), orders, self.curves.select(self.orders.anchors_of(indices)))

    def thinned(self, max_tokens: int) -> Part:
        """Every n-th text, so that about `max_tokens` generated tokens are left."""
        step = max(1, -(-self.trace.num_generated_tokens // max(max_tokens, 1)))
        return self if step == 1 else self.select(list(range(0, len(self.trace.texts), step)))


def fit_calibration_on(part: Part) -> Calibration:
    """Per-depth temperature and scale on the anchors that decoding with `exact` really starts rounds from.

    Rounds restart where a draft failed, which is a harder place than an average one; other anchors count a quarter.
    """
    visited = play(ByCost("exact"), part.orders, part.curves).visited
    weights = np.where(part.orders.visitable, UNVISITED_WEIGHT, 0.0)
    weights[visited] = 1.0
    return fit_calibration(part.orders.log_edges, part.orders.hits, weights)


def split_halves(trace: Trace) -> tuple[list[int], list[int]]:
    """Indices of two halves, alternating within every data set."""
    halves: tuple[list[int], list[int]] = ([], [])
    order = sorted(range(len(trace.texts)), key=lambda i: (trace.texts[i].dataset or "", i))
    for place, index in enumerate(order):
        halves[place % 2].append(index)
    return sorted(halves[0]), sorted(halves[1])
