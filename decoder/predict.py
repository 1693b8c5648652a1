"""Replay's prediction for the very texts a bench decoded: the trace is recorded from them, not generated again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from costmodel import CostModel
from decoder.batched import Continuation
from decoder.prompts import Prompt
from decoder.selectiontiming import selection_times
from decoder.target import Target
from decoder.tracing import trace_identity, traced_text
from selector import Trace, TraceText
from selector.replaying.replay import replay


@torch.inference_mode()
def trace_of_text(target: Target, drafter: Any, prompt: Prompt, prompt_ids: list[int], new_ids: list[int], top_k: int,
                  key: str) -> TraceText:
    """One text of a trace, its greedy continuation known: one forward for the features, then the drafts."""
    target.set_feature_layers(drafter.feature_layers)
    token_ids = [*prompt_ids, *new_ids]
    output = target.forward(token_ids, range(len(token_ids)), target.new_cache(len(token_ids)), logits_rows=slice(-1, None))
    assert output.features is not None
    text = Continuation(key, len(prompt_ids), 0, token_ids, hidden=[output.features])
    return traced_text(drafter, text, top_k, prompt.dataset)


@dataclass(frozen=True)
class Prediction:
    """What replay says of the texts a bench decoded: `rates` in tokens per second by policy; `note` where there are none.

    `selection` compares the compiled search with plain Python on the texts' own drafts (`selectiontiming`).
    """

    rates: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    selection: list[dict[str, float]] = field(default_factory=list)


def can_predict(drafter: Any) -> bool:
    """Whether a drafter can draft at every place of a known text, which a trace needs."""
    return drafter is not None and hasattr(drafter, "draft_hidden_at")


def predict(target: Target, drafter: Any, cost: CostModel, prompts: Sequence[Prompt], encoded: Sequence[list[int]],
            texts: Mapping[str, Sequence[list[int]]], *, plan: Any = None, top_k: int, max_nodes: int) -> Prediction:
    """Replay every policy of `texts` on the texts it decoded; `plan` with the plan's scorer, calibration, price and size.

    In float32 all policies decode one text. In bfloat16 they part at near-ties, and a policy's rate is about its own text.
    """
    if not can_predict(drafter):
        return Prediction(note="this drafter cannot draft at every place of a known text, so there is no prediction")
    if not any(len(new_ids) > 1 for decoded in texts.values() for new_ids in decoded):
        return Prediction(note="every text ended with its first token, so there is nothing to predict")
    tracer = _Tracer(target, drafter, prompts, encoded, top_k)
    rates = {}
    for name, decoded in texts.items():
        trace = tracer.trace(decoded)
        if name == "plan":
            outcome = replay(trace, cost, [plan.make_policy()], plan.max_nodes, plan.calibration, plan.charge, plan.reach_scale,
                             num_bootstrap=1, scorer=plan.load_scorer(), scoring_seconds=plan.scoring_seconds)
        else:
            outcome = replay(trace, cost, [name], max_nodes, num_bootstrap=1)
        rates[name] = float(outcome.row(plan.make_policy().name if name == "plan" else name).tokens_per_second)
    return Prediction(rates, None, selection_times(tracer.trace(next(iter(texts.values())))))


@dataclass
class _Tracer:
    """Traces of decoded texts; what two policies decoded alike is traced once."""

    target: Target
    drafter: Any
    prompts: Sequence[Prompt]
    encoded: Sequence[list[int]]
    top_k: int
    known: dict[tuple[int, ...], TraceText] = field(default_factory=dict)

    def trace(self, texts: Sequence[list[int]]) -> Trace:
        """The trace of one policy's texts, in the order of the prompts."""
        rows = []
        for place, text in enumerate(texts):
            key = (place, *text)
            if key not in self.known:
                self.known[key] = trace_of_text(self.target, self.drafter, self.prompts[place], self.encoded[place], text,
                                                self.top_k, str(place))
            rows.append(self.known[key])
        named = [SimpleNamespace(key=row.key, dataset=row.dataset, token_ids=ids)
                 for row, ids in zip(rows, self.encoded, strict=True)]
        return Trace(trace_identity(self.target, self.drafter, named, max(map(len, texts)), self.top_k), rows)
