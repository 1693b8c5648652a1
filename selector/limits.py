"""What a plan was tuned for, checked while decoding: the block size, and the contexts its trace covered."""

from __future__ import annotations

from selector.errors import PlanError
from selector.plan import Plan


class PlanLimits:
    """The block size and the range of contexts of a plan; without a plan, or where it does not say, nothing is limited."""

    def __init__(self, plan: Plan | None) -> None:
        found = plan.identity.get("block_size") if plan is not None else None
        self.block_size = int(found) if found is not None else None
        self.context_range = plan.context_range if plan is not None else None

    def check_depth(self, depth: int) -> None:
        """Raise PlanError for drafts deeper than the plan's block allows (shorter ones are the end of a text)."""
        if self.block_size is not None and depth > self.block_size - 1:
            raise PlanError(
                f"plan does not fit: block_size is {self.block_size} in the plan, the draft has {depth} positions",
                hint="run selector tune again for the drafter you decode with",
                field="block_size",
            )

    def beyond(self, context_tokens: int) -> str | None:
        """In words, that a context lies outside the traced ones; None if it does not."""
        if self.context_range is None:
            return None
        low, high = self.context_range
        if low <= context_tokens <= high:
            return None
        return (
            f"a context of {context_tokens} tokens lies outside the {low} to {high} that the plan was tuned on; the price of "
            "the nearest range is used. Trace prompts of such lengths and run selector tune again"
        )
