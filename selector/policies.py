"""The rules that turn a round's proposals and a cost curve into a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from selector.errors import CostCurveError
from selector.pool import CandidatePool, expand_pool, expand_pool_chain
from selector.search.expansion import Expansion, expand, expand_chain
from selector.search.kernels import BUDGET, END_DESCENT, END_MAX_NODES, EXACT, FIRST_DESCENT, PRICED
from selector.tree import DraftTree
from selector.trellis import Trellis

Curve = NDArray[np.float64]
Candidates = Trellis | CandidatePool

SCALED_POLICIES = ("exact", "priced")  # take reach as it was found to come true; the others stay as their papers have them
FLAT_TOLERANCE = 1e-6  # a cost curve that varies less than this (relative) cannot price a tree


@dataclass(frozen=True, eq=False)
class RoundInputs:
    """What a policy goes by in one round, beside the candidates.

    Attributes:
        table_round_seconds, convex_round_seconds: (at least max_nodes + 1,) seconds of a round of n nodes at index n. For
            policies that go by cost a shorter curve lowers max_nodes; the others need none.
        price: what a second is worth, in units of reach per second: tokens per second, or that times `bonus`; None while
            unknown (`priced` then acts as `exact`).
        max_nodes: largest tree. root_token: the token of slot 0.
        bonus: tokens a round yields beyond its nodes, in units of reach: 1, or 1 / scale where reach is known to be off by
            a factor `scale` (scale x Phi - price x cost and Phi - price / scale x cost have the same maximum).
    """

    table_round_seconds: Curve
    convex_round_seconds: Curve
    price: float | None
    max_nodes: int
    root_token: int = -1
    bonus: float = 1.0

    def seconds(self, num_nodes: int) -> float | None:
        """Seconds of a round of `num_nodes` nodes by the table, None beyond its end."""
        return float(self.table_round_seconds[num_nodes]) if num_nodes < len(self.table_round_seconds) else None


class Policy(Protocol):
    """A rule for the shape and size of the tree. Pure: the same input gives the same tree."""

    @property
    def name(self) -> str:
        """The name `parse_policy` understands."""

    @property
    def drafts(self) -> bool:
        """False if the policy never needs a draft."""

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """The tree of this round, from a trellis or a pool.

        Policies that go by cost raise CostCurveError for a curve with values that are no positive finite seconds.
        """


@dataclass(frozen=True)
class Plain:
    """Never draft: one token per forward."""

    name = "plain"
    drafts = False

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(inputs.root_token)


@dataclass(frozen=True)
class FixedShape:
    """`chain`, `chain:N` (DFlash: the top candidate of every depth) or `fixed:N` (DDTree: the N nodes of highest reach)."""

    kind: str
    num_nodes: int | None = None
    drafts = True

    @property
    def name(self) -> str:
        """`chain`, `chain:N` or `fixed:N`."""
        return self.kind if self.num_nodes is None else f"{self.kind}:{self.num_nodes}"

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """The first nodes asked for, whatever they cost."""
        wanted = candidates.depth if self.num_nodes is None else self.num_nodes
        limit = min(wanted, inputs.max_nodes)
        is_pool = isinstance(candidates, CandidatePool)
        if self.kind == "chain":
            expansion = expand_pool_chain(candidates, limit) if is_pool else expand_chain(candidates, limit)  # type: ignore[arg-type]
        else:
            expansion = expand_candidates(candidates, limit)
        status = "budget"
        if expansion.truncated_by_k:
            status = "truncated:top_k"
        elif expansion.num_chosen < wanted:
            status = "truncated:max_nodes" if expansion.end == END_MAX_NODES else "exhausted"
        return DraftTree.from_expansion(expansion, status, inputs.root_token, inputs.seconds(expansion.num_chosen))


@dataclass(frozen=True)
class ByCost:
    """`unimodal` (CaDDTree), `exact` or `priced`: the number of nodes follows from the cost curve."""

    name: str
    drafts = True

    def select(self, candidates: Candidates, inputs: RoundInputs) -> DraftTree:
        """The first n nodes in order of reach, n by the policy's rule; on a flat curve as many as the draft is deep."""
        curve = inputs.convex_round_seconds if self.name == "unimodal" else inputs.table_round_seconds
        rule = {"unimodal": FIRST_DESCENT, "exact": EXACT, "priced": PRICED if inputs.price is not None else EXACT}[self.name]
        limit = min(inputs.max_nodes, len(curve) - 1)
        if is_flat(curve):  # all of it: a curve that rises only beyond max_nodes still says that nodes up to there are free
            limit = min(limit, candidates.depth)
            expansion, status = expand_candidates(candidates, limit), "degenerate-cost"
        else:
            expansion = expand_candidates(candidates, limit, rule, curve, inputs.price or 0.0, inputs.bonus)
            status = _status(expansion, limit)
        return DraftTree.from_expansion(expansion, status, inputs.root_token, inputs.seconds(expansion.num_chosen))


def is_flat(curve: Curve) -> bool:
    """Whether the curve says nothing about the size of a tree; raises CostCurveError for a bad curve."""
    if len(curve) == 0:
        raise CostCurveError("the cost curve is empty")
    low, high = curve.min(), curve.max()
    if not (low > 0 and high < np.inf):
        raise CostCurveError(f"a cost curve holds positive finite seconds, found values from {low} to {high}")
    return bool(len(curve) > 1 and high - low <= FLAT_TOLERANCE * high)


def expand_candidates(
    candidates: Candidates,
    max_nodes: int,
    rule: int = BUDGET,
    cost: Curve | None = None,
    price: float = 0.0,
    bonus: float = 1.0,
) -> Expansion:
    """Nodes of a trellis or a pool in order of reach; arguments as `expand`."""
    if isinstance(candidates, CandidatePool):
        return expand_pool(candidates, max_nodes, rule, cost, price, bonus)
    return expand(candidates, max_nodes, rule, cost, price, bonus)


def _status(expansion: Expansion, max_nodes: int) -> str:
    if expansion.truncated_by_k:
        return "truncated:top_k"
    if expansion.end == END_MAX_NODES and expansion.num_chosen == max_nodes:
        return "truncated:max_nodes"
    if expansion.end == END_DESCENT:
        return "first-descent"
    return "optimal"
