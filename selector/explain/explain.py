"""Explaining one round of a trace: the policy is asked again for its tree, and every candidate is priced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from selector.calibration import Calibration
from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.explain.account import Explanation
from selector.explain.errors import ExplainError
from selector.explain.ledger import Ledger
from selector.plan import Plan
from selector.policies import SCALED_POLICIES, Policy, RoundInputs
from selector.price import RangedPrice
from selector.registry import parse_policy
from selector.replaying.caveats import plan_notes, what_if
from selector.replaying.orders import Orders, build_orders
from selector.replaying.playing import accepted_nodes
from selector.replaying.replay import largest_replayable
from selector.replaying.rounds import Curves, build_curves, play_at_fixed_point
from selector.scoring import EdgeScorer
from selector.trace import Trace
from selector.tree import DraftTree

NUM_LEFT_OUT, NUM_CONTEXT = 8, 12


@dataclass(frozen=True, eq=False)
class _Setting:
    """A searched text, what its rounds cost, and how the policy is asked."""

    policy: Policy
    orders: Orders
    curves: Curves
    prices: RangedPrice | None
    scale: float

    def price(self, anchor: int) -> float | None:
        """What `priced` charges at an anchor, tokens per second; None for the other policies."""
        return None if self.prices is None else self.prices.at(int(self.orders.context_tokens[anchor])).price

    def select(self, anchor: int) -> DraftTree:
        """The tree the policy takes there."""
        row, price = self.curves.bucket[anchor], self.price(anchor)
        scaled = None if price is None else price / self.scale
        root = int(self.orders.anchors.root_token_ids[anchor])
        inputs = RoundInputs(
            self.curves.table[row], self.curves.convex[row], scaled, self.orders.max_nodes, root, 1.0 / self.scale
        )
        return self.policy.select(self.orders.trellis(anchor), inputs)


def explain(
    trace: Trace,
    cost: Any,
    policy: str = "priced",
    text: str | int = 0,
    anchor: int | None = None,
    round_number: int | None = None,
    plan: Plan | None = None,
    price: float | None = None,
    max_nodes: int | None = None,
) -> Explanation:
    """Account for one round of a text.

    Args:
        text: key or index. anchor: where the round starts (0 is the first generated token); or round_number: the n-th
            round (from 0) when the policy decodes the text from its start. Without either, the first round.
        plan: its scorer or calibration, scale and price are used, and its settings where it is of this policy.
        price: for `priced`, tokens per second; default the plan's, or replay's fixed point on the whole trace.
        max_nodes: default the plan's, or 256; never beyond what the profile measured.

    Reach is scaled by the plan's constant here, not by a running one as in replay and live, so a tree may differ by a
    node from the one replay took. Raises ExplainError for a text, anchor or round that is not there.
    """
    if anchor is not None and round_number is not None:
        raise ExplainError("give an anchor or a round, not both")
    if price is not None and not (policy == "priced" and 0 < price < 1e12):
        raise ExplainError(f"a price is a number above 0 for the policy priced, got {price} for {policy}")
    index = _text_index(trace, text)
    max_nodes = plan.max_nodes if plan is not None and max_nodes is None else max_nodes
    scorer, calibration = (plan.load_scorer(), plan.calibration) if plan is not None else (None, None)
    chosen = plan.make_policy() if plan is not None and plan.policy == policy else parse_policy(policy)
    scale = plan.reach_scale if plan is not None and policy in SCALED_POLICIES else 1.0
    prices, source = None, "what the tree is expected to yield per second"
    if policy == "priced":
        prices, source = _prices(trace, cost, plan, price, max_nodes, calibration, scorer)
    orders = build_orders(trace.select([index]), largest_replayable(cost, max_nodes), calibration, scorer)
    curves = build_curves(orders, cost).plus(plan.scoring_seconds if plan is not None and scorer is not None else 0.0)
    if not chosen.drafts:  # a plain step drafts and scores nothing
        curves = replace(curves, table=np.repeat(curves.plain[:, None], curves.table.shape[1], axis=1))
    setting = _Setting(chosen, orders, curves, prices, scale)
    at, number = _anchor(setting, anchor, round_number, trace.texts[index].key)
    account = _account(setting, at, number, trace, index, source, getattr(cost, "provenance", "measured"))
    return replace(account, what_if=what_if(trace.identity, cost), notes=plan_notes(plan, trace.identity, cost))


def _text_index(trace: Trace, text: str | int) -> int:
    keys = [item.key for item in trace.texts]
    if text in keys:
        return keys.index(str(text))
    if not keys:
        raise ExplainError("the trace holds no text")
    if isinstance(text, int) or re.fullmatch(r"-?[0-9]+", str(text)):
        if 0 <= int(text) < len(keys):
            return int(text)
        raise ExplainError(f"text {text} is not in the trace, which holds texts 0 to {len(keys) - 1}")
    close = [key for key in keys if str(text) in key][:5]
    raise ExplainError(f"no text {text!r} in the trace", hint=f"keys are such as {', '.join(close or keys[:5])}")


def _prices(
    trace: Trace, cost: Any, plan: Plan | None, price: float | None, max_nodes: int | None,
    calibration: Calibration | None, scorer: EdgeScorer | None,
) -> tuple[RangedPrice, str]:  # fmt: skip
    if price is not None:
        return RangedPrice((), price), "as asked"
    if plan is not None and (plan.prices or plan.price is not None):
        return RangedPrice(plan.prices, plan.price), "the plan"
    orders = build_orders(trace, largest_replayable(cost, max_nodes), calibration, scorer)
    curves = build_curves(orders, cost).plus(plan.scoring_seconds if plan is not None and scorer is not None else 0.0)
    rounds = play_at_fixed_point(orders, curves, plan.reach_scale if plan is not None else 1.0)
    return RangedPrice((), rounds.price), "replay's fixed point on this trace"


def _anchor(setting: _Setting, anchor: int | None, round_number: int | None, key: str) -> tuple[int, int | None]:
    last = len(setting.orders.sizes) - 2
    if last < 0:
        raise ExplainError(f"text {key!r} has no round: fewer than two generated tokens")
    if anchor is not None:
        if not 0 <= anchor <= last:
            raise ExplainError(f"anchor {anchor} of text {key!r} starts no round: expected 0 to {last}")
        return anchor, None
    wanted = round_number or 0
    for number, at in enumerate(_rounds(setting)):
        if number == wanted:
            return at, number
    raise ExplainError(f"text {key!r} has no round {wanted}: {setting.policy.name} decodes it in rounds 0 to {number}")


def _rounds(setting: _Setting) -> Iterator[int]:
    """Anchors at which the policy starts a round when it decodes the text from its start."""
    at = 0
    while at < len(setting.orders.sizes) - 1:
        yield at
        at += accepted_nodes(setting.select(at), setting.orders.anchors.next_tokens[at]) + 1


def _account(
    setting: _Setting, anchor: int, number: int | None, trace: Trace, index: int, source: str, provenance: str
) -> Explanation:
    text, orders, curves = trace.texts[index], setting.orders, setting.curves
    tree, row = setting.select(anchor), curves.bucket[anchor]
    ledger = Ledger(
        orders, anchor, tree, curves.table[row], setting.price(anchor), setting.scale, setting.policy.name
    )
    accepted = accepted_nodes(tree, orders.anchors.next_tokens[anchor])
    position = text.num_prompt_tokens + anchor
    return Explanation(
        key=text.key,
        text_index=index,
        anchor=anchor,
        round_number=number,
        context_tokens=position,
        context_token_ids=text.token_ids[max(position - NUM_CONTEXT, 0) : position].tolist(),
        root_token_id=int(text.token_ids[position]),
        policy=setting.policy.name,
        status=tree.status,
        price=ledger.price,
        price_from=source,
        reach_scale=setting.scale,
        edges=SCORED if orders.scorer is not None else DRAFTED if orders.calibration is None else CALIBRATED,
        round_seconds=ledger.round_seconds,
        plain_seconds=float(curves.plain[row]),
        expected_tokens=ledger.expected_tokens,
        committed_token_ids=text.token_ids[position + 1 : position + 2 + accepted].tolist(),
        nodes=ledger.inside(),
        left_out=[ledger.left_out(i) for i in ledger.outside[:NUM_LEFT_OUT]],
        siblings=ledger.siblings(accepted),
        divergence=ledger.divergence(accepted),
        provenance=provenance,
        identity=trace.identity,
    )
