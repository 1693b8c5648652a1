"""Policy `taps`: nodes by utility, that is reach over a cost by depth, up to a size or down to a threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selector.errors import PolicyError
from selector.policies import Candidates, RoundInputs, expand_candidates
from selector.search.expansion import Expansion
from selector.tree import DraftTree


@dataclass(frozen=True)
class Taps:
    """TAPS (arXiv 2606.00487, section 4.3): a compact prefix-closed subtree of a larger pool of candidates.

    Utility of a node v is reach(v) / (1 + node_weight + depth_weight depth(v)). Nodes enter by falling utility, their
    ancestors with them, until `max_nodes` are in or the utility is below the threshold. With weights of at least 0 no
    node's utility exceeds its parent's (its reach is no larger, its divisor no smaller), so the first nodes by utility
    are prefix-closed as they are.

    Attributes:
        max_nodes: N_max. pool_nodes: N_pool, candidates of highest reach that are looked at. top_k: K, children of one
        parent among them. utility_threshold, node_weight, depth_weight: as above. Defaults: the public code's.
    """

    max_nodes: int = 192
    pool_nodes: int = 2048
    top_k: int = 16
    utility_threshold: float = 0.0
    node_weight: float = 0.0
    depth_weight: float = 0.004
    drafts = True

    def __post_init__(self) -> None:
        """Check; raises PolicyError."""
        if min(self.max_nodes, self.pool_nodes, self.top_k) < 1:
            raise PolicyError(f"taps needs max_nodes, pool_nodes and top_k of at least 1, got {self}")
        if not all(value >= 0 for value in (self.node_weight, self.depth_weight, self.utility_threshold)):
            raise PolicyError(f"taps needs weights and a threshold of at least 0, got {self}")

    @property
    def name(self) -> str:
        """`taps`, or `taps:N` for another N_max than the default's."""
        return "taps" if self.max_nodes == Taps.max_nodes else f"taps:{self.max_nodes}"

    def utility(self, reach: NDArray[np.float64], depths: NDArray[np.int32]) -> NDArray[np.float64]:
        """(m,) what a node is worth per unit of its cost."""
        return reach / (1.0 + self.node_weight + self.depth_weight * depths)

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """The nodes of highest utility; the cost curve is not looked at.

        Status "budget" if `max_nodes` were taken, "truncated:max_nodes" if the round allows fewer than those and there are
        more, "threshold" if the rest is not useful enough, "exhausted" if there is no more.
        """
        pool = expand_candidates(candidates, self.pool_nodes)
        listed = np.flatnonzero(within_top_k(pool, self.top_k))
        utility = self.utility(pool.reach[listed], pool.depths[listed])
        order = np.argsort(-utility, kind="stable")
        useful = int(np.count_nonzero(utility >= self.utility_threshold))
        limit = min(self.max_nodes, inputs.max_nodes)
        nodes = np.sort(listed[order[: min(useful, limit)]])
        if len(nodes) == self.max_nodes:
            status = "budget"
        elif useful > limit:
            status = "truncated:max_nodes"
        else:
            status = "threshold" if useful < len(listed) else "exhausted"
        return DraftTree.from_expansion(subset(pool, nodes), status, inputs.root_token, inputs.seconds(len(nodes)))


def within_top_k(pool: Expansion, top_k: int) -> NDArray[np.bool_]:
    """(m,) nodes that, and whose ancestors, are among the `top_k` first children of their parents."""
    m = len(pool.parents)
    by_parent = np.argsort(pool.parents, kind="stable")
    first = np.searchsorted(pool.parents[by_parent], pool.parents[by_parent])  # where a node's group of siblings starts
    listed = np.ones(m + 1, bool)  # by slot
    listed[1 + by_parent] = np.arange(m) - first < top_k
    if not listed.all():
        for slot, parent in enumerate(pool.parents.tolist(), start=1):
            listed[slot] &= listed[parent]
    return listed[1:]


def subset(pool: Expansion, nodes: NDArray[np.intp]) -> Expansion:
    """A prefix-closed set of nodes, given by rising index, as an expansion of its own."""
    slots = np.zeros(len(pool.parents) + 1, np.int32)
    slots[1 + nodes] = np.arange(1, len(nodes) + 1)
    return Expansion(
        pool.depths[nodes], pool.token_ids[nodes], slots[pool.parents[nodes]], pool.reach[nodes], len(nodes), pool.end, False
    )
