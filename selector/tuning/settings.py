"""Settings of `taps` and `smart`, which are asked for every tree: those that play fastest on some texts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from selector.errors import PolicyError
from selector.replaying.orders import Orders
from selector.replaying.playing import play_any
from selector.replaying.rounds import Curves, Rounds
from selector.smart import Smart
from selector.taps import Taps

TAPS_NODES, TAPS_THRESHOLDS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128), (0.0, 0.01, 0.03, 0.1)
TAPS_DEPTH_WEIGHTS = (0.0, Taps.depth_weight, 0.05, 0.2)
SMART_PERCENTS = (25, 40, 50, 60, 70, 80, 90, 100, 120, 150)


def tune_smart(orders: Orders, curves: Curves, percents: Iterable[int] = SMART_PERCENTS) -> tuple[Smart, Rounds]:
    """The discount with the most tokens per second on a trace, and how it played."""
    played = [(Smart(int(percent)), play_any(Smart(int(percent)), orders, curves)) for percent in percents]
    if not played:
        raise PolicyError("tuning smart needs at least one discount")
    return max(played, key=lambda pair: pair[1].tokens_per_second)


def tune_taps(
    orders: Orders,
    curves: Curves,
    max_nodes: Iterable[int],
    thresholds: Iterable[float],
    depth_weights: Iterable[float],
) -> tuple[Taps, Rounds]:
    """The settings with the most tokens per second on a trace, and how they played.

    `node_weight` only scales the threshold, so it is left as it is. Every combination is played over all texts.
    """
    best: tuple[Taps, Rounds] | None = None
    for nodes, threshold, weight in product(max_nodes, thresholds, depth_weights):
        policy = Taps(int(nodes), utility_threshold=float(threshold), depth_weight=float(weight))
        played = play_any(policy, orders, curves)
        if best is None or played.tokens_per_second > best[1].tokens_per_second:
            best = policy, played
    if best is None:
        raise PolicyError("tuning taps needs at least one value of every setting")
    return best


def tune_taps_in_turn(orders: Orders, curves: Curves) -> Taps:
    """Settings one after the other: size without a threshold, threshold with as many nodes or more, weight on depth."""
    largest = max(orders.max_nodes, 1)
    sizes = sorted({min(size, largest) for size in TAPS_NODES})
    policy, _ = tune_taps(orders, curves, sizes, [0.0], [Taps.depth_weight])
    more = sorted({min(times * policy.max_nodes, largest) for times in (1, 2, 4)})
    policy, _ = tune_taps(orders, curves, more, TAPS_THRESHOLDS, [Taps.depth_weight])
    return tune_taps(orders, curves, [policy.max_nodes], [policy.utility_threshold], TAPS_DEPTH_WEIGHTS)[0]
