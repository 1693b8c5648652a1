"""Replay's prediction for the very texts a bench decoded: the trace is recorded from them, not generated again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from costmodel import CostModel
from decoder.prompts import Prompt
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


def predict_rates(target: Target, drafter: Any, cost: CostModel, prompts: Sequence[Prompt], encoded: Sequence[list[int]],
                  texts: Sequence[list[int]], policies: Sequence[str], *, top_k: int,
                  max_nodes: int) -> tuple[dict[str, float], str | None]:
    """Replay's tokens per second by policy, and a note where there is no prediction."""
    if drafter is None or not hasattr(drafter, "draft_hidden_at"):
        return {}, "this drafter cannot draft at every place of a known text, so there is no prediction"
    from selector.replay import replay

    trace = trace_of_texts(target, drafter, prompts, encoded, texts, top_k)
    outcome = replay(trace, cost, list(policies), max_nodes=max_nodes)
    return {row.name: float(row.tokens_per_second) for row in outcome.rows}, None
