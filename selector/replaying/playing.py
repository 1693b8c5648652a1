"""Any policy replayed round by round, also one whose trees are no prefixes of the order of reach."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from selector.policies import ByCost, FixedShape, Plain, Policy, RoundInputs
from selector.replaying.orders import Orders
from selector.replaying.rounds import Curves, Rounds, play
from selector.tree import DraftTree


def play_any(policy: Policy, orders: Orders, curves: Curves, price: float | NDArray[np.float64] | None = None) -> Rounds:
    """What `rounds.play` says of the policies it knows, by asking the policy for every tree (about 0.1 ms a round).

    The policy is asked with the probabilities that `orders` were searched by, the table, the convex curve and the price
    given (one, or one per anchor); never with a running scale of reach.
    """
    prices = None if price is None else np.broadcast_to(np.asarray(price, np.float64), orders.sizes.shape)
    visited, nodes, hits, depths, expected = [], [], [], [], []
    for first, after in zip(orders.text_starts[:-1].tolist(), orders.text_starts[1:].tolist(), strict=True):
        anchor = first
        while anchor < after - 1:
            row = curves.bucket[anchor]
            charged = None if prices is None else float(prices[anchor])
            inputs = RoundInputs(curves.table[row], curves.convex[row], charged, orders.max_nodes)
            tree = policy.select(orders.trellis(anchor), inputs)
            hit = accepted_nodes(tree, orders.anchors.next_tokens[anchor])
            visited.append(anchor)
            nodes.append(tree.num_nodes)
            hits.append(hit)
            depths.append(tree.max_depth)
            expected.append(tree.expected_tokens - 1.0)
            anchor += hit + 1
    at, n = np.array(visited, np.int64), np.array(nodes, np.int64)
    return Rounds.of(
        policy.name, orders, at, n, np.array(hits, np.int64), curves.table[curves.bucket[at], n],
        np.array(depths, np.int64), np.array(expected, np.float64), None if price is None else float(np.mean(price)),
    )  # fmt: skip


def play_policy(
    policy: Policy,
    orders: Orders,
    curves: Curves,
    price: float | NDArray[np.float64] | None = None,
    reach_scale: float = 1.0,
    adapt: bool = True,
) -> Rounds:
    """Any policy: compiled (`rounds.play`) where its trees are prefixes of the order of reach by a known rule, else asked."""
    if isinstance(policy, Plain | FixedShape | ByCost):
        return play(policy, orders, curves, price, reach_scale, adapt)
    return play_any(policy, orders, curves, price)


def accepted_nodes(tree: DraftTree, path: NDArray[np.int64]) -> int:
    """Nodes of a tree on the path whose token at depth d + 1 is path[d]; a negative entry ends it."""
    slot, accepted = 0, 0
    for token in path.tolist():
        following = np.flatnonzero((tree.parents == slot) & (tree.token_ids == token))
        if token < 0 or len(following) == 0:
            break
        slot, accepted = int(following[0]), accepted + 1
    return accepted
