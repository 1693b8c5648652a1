"""The cost model: what a decoding round costs, read from a profile as a table and as a convex fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.cells import STAGES
from costmodel.convex import ConvexCost, fit_convex
from costmodel.diagnostics import Diagnostics, diagnose
from costmodel.errors import RequestsNotMeasured, UsageError
from costmodel.identity import Identity
from costmodel.profile import Profile
from costmodel.stages import StageCost, fit_stage
from costmodel.table import TableCost, fit_table

Array = NDArray[np.float64]
Form = Literal["table", "convex"]
FORMS = ("table", "convex")
CONTEXT_BUCKET_TOKENS = 16  # round_seconds rounds the context to this, so that a live loop hits its cache
CACHE_ENTRIES = 512


class CostModel:
    """Seconds of verification and of whole rounds on what a profile measured.

    `verify tokens` count the root and, in a batch, sum over its requests. A query outside what was measured is answered
    and leaves a note in `diagnostics.flags`; a batch that was not measured raises RequestsNotMeasured.
    """

    def __init__(self, profile: Profile, max_token_knots: int = 16, max_context_knots: int = 10) -> None:
        self.profile = profile
        self._tables: dict[int, TableCost] = {}
        self._convexes: dict[int, ConvexCost] = {}
        self._stages: dict[tuple[str, int], StageCost | None] = {}
        self._flags: dict[str, None] = {}  # an ordered set
        self._rounds: OrderedDict[tuple[int, int, int, str], Array] = OrderedDict()
        self._measured_requests = sorted({cell.num_requests for cell in profile.verify})
        for requests in self._measured_requests:
            self._fit(requests, max_token_knots, max_context_knots)
        self._diagnostics = diagnose(profile.verify, profile.stages, self._tables, self._convexes)

    @classmethod
    def from_points(
        cls, verify_tokens: ArrayLike, seconds: ArrayLike, context_tokens: ArrayLike = 0, **options: Any
    ) -> CostModel:
        """A cost model of your own table; options as in Profile.from_points (draft_seconds, select_seconds, ...)."""
        return cls(Profile.from_points(verify_tokens, seconds, context_tokens, **options))

    def _fit(self, requests: int, max_token_knots: int, max_context_knots: int) -> None:
        cells = [cell for cell in self.profile.verify if cell.num_requests == requests]
        tokens, contexts = [cell.verify_tokens for cell in cells], [cell.context_tokens for cell in cells]
        seconds = [cell.seconds for cell in cells]
        convex = fit_convex(tokens, contexts, seconds, max_token_knots, max_context_knots)
        self._convexes[requests] = convex
        self._tables[requests] = fit_table(tokens, contexts, seconds, convex.slope, self._executable_sizes())
        for stage in STAGES:
            chosen = [cell for cell in self.profile.stages if cell.stage == stage and cell.num_requests == requests]
            self._stages[stage, requests] = fit_stage(chosen)

    def _executable_sizes(self) -> list[int] | None:
        if self.profile.executable_verify_tokens is not None:
            return list(self.profile.executable_verify_tokens)
        if self.profile.identity.mode in ("captured", "padded"):
            return sorted({cell.verify_tokens for cell in self.profile.verify})
        return None

    @property
    def identity(self) -> Identity:
        """The identity of what was measured."""
        return self.profile.identity

    @property
    def provenance(self) -> str:
        """measured, composed, published or estimated."""
        return self.profile.provenance

    @property
    def convex(self) -> ConvexCost:
        """The convex form for the smallest measured batch (one request, as a rule)."""
        return self._convexes[self._measured_requests[0]]

    @property
    def table(self) -> TableCost:
        """The raw form for the smallest measured batch (one request, as a rule)."""
        return self._tables[self._measured_requests[0]]

    @property
    def max_verify_tokens(self) -> int:
        """The largest measured number of verify tokens."""
        return max(cell.verify_tokens for cell in self.profile.verify)

    @property
    def diagnostics(self) -> Diagnostics:
        """What to know before trusting these curves, with notes of the queries made so far that lay outside them."""
        return replace(self._diagnostics, flags=tuple(self._flags))

    def verify_seconds(
        self, verify_tokens: ArrayLike, context_tokens: ArrayLike = 0, num_requests: int = 1, form: Form = "table"
    ) -> Any:
        """Seconds of one target forward; a float for scalars, a float64 array where t or c is one (they broadcast).

        Raises UsageError for t below 1 (the root counts), contexts below 0 or an unknown form.
        """
        tokens, contexts = np.asarray(verify_tokens, dtype=float), np.asarray(context_tokens, dtype=float)
        if not np.all(tokens >= 1):
            raise UsageError(f"verify_tokens must be at least 1, since the root counts; got {verify_tokens!r}")
        if not np.all(contexts >= 0):
            raise UsageError(f"context_tokens must not be negative; got {context_tokens!r}")
        if form not in FORMS:
            raise UsageError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
        self._note_outside(tokens, contexts)
        forms: dict[int, Any] = dict(self._tables if form == "table" else self._convexes)
        seconds = self._over_requests(num_requests, lambda requests: forms[requests].seconds(tokens, contexts))
        return float(seconds) if seconds.ndim == 0 else seconds

    def _over_requests(self, num_requests: int, at: Callable[[int], Array]) -> Array:
        """The value at a batch: measured, linear between two measured ones, or as the profile's rule says."""
        measured = self._measured_requests
        if num_requests in measured:
            return np.asarray(at(num_requests))
        if self.profile.requests_rule == "total_tokens" and num_requests >= 1:
            return np.asarray(at(measured[0]))
        if not measured[0] < num_requests < measured[-1]:
            known = ", ".join(str(item) for item in measured)
            raise RequestsNotMeasured(
                f"num_requests is {num_requests}, but this profile measured {known} requests in a batch only",
                hint="profile that batch size, or use a profile whose requests_rule is total_tokens",
            )
        low = max(item for item in measured if item < num_requests)
        high = min(item for item in measured if item > num_requests)
        share = (num_requests - low) / (high - low)
        return (1 - share) * at(low) + share * at(high)

    def _note_outside(self, tokens: Array, contexts: Array) -> None:
        if tokens.size and tokens.max() > self.max_verify_tokens:
            self._flags[f"verify tokens beyond the measured {self.max_verify_tokens}: extrapolated with the convex slope"] = None
        if contexts.size and contexts.max() > self.table.max_context_tokens:
            limit = self.table.max_context_tokens
            self._flags[f"context above the measured {limit}: the table charges {limit}, the convex form extrapolates"] = None
        if contexts.size and contexts.min() < self.table.min_context_tokens:
            self._flags[f"context below the measured {self.table.min_context_tokens}: charged as that"] = None

    def _stage(self, stage: str, size: Any, context_tokens: float, num_requests: int, straight: bool = False) -> Any:
        def at(requests: int) -> Array:
            cost = self._stages[stage, requests]
            return (
                np.zeros(np.shape(0.0 if size is None else size))
                if cost is None
                else cost.seconds(size, context_tokens, straight)
            )

        seconds = self._over_requests(num_requests, at)
        return float(seconds) if seconds.ndim == 0 else seconds

    def draft_seconds(self, context_tokens: float = 0, num_requests: int = 1) -> float:
        """Seconds of one drafter pass; 0 where none was measured."""
        return self._stage("draft", None, context_tokens, num_requests)

    def select_seconds(self, num_nodes: Any = None, context_tokens: float = 0, num_requests: int = 1) -> Any:
        """Seconds from draft logits to a tree of `num_nodes` (scalar or array; None is the middle of those measured)."""
        return self._stage("select", num_nodes, context_tokens, num_requests)

    def commit_seconds(self, num_tokens: Any = None, context_tokens: float = 0, num_requests: int = 1) -> Any:
        """Seconds to commit `num_tokens` (scalar or array; None is the middle of those measured)."""
        return self._stage("commit", num_tokens, context_tokens, num_requests)

    def plain_seconds(self, context_tokens: float = 0, num_requests: int = 1) -> float:
        """Seconds of one plain autoregressive step: verify one token per request and commit it; no draft, no select."""
        step = self.verify_seconds(num_requests, context_tokens, num_requests)
        return float(step + self.commit_seconds(1, context_tokens, num_requests))

    def round_seconds(
        self, max_verify_tokens: int, context_tokens: float = 0, num_requests: int = 1, form: Form = "table"
    ) -> Array:
        """Seconds of a drafting round for t = 1..max_verify_tokens, read-only float64 of shape (max_verify_tokens,).

        Entry n is a round with n nodes (t = n + 1 with one request): draft + select + verify + commit. The context is
        rounded to 16 tokens and results are cached, so a live loop may ask every round.
        """
        if max_verify_tokens < 1:
            raise UsageError(f"max_verify_tokens must be at least 1, got {max_verify_tokens}")
        context = CONTEXT_BUCKET_TOKENS * round(context_tokens / CONTEXT_BUCKET_TOKENS)
        key = (int(max_verify_tokens), context, num_requests, form)
        cached = self._rounds.get(key)
        if cached is not None:
            self._rounds.move_to_end(key)
            return cached
        tokens = np.arange(1, max_verify_tokens + 1, dtype=float)
        seconds = self.verify_seconds(tokens, context, num_requests, form)
        seconds = seconds + self.draft_seconds(context, num_requests) + self.commit_seconds(None, context, num_requests)
        seconds = seconds + self._stage("select", tokens - 1, context, num_requests, straight=form == "convex")
        seconds.setflags(write=False)
        self._rounds[key] = seconds
        if len(self._rounds) > CACHE_ENTRIES:
            self._rounds.popitem(last=False)
        return seconds


def fit_cost(profile: Profile, **options: Any) -> CostModel:
    """Fit a profile: CostModel(profile); options are max_token_knots and max_context_knots."""
    return CostModel(profile, **options)
