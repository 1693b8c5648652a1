"""Any policy replayed round by round, also one whose trees are no prefixes of the order of reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.orders import Orders
from selector.policies import ByCost, FixedShape, Plain, Policy, RoundInputs
from selector.rounds import Curves, Rounds, play
from selector.tree import DraftTree


def play_any(
    policy: Policy,
    orders: Orders,
    curves: Curves,
    calibration: Calibration | None = None,
    price: float | None = None,
    bonus: float = 1.0,
) -> Rounds:
    """What `rounds.play` says of the policies it knows, by asking the policy for every tree (about 0.1 ms a round).

    Args:
        policy: asked with the table, the convex curve and the price given; never with a running scale of reach.
        calibration: another one than `orders` were searched with; no scorer is used then.
    """
    if calibration is not None:
        orders = replace(orders, calibration=calibration, scorer=None)
    visited, nodes, hits, depths, expected = [], [], [], [], []
    for first, after in zip(orders.text_starts[:-1].tolist(), orders.text_starts[1:].tolist(), strict=True):
        anchor = first
        while anchor < after - 1:
            row = curves.bucket[anchor]
            inputs = RoundInputs(curves.table[row], curves.convex[row], price, orders.max_nodes, -1, bonus)
            tree = policy.select(orders.trellis(anchor), inputs)
            hit = accepted_nodes(tree, orders.anchors.next_tokens[anchor])
            visited.append(anchor)
            nodes.append(tree.num_nodes)
            hits.append(hit)
            depths.append(tree.max_depth)
            expected.append(tree.expected_tokens - 1.0)
            anchor += hit + 1
    at, n = np.array(visited, np.int64), np.array(nodes, np.int64)
    seconds = curves.table[curves.bucket[at], n]
    text = np.searchsorted(orders.text_starts, at, side="right") - 1
    per_text = np.bincount(text, seconds, orders.num_texts).astype(np.float64)
    rounds = np.bincount(text, minlength=orders.num_texts)
    return Rounds(
        policy.name, n, np.array(hits, np.int64), at, seconds, per_text, orders.num_tokens, rounds,
        np.array(depths, np.int64), np.array(expected, np.float64), price,
    )  # fmt: skip


def play_policy(
    policy: Policy,
    orders: Orders,
    curves: Curves,
    calibration: Calibration | None = None,
    price: float | None = None,
    reach_scale: float = 1.0,
    adapt: bool = True,
) -> Rounds:
    """Any policy: compiled (`rounds.play`) where its trees are prefixes of the order of reach by a known rule, else asked."""
    if isinstance(policy, Plain | FixedShape | ByCost):  # `orders` were searched with the calibration already
        return play(policy, orders, curves, price, reach_scale, adapt)
    return play_any(policy, orders, curves, calibration, price)


def accepted_nodes(tree: DraftTree, path: NDArray[np.int64]) -> int:
    """Nodes of a tree on the path whose token at depth d + 1 is path[d]; a negative entry ends it."""
    slot, accepted = 0, 0
    for token in path.tolist():
        following = np.flatnonzero((tree.parents == slot) & (tree.token_ids == token))
        if token < 0 or len(following) == 0:
            break
        slot, accepted = int(following[0]), accepted + 1
    return accepted
