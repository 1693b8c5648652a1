"""The drop-in: draft logits in, the tree that yields the most tokens per second out, and a price that learns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UsageError
from selector.drift.alarm import DriftAlarm
from selector.edges import SCORED, EdgeSource
from selector.limits import PlanLimits
from selector.pause import DraftingPause, PauseSettings
from selector.plan import Plan
from selector.policies import SCALED_POLICIES, ByCost, Candidates, RoundInputs
from selector.pool import CandidatePool
from selector.price import RangedPrice, ReachScale
from selector.registry import parse_policy
from selector.scoring import EdgeScorer
from selector.search.growing import may_be_cut_short, select_grown
from selector.smart import Smart
from selector.stats import SelectorStats
from selector.tree import DraftTree
from selector.trellis import Trellis

DEFAULT_POLICY, DEFAULT_MAX_NODES, DEFAULT_TOP_K = "priced", 256, 16


class RoundCost(Protocol):
    """What the selector asks of a cost model; `costmodel.CostModel` is one."""

    @property
    def max_verify_tokens(self) -> int:
        """The largest number of verify tokens that was measured."""

    def round_seconds(
        self, max_verify_tokens: int, context_tokens: float = 0, num_requests: int = 1, form: Any = "table"
    ) -> NDArray[np.float64]:
        """(max_verify_tokens,) seconds of a drafting round with n nodes at index n."""

    def plain_seconds(self, context_tokens: float = 0, num_requests: int = 1) -> float:
        """Seconds of one plain step."""


class TreeSelector:
    """Chooses the tree of every round and keeps the price honest.

    Args:
        cost: what a round costs (`costmodel.CostModel`).
        policy: a name from the registry; default the plan's, or `priced`.
        max_nodes: largest tree; default the plan's, or 256. Never beyond what the profile measured.
        top_k: candidates per depth; default the plan's, or 16.
        plan: scorer, calibration, prices and defaults found by `selector tune`.
        adapt: track how far reach is off (see `observe`) and correct for it (`exact` and `priced` only).
        pause: settings of the pause in drafting, or None to draft always.
        scorer: path-conditioned chances of acceptance; default the plan's, if it has one.
        alarm: says when the scorer no longer fits; default `DriftAlarm()` wherever there is a scorer.

    Raises UsageError for a negative max_nodes, PlanError or ScorerError for a plan whose scorer is missing or was trained
    for something else.
    """

    def __init__(
        self,
        cost: RoundCost,
        policy: str | None = None,
        max_nodes: int | None = None,
        top_k: int | None = None,
        plan: Plan | None = None,
        adapt: bool = True,
        pause: PauseSettings | None = PauseSettings(),  # noqa: B008 - frozen
        scorer: EdgeScorer | None = None,
        alarm: DriftAlarm | None = None,
    ) -> None:
        if max_nodes is not None and max_nodes < 0:
            raise UsageError(f"max_nodes must not be negative, got {max_nodes}")
        self.cost = cost
        self.plan = plan
        defaults = plan or Plan(DEFAULT_POLICY, max_nodes=DEFAULT_MAX_NODES, top_k=DEFAULT_TOP_K)
        self.policy = parse_policy(policy) if policy is not None else defaults.make_policy()
        self.max_nodes = max(0, min(defaults.max_nodes if max_nodes is None else max_nodes, cost.max_verify_tokens - 1))
        self.top_k = defaults.top_k if top_k is None else top_k
        self.stats = SelectorStats()
        self._edges = _edge_source(defaults, scorer, alarm) if self.policy.drafts else EdgeSource()
        self._scoring_seconds = defaults.scoring_seconds  # of rounds that ask the scorer
        self._prices = RangedPrice(defaults.prices, defaults.price)
        self._scale = ReachScale(defaults.reach_scale)
        self._adapts = adapt and self.policy.name in SCALED_POLICIES
        self._pause = DraftingPause(pause) if pause is not None else None
        self._context_tokens = 0
        self._plain_seconds: dict[int, float] = {}
        diagnostics = getattr(cost, "diagnostics", None)
        self._degenerate = bool(isinstance(self.policy, ByCost) and getattr(diagnostics, "degenerate", False))
        self._on_convex = self.policy.name == "unimodal" or isinstance(self.policy, Smart)
        self._limits = PlanLimits(plan)
        self._warned: set[str] = set()

    @property
    def drafts(self) -> bool:
        """False if the policy never drafts."""
        return self.policy.drafts

    @property
    def price(self) -> float | None:
        """Tokens per second that a second is worth now, at the last context; None until a plan or enough rounds say."""
        return self._prices.at(self._context_tokens).price

    @property
    def reach_scale(self) -> float:
        """Accepted over expected nodes, as tracked so far."""
        return self._scale.value

    def warm_up(self) -> None:
        """Load (or, once per machine, compile) what `select` runs, so that the first round is not the slow one."""
        trellis = Trellis.from_logits(np.arange(16.0).reshape(2, 8), self.top_k)
        tree = self.policy.select(
            trellis, RoundInputs(np.arange(1.0, 4.0), np.arange(1.0, 4.0), self.price, min(2, self.max_nodes))
        )
        tree.attention_mask()
        tree.walk(tree.token_ids)
        if self._edges.scorer is not None:
            EdgeSource(scorer=self._edges.scorer).apply(trellis, 0)

    def select(self, draft_logits: Any, context_tokens: int, root_token: int = -1) -> DraftTree:
        """The tree for a drafter whose positions are independent.

        Where the listed candidates turn out to be too few, the rows in question are listed further, until the tree is
        worth as much as the one a search over the whole vocabulary finds (policies that search; not with a scorer or a
        calibration, whose probabilities are about the listed candidates). Less than a millionth of missing probability
        beside a row's candidates counts as rounding.

        Args:
            draft_logits: (depth, vocab) numpy or torch; row 0 is about the token after the root.
            context_tokens: committed tokens in the cache, the root not among them.
            root_token: token of slot 0; without it (-1) a scorer has nothing to go by.

        Raises PlanError for drafts deeper than the plan's block size allows.
        """
        if not self.drafts:
            return self.select_trellis(Trellis(np.zeros((0, 1), np.int64), np.zeros((0, 1))), context_tokens, root_token)
        trellis = Trellis.from_logits(draft_logits, self.top_k)
        candidates, inputs = self._prepare(trellis, context_tokens, root_token)
        tree = self.policy.select(candidates, inputs)
        if self._edges.is_drafted and may_be_cut_short(self.policy, tree):
            tree, grown = select_grown(self.policy, trellis, draft_logits, inputs, tree)
            self.stats.grown += grown
        self._count(tree, trellis)
        return tree

    def select_trellis(self, candidates: Candidates, context_tokens: int, root_token: int = -1) -> DraftTree:
        """The tree for a trellis or a pool of candidates; arguments as `select`."""
        weighed, inputs = self._prepare(candidates, context_tokens, root_token)
        tree = self.policy.select(weighed, inputs)
        self._count(tree, candidates)
        return tree

    def _prepare(self, candidates: Candidates, context_tokens: int, root_token: int) -> tuple[Candidates, RoundInputs]:
        """The candidates with the probabilities to go by, and what the round costs and is worth."""
        if not isinstance(candidates, CandidatePool):
            self._limits.check_depth(candidates.depth)
        self._context_tokens = int(context_tokens)
        weighed = self._edges.apply(candidates, root_token)
        table = self._curve("table")
        convex = self._curve("convex") if self._on_convex else table
        bonus = 1.0 / self._scale.value if self._adapts else 1.0
        price = self.price
        if price is not None:
            price *= bonus  # reach in its own units: scale Phi - price cost and Phi - price / scale cost agree
        return weighed, RoundInputs(table, convex, price, self.max_nodes, root_token, bonus)

    def _curve(self, form: str) -> NDArray[np.float64]:
        curve = self.cost.round_seconds(self.cost.max_verify_tokens, self._context_tokens, 1, form)
        if self._edges.asked_scorer and self._scoring_seconds > 0:
            curve = curve + self._scoring_seconds
        return np.full(len(curve), np.median(curve)) if self._degenerate else curve

    def _count(self, tree: DraftTree, candidates: Candidates) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.truncated += tree.status.startswith("truncated")
        stats.root_only += tree.num_nodes == 0
        stats.scored += self._edges.used == SCORED
        stats.fallbacks += self._edges.fell_back
        if not isinstance(candidates, CandidatePool):
            stats.nan_rows += candidates.num_nan_rows
        beyond = self._limits.beyond(self._context_tokens)
        if beyond is not None:
            stats.out_of_range += 1
            self._warn("context", beyond, stacklevel=4)
        if tree.status == "degenerate-cost":
            stats.degenerate_cost += 1
            self._warn(
                "cost",
                "the cost curve does not grow with the number of verify tokens, so it cannot size a tree: "
                f"taking {tree.num_nodes} nodes, the depth of the draft. Measure it again with: costmodel profile",
                stacklevel=4,
            )

    def _warn(self, about: str, message: str, stacklevel: int) -> None:
        """Warn once about each thing, at the line that called the selector."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=stacklevel)

    def _plain_seconds_here(self) -> float:
        bucket = self._context_tokens // 64
        if bucket not in self._plain_seconds:
            self._plain_seconds[bucket] = float(self.cost.plain_seconds(self._context_tokens))
        return self._plain_seconds[bucket]

    def observe(self, tree: DraftTree, num_accepted: int, round_seconds: float, token_ids: Sequence[int] | None = None) -> None:
        """Learn from a drafting round: `num_accepted` nodes of `tree` (so one more token came out), and its seconds.

        `token_ids` are the tokens it committed, root not among them: with a scorer the drift alarm goes by them.
        Raises UsageError, learning nothing, for more accepted nodes than the tree has and seconds that are none.
        """
        if not 0 <= num_accepted <= tree.num_nodes:
            raise UsageError(
                f"num_accepted counts accepted nodes, the root and the token after them not among them: allowed are 0 to "
                f"{tree.num_nodes}, got {num_accepted}"
            )
        _check_seconds(round_seconds)
        self._prices.at(self._context_tokens).observe(num_accepted + 1, round_seconds)
        if math.isfinite(tree.expected_tokens):  # a tree that came from elsewhere (an adapter's) does not know its reach
            self._scale.observe(num_accepted, tree.expected_tokens - 1.0)
        event = self._edges.observe(tree, num_accepted, token_ids)
        if event is not None and event.kind == "fell_back":
            self.stats.drift_alarms += 1
            self._warn("drift", event.text, stacklevel=3)
        if self._pause is not None:
            self._pause.observe_round(num_accepted + 1, round_seconds, self._plain_seconds_here())
            self.stats.pauses = self._pause.num_pauses

    def observe_plain(self, round_seconds: float) -> None:
        """Learn from a plain step (one token); raises UsageError for seconds that are none."""
        _check_seconds(round_seconds)
        self.stats.plain_steps += 1
        self._prices.at(self._context_tokens).observe(1, round_seconds)
        if self._pause is not None:
            self._pause.observe_plain(round_seconds)
            self.stats.pauses = self._pause.num_pauses

    def drafts_next(self, context_tokens: int = 0) -> bool:
        """Whether the next round should draft; False asks for a plain step, reported with `observe_plain`.

        Drafting pauses when what its rounds yield is less than plain steps do, and is probed again with back-off.
        """
        self._context_tokens = int(context_tokens)
        return self.drafts and (self._pause is None or self._pause.drafts)


def _check_seconds(round_seconds: float) -> None:
    if not 0 < round_seconds < math.inf:
        raise UsageError(f"round_seconds must be a positive number, got {round_seconds}")


def _edge_source(plan: Plan, scorer: EdgeScorer | None, alarm: DriftAlarm | None) -> EdgeSource:
    """The plan's calibration, with the scorer and the alarm that were given or the plan's."""
    found = scorer if scorer is not None else plan.load_scorer()
    if found is not None and alarm is None:
        alarm = DriftAlarm()
    return EdgeSource(plan.calibration, found, alarm)
