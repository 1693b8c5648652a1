"""Policy `smart`: a node is taken while it yields more per second than the tree so far, times a discount."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selector.errors import PolicyError
from selector.policies import Candidates, RoundInputs, expand_candidates, is_flat
from selector.search.kernels import END_MAX_NODES
from selector.tree import DraftTree


@dataclass(frozen=True)
class Smart:
    """SMART (arXiv 2604.09731): expand a node only if its marginal benefit over cost exceeds the tree's speed-up.

    With n nodes taken, tokens T = bonus + Phi(n) and seconds c(n), the next node of reach q is taken while
    q / (c(n + 1) - c(n)) > alpha T / c(n); both sides carry the seconds of a plain step, which cancel. The paper expands
    level by level while drafting; with a block drafter all candidates are there at once, so they are taken in order of
    reach: as the marginal cost does not depend on which node it is, the first one refused refuses all later ones.

    Attributes:
        percent: alpha in percent. 100 is first descent, as `unimodal`; below it, a dip may be crossed for what may come.
    """

    percent: int = 100
    drafts = True

    def __post_init__(self) -> None:
        """Check; raises PolicyError."""
        if self.percent < 1:
            raise PolicyError(f"smart needs a discount of at least 1 percent, got {self.percent}")

    @property
    def name(self) -> str:
        """`smart`, or `smart:P` for a discount of P percent."""
        return "smart" if self.percent == 100 else f"smart:{self.percent}"

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """Nodes in order of reach while each pays its way on the convex curve."""
        limit = min(inputs.max_nodes, len(inputs.convex_round_seconds) - 1)
        flat = is_flat(inputs.convex_round_seconds)
        limit = min(limit, candidates.depth) if flat else limit
        order = expand_candidates(candidates, limit)
        n = len(order.reach)
        status = "degenerate-cost" if flat else "truncated:max_nodes" if order.end == END_MAX_NODES else "exhausted"
        if not flat and n:
            cost = inputs.convex_round_seconds[: n + 1]
            tokens = inputs.bonus + np.concatenate([[0.0], np.cumsum(order.reach[:-1])])
            pays = order.reach * cost[:-1] > self.percent / 100 * tokens * np.diff(cost)
            if not pays.all():
                n, status = int(np.argmin(pays)), "first-descent"
        if not flat and order.truncated_by_k and expand_candidates(candidates, min(n + 1, limit)).truncated_by_k:
            status = "truncated:top_k"  # before a node taken, or before the one refused
        return DraftTree.from_expansion(order._replace(num_chosen=n), status, inputs.root_token, inputs.seconds(n))
