"""The cost model: what a decoding round costs, read from a profile as a table and as a convex fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.cells import STAGES
from costmodel.convex import ConvexCost, fit_convex
from costmodel.diagnostics import Diagnostics, diagnose
from costmodel.errors import RequestsNotMeasured, UsageError
from costmodel.expertfit import ExpertCost, fit_experts
from costmodel.identity import Identity
from costmodel.intervals import PRIORS, IntervalModel, relative_noise
from costmodel.profile import Profile
from costmodel.stages import StageCost, fit_stage
from costmodel.table import TableCost, fit_table

Array = NDArray[np.float64]
Form = Literal["table", "convex", "fitted"]  # fitted: convex, plus the expert term of a mixture of experts
FORMS = ("table", "convex", "fitted")
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
        self._experts: dict[int, ExpertCost | None] = {}
        self._stages: dict[tuple[str, int], StageCost | None] = {}
        self._flags: dict[str, None] = {}  # an ordered set
        self._ranges: dict[int, tuple[int, int, int]] = {}
        self._interval_models: dict[int, IntervalModel] = {}
        self._bounds_cache: dict[str, dict[int, TableCost]] = {}
        self._rounds: OrderedDict[tuple[int, int, int, str], Array] = OrderedDict()
        self._measured_requests = sorted({cell.num_requests for cell in profile.verify})
        self._cells = {
            number: [cell for cell in profile.verify if cell.num_requests == number] for number in self._measured_requests
        }
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
        cells = self._cells[requests]
        tokens, contexts = [cell.verify_tokens for cell in cells], [cell.context_tokens for cell in cells]
        seconds = [cell.seconds for cell in cells]
        convex = fit_convex(tokens, contexts, seconds, max_token_knots, max_context_knots)
        self._convexes[requests] = convex
        self._ranges[requests] = max(tokens), min(contexts), max(contexts)
        expert = self._fit_experts(tokens, contexts, seconds)
        self._experts[requests] = expert
        shape = None if expert is None else expert.seconds
        noise = [relative_noise(cell) for cell in cells]
        self._tables[requests] = fit_table(tokens, contexts, seconds, convex.slope, self._executable_sizes(), shape, noise)
        for stage in STAGES:
            chosen = [cell for cell in self.profile.stages if cell.stage == stage and cell.num_requests == requests]
            self._stages[stage, requests] = fit_stage(chosen)

    def _fit_experts(self, tokens: list[int], contexts: list[int], seconds: list[float]) -> ExpertCost | None:
        """The expert term of a mixture of experts; None for a dense model or where too little was measured."""
        shape = self.profile.identity.model_shape or {}
        if not shape.get("experts") or not shape.get("experts_per_token"):
            return None
        return fit_experts(tokens, contexts, seconds, int(shape["experts"]), float(shape["experts_per_token"]))

    @property
    def experts(self) -> ExpertCost | None:
        """The fit with a concave expert term (smallest measured batch); None for a dense model."""
        return self._experts[self._measured_requests[0]]

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

    @cached_property
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
        if not np.all((contexts >= 0) & (contexts < np.inf)) or not np.all(tokens < np.inf):
            raise UsageError(f"verify_tokens and context_tokens must be finite and contexts not negative; got {context_tokens!r}")
        if form not in FORMS:
            raise UsageError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
        self._note_outside(tokens, contexts, num_requests)
        forms: dict[int, Any] = dict(self._tables if form == "table" else self._convexes)
        if form == "fitted":
            forms |= {number: expert for number, expert in self._experts.items() if expert is not None}
        seconds = self._over_requests(num_requests, lambda requests: forms[requests].seconds(tokens, contexts))
        return float(seconds) if seconds.ndim == 0 else seconds

    def verify_interval(
        self, verify_tokens: ArrayLike, context_tokens: float = 0, num_requests: int = 1, level: float = 0.9, of: str = "median"
    ) -> tuple[Any, Any]:
        """The ends, in seconds, of the interval that `level` of the latencies measured there should fall into.

        `of` is "median" (what measuring there would give) or "call" (one forward: the spread of single calls as well).
        Sizes scalar or array, one context; floats for scalars. Composed and estimated profiles reach from their lower
        to their upper pricing, composed ones widened by 7 %.
        """
        if not 0 < level < 1 or of not in ("median", "call"):
            raise UsageError(f"level must lie between 0 and 1 and of be median or call; got {level!r}, {of!r}")
        tokens = np.atleast_1d(np.asarray(verify_tokens, dtype=float))
        middle = np.atleast_1d(self.verify_seconds(tokens, context_tokens, num_requests))
        measured = self._measured_requests
        nearest = min(measured, key=lambda number: abs(number - num_requests))
        width = self._intervals(nearest).half_width(tokens, float(context_tokens), level)
        if of == "call":
            width = np.hypot(width, self._intervals(nearest).spread * NormalDist().inv_cdf((1 + level) / 2) / 1.2816)
        low, high = self._bounds(tokens, context_tokens, num_requests, middle)
        prior = PRIORS[self.provenance]
        low, high = low * np.exp(-np.hypot(width, prior)), high * np.exp(np.hypot(width, prior))
        if np.ndim(verify_tokens) == 0:
            return float(low[0]), float(high[0])
        return low, high

    def _intervals(self, requests: int) -> IntervalModel:
        if requests not in self._interval_models:
            self._interval_models[requests] = IntervalModel(self._cells[requests])
        return self._interval_models[requests]

    def _bounds(self, tokens: Array, context_tokens: float, num_requests: int, middle: Array) -> tuple[Array, Array]:
        """Lower and upper pricing where the profile carries them instead of samples, else the table itself twice."""
        if any(cell.num_samples or cell.high_seconds is None for cell in self.profile.verify):
            return middle, middle
        contexts = np.asarray(float(context_tokens))
        ends = []
        for end in ("low_seconds", "high_seconds"):
            tables = self._bound_tables(end)
            at = partial(_at, tables, tokens, contexts)
            ends.append(np.atleast_1d(self._over_requests(num_requests, at)))
        return np.minimum(ends[0], middle), np.maximum(ends[1], middle)

    def _bound_tables(self, end: str) -> dict[int, TableCost]:
        if end not in self._bounds_cache:
            tables = {}
            for number, cells in self._cells.items():
                sizes, contexts = [cell.verify_tokens for cell in cells], [cell.context_tokens for cell in cells]
                seconds = [getattr(cell, end) for cell in cells]
                tables[number] = fit_table(sizes, contexts, seconds, self._convexes[number].slope, self._executable_sizes())
            self._bounds_cache[end] = tables
        return self._bounds_cache[end]

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
        low, high = self._batches_around(num_requests)
        share = (num_requests - low) / (high - low)
        return (1 - share) * at(low) + share * at(high)

    def _batches_around(self, num_requests: int) -> tuple[int, int]:
        """The nearest measured batches at or below and at or above one; beyond the measured ones the last, twice."""
        measured = self._measured_requests
        below = max((number for number in measured if number <= num_requests), default=measured[0])
        return below, min((number for number in measured if number >= num_requests), default=measured[-1])

    def _note_outside(self, tokens: Array, contexts: Array, num_requests: int) -> None:
        """Note what of a query lies outside of what was measured at its batch, or at the batches around it."""
        size, low, high = self.measured_range(num_requests)
        if tokens.size and tokens.max() > size:
            self._flags[f"verify tokens beyond the measured {size}: extrapolated with the convex slope"] = None
        if contexts.size and contexts.max() > high:
            self._flags[f"context above the measured {high}: the table charges {high}, the convex form extrapolates"] = None
        if contexts.size and contexts.min() < low:
            self._flags[f"context below the measured {low}: charged as that"] = None

    def measured_range(self, num_requests: int) -> tuple[int, int, int]:
        """Largest verify tokens, smallest and largest context that were measured at a batch, or at both around it."""
        sizes, lows, highs = zip(*(self._ranges[number] for number in self._batches_around(num_requests)), strict=True)
        return min(sizes), max(lows), min(highs)

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
        """Seconds of one drafter pass over the drafter's own block; 0 where none was measured.

        Where the profile does not say how large that is, the middle of the block sizes measured.
        """
        return self._stage("draft", self.identity.block_size, context_tokens, num_requests)

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
        if not 1 <= max_verify_tokens < np.inf or int(max_verify_tokens) != max_verify_tokens:
            raise UsageError(f"max_verify_tokens must be a whole number of at least 1, got {max_verify_tokens}")
        if not 0 <= context_tokens < np.inf:
            raise UsageError(f"context_tokens must not be negative, got {context_tokens}")
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


def _at(tables: dict[int, TableCost], tokens: Array, contexts: Array, requests: int) -> Array:
    return tables[requests].seconds(tokens, contexts)


def fit_cost(profile: Profile, **options: Any) -> CostModel:
    """Fit a profile: CostModel(profile); options are max_token_knots and max_context_knots."""
    return CostModel(profile, **options)
