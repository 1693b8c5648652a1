"""Replay's prediction for the very texts a bench decoded: the trace is recorded from them, not generated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from costmodel import CostModel
from decoder.prompts import Prompt
from decoder.selectiontiming import selection_times
from decoder.target import Target


@torch.inference_mode()
def trace_of_texts(target: Target, drafter: Any, prompts: Sequence[Prompt], encoded: Sequence[list[int]],
                   texts: Sequence[list[int]], top_k: int) -> Any:
    """A `selector.Trace` of prompts whose greedy texts are known: one forward per text for the features, then the drafts."""
    from decoder.batched import Continuation
    from decoder.tracing import trace_identity, traced_text
    from selector import Trace

    target.set_feature_layers(drafter.feature_layers)
    named = [SimpleNamespace(key=str(place), dataset=prompt.dataset, token_ids=ids)
             for place, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))]
    rows = []
    for prompt, new_ids in zip(named, texts, strict=True):
        token_ids = [*prompt.token_ids, *new_ids]
        output = target.forward(token_ids, range(len(token_ids)), target.new_cache(len(token_ids)), logits_rows=slice(-1, None))
        assert output.features is not None
        text = Continuation(prompt.key, len(prompt.token_ids), 0, token_ids, hidden=[output.features])
        rows.append(traced_text(drafter, text, top_k, prompt.dataset))
    return Trace(identity=trace_identity(target, drafter, named, max(map(len, texts)), top_k), texts=rows)


@dataclass(frozen=True)
class Prediction:
    """What replay says of the texts a bench decoded: `rates` in tokens per second by policy; `note` where there are none.

    `selection` compares the compiled search with plain Python on the texts' own drafts (`selectiontiming`).
    """

    rates: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    selection: list[dict[str, float]] = field(default_factory=list)


def predict(target: Target, drafter: Any, cost: CostModel, prompts: Sequence[Prompt], encoded: Sequence[list[int]],
            texts: Sequence[list[int]], policies: Sequence[str], *, plan: Any = None, top_k: int, max_nodes: int) -> Prediction:
    """Replay the policies on the texts; `plan` among them is replayed with the plan's calibration, price and size."""
    if drafter is None or not hasattr(drafter, "draft_hidden_at"):
        return Prediction(note="this drafter cannot draft at every place of a known text, so there is no prediction")
    from selector.replay import replay

    trace = trace_of_texts(target, drafter, prompts, encoded, texts, top_k)
    outcome = replay(trace, cost, [name for name in policies if name != "plan"], max_nodes=max_nodes)
    rates = {row.name: float(row.tokens_per_second) for row in outcome.rows}
    if plan is not None and "plan" in policies:
        tuned = replay(trace, cost, [plan.policy], max_nodes=plan.max_nodes, calibration=plan.calibration, price=plan.price,
                       reach_scale=plan.reach_scale)
        rates["plan"] = float(tuned.row(plan.policy).tokens_per_second)
    return Prediction(rates, None, selection_times(trace))
