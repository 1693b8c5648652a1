"""Candidate nodes given one by one, for drafters that are no trellis (EAGLE, Medusa, n-grams)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.errors import PoolError
from selector.search.expansion import Expansion
from selector.search.kernels import BUDGET, END_DESCENT, END_EXHAUSTED, END_MAX_NODES, FIRST_DESCENT, PRICED
from selector.trellis import MASS_TOLERANCE


@dataclass(frozen=True, init=False)
class CandidatePool:
    """Nodes with parents and edge probabilities; a parent comes before its children.

    Attributes:
        token_ids: (m,) int64. parents: (m,) int64 indices into the pool, -1 for a child of the root.
        probabilities: (m,) float64, Pr(accept the node | its parent reached).
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    def __init__(self, token_ids: ArrayLike, parents: ArrayLike, probabilities: ArrayLike) -> None:
        """Check and store; raises PoolError naming the first node at fault."""
        object.__setattr__(self, "token_ids", np.array(token_ids, np.int64))
        object.__setattr__(self, "parents", np.array(parents, np.int64))
        object.__setattr__(self, "probabilities", np.array(probabilities, np.float64))
        self._check_parents()
        self._check_siblings()

    def _check_parents(self) -> None:
        m = self.token_ids.size
        if self.token_ids.shape != (m,) or self.parents.shape != (m,) or self.probabilities.shape != (m,):
            shapes = self.token_ids.shape, self.parents.shape, self.probabilities.shape
            raise PoolError(f"token_ids, parents and probabilities must be (m,), got {shapes}")
        outside = np.flatnonzero((self.parents < -1) | (self.parents >= m))
        if outside.size:
            raise PoolError(f"node {outside[0]} has parent {self.parents[outside[0]]}; allowed are -1 (the root) to {m - 1}")
        for node in np.flatnonzero(self.parents >= np.arange(m)).tolist():
            kind = "a cycle" if self._in_cycle(node) else "a forward parent"
            raise PoolError(f"node {node} has {kind}: parent {self.parents[node]}", hint="list parents before their children")

    def _in_cycle(self, node: int) -> bool:
        ancestor = int(self.parents[node])
        for _ in range(len(self.parents)):
            if ancestor in (-1, node):
                break
            ancestor = int(self.parents[ancestor])
        return ancestor == node

    def _check_siblings(self) -> None:
        p = self.probabilities
        bad = np.flatnonzero(~((p >= 0) & (p <= 1)))
        if bad.size:
            raise PoolError(f"node {bad[0]} has edge probability {p[bad[0]]}; allowed are 0 to 1")
        seen: dict[tuple[int, int], int] = {}
        for node, pair in enumerate(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)):
            if pair in seen:
                raise PoolError(f"nodes {seen[pair]} and {node} are duplicate siblings: token {pair[1]} under parent {pair[0]}")
            seen[pair] = node
        mass = np.bincount(self.parents + 1, weights=p, minlength=1)
        if mass.size and mass.max() > 1 + MASS_TOLERANCE:
            parent = int(mass.argmax()) - 1
            raise PoolError(f"edge probabilities of the children of node {parent} sum to {mass.max():.6g}, more than 1")

    @property
    def depths(self) -> NDArray[np.int32]:
        """(m,) depth of every node, 1 for the root's children."""
        depths = np.zeros(len(self.parents) + 1, np.int32)  # last entry: the root, so that index -1 finds it
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = depths[parent] + 1
        return depths[:-1]

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.depths.max(initial=0))

    @property
    def log_reach(self) -> NDArray[np.float64]:
        """(m,) sum of log edge probabilities from the root down."""
        with np.errstate(divide="ignore"):
            edges = np.log(self.probabilities)
        log_reach = np.zeros(len(edges) + 1)
        for node, parent in enumerate(self.parents.tolist()):
            log_reach[node] = log_reach[parent] + edges[node]
        return log_reach[:-1]


def _as_expansion(pool: CandidatePool, nodes: NDArray[np.int64], num_chosen: int, end: int) -> Expansion:
    """Pool nodes in the given order as an expansion; parents become slots."""
    slots = np.zeros(len(pool.parents) + 1, np.int32)
    slots[nodes] = np.arange(1, len(nodes) + 1)
    slots[-1] = 0
    reach = np.exp(pool.log_reach[nodes])
    return Expansion(pool.depths[nodes], pool.token_ids[nodes], slots[pool.parents[nodes]], reach, num_chosen, end, False)


def expand_pool(
    pool: CandidatePool,
    max_nodes: int,
    rule: int = BUDGET,
    cost: NDArray[np.float64] | None = None,
    price: float = 0.0,
    bonus: float = 1.0,
) -> Expansion:
    """As `expansion.expand`, over a pool: all its nodes are ordered (last tie: place in the pool), then a size is chosen."""
    log_reach = pool.log_reach
    order = np.lexsort((pool.token_ids, pool.depths, -log_reach))
    order = order[log_reach[order] > -np.inf]
    end = END_MAX_NODES if len(order) > max_nodes else END_EXHAUSTED
    order = order[: max(int(max_nodes), 0)]
    n = len(order)
    if rule != BUDGET and cost is not None:
        total = bonus + np.concatenate([[0.0], np.cumsum(np.exp(log_reach[order]))])
        value = total - price * cost[: n + 1] if rule == PRICED else total / cost[: n + 1]
        if rule == FIRST_DESCENT:
            falls = np.flatnonzero(~(np.diff(value) > 0))
            n, end = (int(falls[0]), END_DESCENT) if falls.size else (n, end)
        else:
            n = int(np.argmax(value))
    return _as_expansion(pool, order, n, end)


def expand_pool_chain(pool: CandidatePool, max_nodes: int) -> Expansion:
    """From the root on, always the most probable child (ties: lower token id), at most `max_nodes` deep."""
    path: list[int] = []
    node, end = -1, END_EXHAUSTED
    while (children := np.flatnonzero((pool.parents == node) & (pool.probabilities > 0))).size:
        if len(path) >= max_nodes:
            end = END_MAX_NODES
            break
        node = int(children[np.lexsort((pool.token_ids[children], -pool.probabilities[children]))[0]])
        path.append(node)
    nodes = np.array(path, np.int64)
    return _as_expansion(pool, nodes, len(nodes), end)
