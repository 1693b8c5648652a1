"""What is to be known of numbers that rest on a trace, a profile and a plan: where these are of different things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from selector.plan import Plan
from selector.trace import Trace

WHAT_IF_FIELDS = ("device", "target", "drafter", "dtype", "block_size", "attention", "engine", "mode")
TUNED_ON_THESE = "The plan was tuned on these very texts, so its rows are too good here; its own gains are of held-out texts."


def what_if(identity: Mapping[str, Any], cost: Any) -> dict[str, list[Any]]:
    """Fields in which a trace (or a plan) and a profile differ, as {field: [trace, profile]}; what one does not say is none."""
    profile = getattr(cost, "identity", None)
    pairs = {name: [identity.get(name), getattr(profile, name, None)] for name in WHAT_IF_FIELDS}
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def what_if_sentence(pairs: Mapping[str, list[Any]], first: str = "trace", second: str = "profile") -> str:
    """The same in words."""
    named = "; ".join(f"{name} {pair[0]!r} in the {first}, {pair[1]!r} in the {second}" for name, pair in pairs.items())
    return f"A what-if: {first} and {second} differ ({named})."


def plan_notes(plan: Plan | None, identity: Mapping[str, Any], cost: Any) -> list[str]:
    """Whether a plan was tuned on the texts of the trace with this identity, and whether for another profile."""
    if plan is None:
        return []
    seen = plan.identity.get("prompts_sha256") or (plan.scorer.identity.get("prompts_sha256") if plan.scorer else None)
    notes = []
    if seen is not None and seen == identity.get("prompts_sha256"):
        notes.append(TUNED_ON_THESE)
    differing = what_if(plan.identity, cost)
    return [*notes, what_if_sentence(differing, "plan")] if differing else notes


def trace_notes(trace: Trace) -> list[str]:
    """How many drafts of a trace hold NaN."""
    spoiled = sum(int(np.isnan(text.draft_logprobs).any(axis=(1, 2)).sum()) for text in trace.texts)
    return [f"{spoiled} of {trace.num_generated_tokens} drafts hold NaN; trees end before such rows."] if spoiled else []
