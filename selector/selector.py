"""The drop-in: draft logits in, the tree that yields the most tokens per second out, and a price that learns."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selector.pause import DraftingPause, PauseSettings
from selector.plan import Plan
from selector.policies import ByCost, Candidates
from selector.pool import CandidatePool
from selector.price import PriceTracker, ReachScale
from selector.registry import parse_policy
from selector.tree import DraftTree
from selector.trellis import Trellis

ADAPTING_POLICIES = ("exact", "priced")  # the others stay as their papers have them
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


@dataclass
class SelectorStats:
    """Counters since the selector was made."""

    rounds: int = 0
    plain_steps: int = 0
    nan_rows: int = 0
    truncated: int = 0
    degenerate_cost: int = 0
    root_only: int = 0
    pauses: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain JSON types."""
        return asdict(self)


class TreeSelector:
    """Chooses the tree of every round and keeps the price honest.

    Args:
        cost: what a round costs (`costmodel.CostModel`).
        policy: a name from the registry; default the plan's, or `priced`.
        max_nodes: largest tree; default the plan's, or 256. Never beyond what the profile measured.
        top_k: candidates per depth; default the plan's, or 16.
        plan: calibration, price and defaults found by `selector tune`.
        adapt: track how far reach is off (see `observe`) and correct for it (`exact` and `priced` only).
        pause: settings of the pause in drafting, or None to draft always.
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
    ) -> None:
        self.cost = cost
        self.plan = plan
        defaults = plan or Plan(DEFAULT_POLICY, max_nodes=DEFAULT_MAX_NODES, top_k=DEFAULT_TOP_K)
        self.policy = parse_policy(policy if policy is not None else defaults.policy)
        self.max_nodes = max(0, min(defaults.max_nodes if max_nodes is None else max_nodes, cost.max_verify_tokens - 1))
        self.top_k = defaults.top_k if top_k is None else top_k
        self.stats = SelectorStats()
        self._calibration = defaults.calibration
        self._price = PriceTracker(defaults.price)
        self._scale = ReachScale(defaults.reach_scale)
        self._adapts = adapt and self.policy.name in ADAPTING_POLICIES
        self._pause = DraftingPause(pause) if pause is not None else None
        self._context_tokens = 0
        self._plain_seconds: dict[int, float] = {}
        diagnostics = getattr(cost, "diagnostics", None)
        self._degenerate = bool(isinstance(self.policy, ByCost) and getattr(diagnostics, "degenerate", False))
        self._warned = False

    @property
    def drafts(self) -> bool:
        """False if the policy never drafts."""
        return self.policy.drafts

    @property
    def price(self) -> float | None:
        """Tokens per second that a second is worth now; None until a plan or enough rounds say."""
        return self._price.price

    @property
    def reach_scale(self) -> float:
        """Accepted over expected nodes, as tracked so far."""
        return self._scale.value

    def warm_up(self) -> None:
        """Load (or, once per machine, compile) what `select` runs, so that the first round is not the slow one."""
        trellis = Trellis.from_logits(np.arange(16.0).reshape(2, 8), self.top_k)
        tree = self.policy.select(trellis, np.arange(1.0, 4.0), np.arange(1.0, 4.0), self.price, min(2, self.max_nodes))
        tree.attention_mask()
        tree.walk(tree.token_ids)

    def select(self, draft_logits: Any, context_tokens: int, root_token: int = -1) -> DraftTree:
        """The tree for a drafter whose positions are independent.

        Args:
            draft_logits: (depth, vocab) numpy or torch; row 0 is about the token after the root.
            context_tokens: committed tokens in the cache, the root not among them.
            root_token: token of slot 0.
        """
        if not self.drafts:
            return self.select_trellis(Trellis(np.zeros((0, 1), np.int64), np.zeros((0, 1))), context_tokens, root_token)
        return self.select_trellis(Trellis.from_logits(draft_logits, self.top_k), context_tokens, root_token)

    def select_trellis(self, candidates: Candidates, context_tokens: int, root_token: int = -1) -> DraftTree:
        """The tree for a trellis or a pool of candidates; arguments as `select`."""
        self._context_tokens = int(context_tokens)
        table = self._curve("table")
        convex = self._curve("convex") if self.policy.name == "unimodal" else table
        bonus = 1.0 / self._scale.value if self._adapts else 1.0
        price = self.price
        if price is not None:
            price *= bonus  # reach in its own units: scale Phi - price cost and Phi - price / scale cost agree
        tree = self.policy.select(self._calibrated(candidates), table, convex, price, self.max_nodes, root_token, bonus)
        self._count(tree, candidates)
        return tree

    def _curve(self, form: str) -> NDArray[np.float64]:
        if self._degenerate:
            return np.ones(self.max_nodes + 1)
        return self.cost.round_seconds(self.cost.max_verify_tokens, self._context_tokens, 1, form)

    def _calibrated(self, candidates: Candidates) -> Candidates:
        if self._calibration is None or isinstance(candidates, CandidatePool) or candidates.depth == 0:
            return candidates
        return replace(candidates, log_edges=self._calibration.apply(candidates.log_edges))

    def _count(self, tree: DraftTree, candidates: Candidates) -> None:
        self.stats.rounds += 1
        self.stats.nan_rows += 0 if isinstance(candidates, CandidatePool) else candidates.num_nan_rows
        self.stats.truncated += tree.status.startswith("truncated")
        self.stats.root_only += tree.num_nodes == 0
        if tree.status == "degenerate-cost":
            self.stats.degenerate_cost += 1
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "the cost curve does not grow with the number of verify tokens, so it cannot size a tree: "
                    f"taking {tree.num_nodes} nodes, the depth of the draft. Measure it again with: costmodel profile",
                    stacklevel=4,
                )

    def _plain_seconds_here(self) -> float:
        bucket = self._context_tokens // 64
        if bucket not in self._plain_seconds:
            self._plain_seconds[bucket] = float(self.cost.plain_seconds(self._context_tokens))
        return self._plain_seconds[bucket]

    def observe(self, tree: DraftTree, num_accepted: int, round_seconds: float) -> None:
        """Learn from a drafting round: `num_accepted` nodes of `tree` (so one more token came out), and its seconds."""
        self._price.observe(num_accepted + 1, round_seconds)
        self._scale.observe(num_accepted, tree.expected_tokens - 1.0)
        if self._pause is not None:
            self._pause.observe_round(num_accepted + 1, round_seconds, self._plain_seconds_here())
            self.stats.pauses = self._pause.num_pauses

    def observe_plain(self, round_seconds: float) -> None:
        """Learn from a plain step (one token)."""
        self.stats.plain_steps += 1
        self._price.observe(1, round_seconds)
        if self._pause is not None:
            self._pause.observe_plain(round_seconds)
            self.stats.pauses = self._pause.num_pauses

    def drafts_next(self, context_tokens: int = 0) -> bool:
        """Whether the next round should draft; False asks for a plain step, reported with `observe_plain`.

        Drafting pauses when what its rounds yield is less than plain steps do, and is probed again with back-off.
        """
        self._context_tokens = int(context_tokens)
        return self.drafts and (self._pause is None or self._pause.drafts)
