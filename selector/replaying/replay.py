"""Replay: tokens per second of any policy from a trace and a cost model, without running a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from selector.calibration import Calibration
from selector.errors import TraceError
from selector.policies import FixedShape, Policy
from selector.price import PriceRange, prices_at
from selector.registry import parse_policy
from selector.replaying.caveats import trace_notes, what_if
from selector.replaying.ceilings import play_oracle
from selector.replaying.metrics import resamples
from selector.replaying.orders import Orders, build_orders
from selector.replaying.playing import play_policy
from selector.replaying.rounds import Curves, Rounds, build_curves, play, play_plain
from selector.replaying.rows import Baselines, ReplayRow, make_row
from selector.scoring import EdgeScorer
from selector.trace import Trace

DEFAULT_POLICIES = ("chain", "fixed:8", "fixed:16", "unimodal", "exact", "priced")
DEFAULT_MAX_NODES = 256
BUDGET_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63, 64, 80, 96, 127, 128, 160, 192, 224, 255, 256)


@dataclass(frozen=True)
class Replay:
    """All rows, what they rest on, and where trace and profile part (a what-if)."""

    rows: list[ReplayRow]
    provenance: str
    what_if: dict[str, list[Any]]
    max_nodes: int
    calibrated: bool
    num_texts: int
    identity: dict[str, Any]
    notes: list[str]

    def row(self, name: str) -> ReplayRow:
        """The row of a policy by name or role; raises KeyError."""
        for row in self.rows:
            if name in (row.name, row.role):
                return row
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, schema treebudget.replay."""
        return {"schema": "treebudget.replay", "version": 1, **asdict(self)}


def largest_replayable(cost: Any, max_nodes: int | None = None) -> int:
    """Nodes of the largest tree the profile measured, at most `max_nodes` (default 256)."""
    return max(0, min(DEFAULT_MAX_NODES if max_nodes is None else max_nodes, int(cost.max_verify_tokens) - 1))


def best_chain(orders: Orders, curves: Curves) -> Rounds:
    """The chain length with the highest throughput on this trace (lengths 1 to the draft's depth)."""
    lengths = range(1, max(1, min(orders.ranks.shape[1], orders.max_nodes)) + 1)
    return max((play(FixedShape("chain", n), orders, curves) for n in lengths), key=lambda rounds: rounds.tokens_per_second)


def best_fixed(orders: Orders, curves: Curves, grid: Iterable[int] = BUDGET_GRID) -> Rounds:
    """The fixed number of nodes with the highest throughput on this trace, over a grid of budgets."""
    budgets = [n for n in grid if n <= orders.max_nodes] or [max(1, orders.max_nodes)]
    return max((play(FixedShape("fixed", n), orders, curves) for n in budgets), key=lambda rounds: rounds.tokens_per_second)


def replay(
    trace: Trace,
    cost: Any,
    policies: Sequence[str | Policy] = DEFAULT_POLICIES,
    max_nodes: int | None = None,
    calibration: Calibration | None = None,
    price: float | Sequence[PriceRange] | None = None,
    reach_scale: float = 1.0,
    adapt: bool = True,
    num_bootstrap: int = 1000,
    seed: int = 0,
    scorer: EdgeScorer | None = None,
    scoring_seconds: float = 0.0,
) -> Replay:
    """Tokens per second of plain decoding, the best chain, the best fixed budget, the asked policies, and two ceilings.

    Exact for greedy decoding: rounds start at the first generated token (it comes from the prompt's forward and is not
    counted), every round commits accepted nodes and one more, cut at the end of the text, and costs what `cost` says.

    Args:
        trace: texts and drafts. cost: `costmodel.CostModel` (or its like). policies: names, or policies with settings.
        price: for `priced`, one for all rounds or one by range of contexts; None (or none) finds it by fixed point, on these
            very texts.
        max_nodes: default 256, never beyond what the profile measured.
        calibration, reach_scale, adapt: as in TreeSelector. scorer: path-conditioned edges instead of the drafter's (it
            carries its own calibration, `calibration` is then not used). scoring_seconds: what scoring adds to a round; the
            ceilings and the best fixed budget as drafted do without.

    Raises TraceError if no text has two generated tokens; texts without a round are not counted among the texts.
    """
    parsed = [parse_policy(policy) if isinstance(policy, str) else policy for policy in policies]
    trace = trace.with_rounds()  # another text gives nothing to resample
    orders = build_orders(trace, largest_replayable(cost, max_nodes), calibration, scorer)
    if not trace.texts:
        raise TraceError("no text of the trace has two generated tokens, so there is nothing to replay")
    curves = build_curves(orders, cost)
    corrected = calibration is not None or scorer is not None
    charged = curves.plus(scoring_seconds) if scorer is not None else curves
    base = _baselines(orders, curves, charged, build_orders(trace, orders.max_nodes) if corrected else None)
    charge = price if not isinstance(price, Sequence) else prices_at(price, orders.context_tokens) if price else None
    found = {base.plain.policy, base.chain.policy, base.fixed.policy}
    asked = [p for i, p in enumerate(parsed) if p.name not in found and p not in parsed[:i]]  # settings tell policies apart too
    played = [(base.plain, "plain"), (base.chain, "best chain"), (base.fixed, "best fixed")]
    played += [(base.drafted, "best fixed as drafted")] if corrected else []
    played += [(play_policy(policy, orders, charged, charge, reach_scale, adapt), "asked") for policy in asked]
    played += [(base.oracle, "limit of selection"), (play_oracle(orders, curves, True), "limit of drafting")]
    weights = resamples(orders.num_texts, num_bootstrap, seed)
    labels = [text.dataset for text in trace.texts]
    rows = [make_row(rounds, role, base, weights, labels, trace.depth) for rounds, role in played]
    notes = ["the cost curve is flat: policies by cost take as many nodes as the draft is deep"] if curves.flat else []
    notes += trace_notes(trace)
    if scorer is not None:
        notes.append(f"edges are scored, for {1e3 * scoring_seconds:.3f} ms a round; the ceilings do without")
    return Replay(
        rows, getattr(cost, "provenance", "measured"), what_if(trace.identity, cost), orders.max_nodes,
        corrected, orders.num_texts, trace.identity, notes,
    )  # fmt: skip


def _baselines(orders: Orders, curves: Curves, charged: Curves, drafted: Orders | None) -> Baselines:
    """Plain decoding, best chain and budget, and the oracle.

    `charged` are the curves with scoring; `drafted` the same anchors searched without correction, if there is any.
    """
    fixed = best_fixed(orders, charged)
    return Baselines(
        play_plain(orders, curves), best_chain(orders, charged), fixed,
        fixed if drafted is None else best_fixed(drafted, curves), play_oracle(orders, curves),
    )  # fmt: skip
