"""The ledger of one round: every candidate with its place in the order, its reach, its price, and why it was left out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.explain.account import Divergence, NodeAccount
from selector.replaying.orders import Orders
from selector.search.expansion import expand
from selector.tree import DraftTree

SEARCHED_NODES = 1024  # of the order of reach, to say where candidates stand in it
NUM_SIBLINGS = 2


def _paths(parents: NDArray[Any], token_ids: NDArray[Any]) -> list[tuple[int, ...]]:
    """Tokens from the root down, for every node behind the root in slot order; parents are slots."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents.tolist(), token_ids.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


class Ledger:
    """Prices the candidates of one round: those in the tree in slot order, the others as they would come after it."""

    def __init__(
        self,
        orders: Orders,
        anchor: int,
        tree: DraftTree,
        seconds: NDArray[np.float64],
        price: float | None,
        scale: float,
        policy: str,
    ) -> None:
        trellis = orders.trellis(anchor)
        self.order = expand(trellis, max(SEARCHED_NODES, tree.num_nodes))
        self.paths = _paths(self.order.parents, self.order.token_ids)
        self.place = {path: i for i, path in enumerate(self.paths)}
        self.right = tuple(orders.anchors.next_tokens[anchor].tolist())
        self.listed = orders.hits[anchor] >= 0
        self.tree, self.seconds, self.scale, self.name = tree, seconds, scale, policy
        self.tree_paths = _paths(tree.parents[1:], tree.token_ids[1:])
        inside = set(self.tree_paths)
        self.outside = [i for i, path in enumerate(self.paths) if path not in inside]
        self.rank = {i: k for k, i in enumerate(self.outside)}
        self.expected_tokens = 1.0 + self.scale * (tree.expected_tokens - 1.0)
        self.price = self.expected_tokens / self.round_seconds if price is None else price

    @property
    def round_seconds(self) -> float:
        """Seconds of the round, drafting included."""
        return float(self.seconds[min(self.tree.num_nodes, len(self.seconds) - 1)])

    def inside(self) -> list[NodeAccount]:
        """The tree's nodes by slot."""
        parents = self.tree.parents
        return [
            self._node(path, slot, float(self.tree.reach[slot]), float(self.tree.reach[parents[slot]]), slot)
            for slot, path in enumerate(self.tree_paths, start=1)
        ]

    def left_out(self, index: int) -> NodeAccount:
        """A candidate that is no node, by its index in the order."""
        parent = int(self.order.parents[index])
        above = float(self.order.reach[parent - 1]) if parent else 1.0
        size = self.tree.num_nodes + self.rank[index] + 1
        return self._node(self.paths[index], None, float(self.order.reach[index]), above, size, self._why(index))

    def _node(
        self, path: tuple[int, ...], slot: int | None, reach: float, above: float, size: int, why: str | None = None
    ) -> NodeAccount:
        place, last = self.place.get(path), len(self.seconds) - 1
        at = min(size, last)  # beyond the curve a node is charged what the last one on it costs
        marginal = float(self.seconds[at] - self.seconds[at - 1]) if last else 0.0
        gain = self.scale * reach - self.price * marginal
        accepted = path == self.right[: len(path)]
        edge = reach / above if above > 0 else 0.0
        return NodeAccount(path, slot, None if place is None else place + 1, edge, reach, marginal, gain, accepted, why)

    def _why(self, index: int) -> str:
        """Why the tree does not go on to this candidate."""
        n, rank = self.tree.num_nodes, self.rank[index]
        largest = f"a tree may have {n} nodes at most (--max-nodes, or the end of the profile)"
        if self.name == "plain":
            return "plain decoding drafts nothing"
        if self.name.startswith("chain"):
            return f"not among the chain's {n} nodes"
        if self.name.startswith("fixed"):
            return f"the budget is {n} nodes" if n < len(self.seconds) - 1 or self.name == f"fixed:{n}" else largest
        fits = min(rank + 1, len(self.seconds) - 1 - n)
        if fits < 1:
            return largest
        brings = self.scale * float(self.order.reach[self.outside[:fits]].sum())
        costs = self.price * float(self.seconds[n + fits] - self.seconds[n])
        upto = "it" if rank == 0 else f"the {fits} up to it" if fits > rank else f"the {fits} before it that fit"
        trade = f"{upto} would bring {brings:.3f} tokens and take time worth {costs:.3f}"
        return trade if brings <= costs else f"{trade}, but {self.name} ends by its own rule"

    def divergence(self, accepted: int) -> Divergence:
        """Where the target's own tokens leave the tree."""
        depth, path = accepted + 1, self.right[: accepted + 1]
        if accepted == len(self.right):
            return Divergence(depth, None, False, None, None, None, "the whole draft was right: it ends here")
        token = path[-1]
        if token < 0:
            return Divergence(depth, None, False, None, None, None, "the text ends here")
        index = self.place.get(path)
        if index is not None:
            node = self.left_out(index)
            return Divergence(depth, token, True, node.place, node.reach, node.gain, str(node.why))
        listed = bool(self.listed[accepted])
        why = f"listed, but not among the first {len(self.paths)} candidates" if listed else "the drafter did not list it"
        return Divergence(depth, token, listed, None, None, None, why)

    def siblings(self, accepted: int) -> list[NodeAccount]:
        """Beside the target's path, down to where it left the tree: the best left out at every depth, and its own token."""
        found: list[int] = []
        for depth in range(accepted + 1):
            right = self.right[:depth]
            found += [i for i in self.outside if len(self.paths[i]) == depth + 1 and self.paths[i][:-1] == right][:NUM_SIBLINGS]
        own = self.place.get(self.right[: accepted + 1]) if accepted < len(self.right) else None
        return [self.left_out(i) for i in (found if own is None or own in found else [*found, own])]
