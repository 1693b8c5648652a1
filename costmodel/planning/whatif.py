"""What a target would do on a GPU, at a context, in a batch: the best budget and everything that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.acceptance import Acceptance
from costmodel.planning.memory import Memory
from costmodel.planning.pricing import Pricer
from costmodel.planning.reach import expected_tokens, tokens_in_case

Array = NDArray[np.float64]
Errors = Sequence[float] | None
CASES = ("expected", "cheap", "dear")
WORTH_IT = 0.02  # a smaller gain over the best fixed budget is reported as not worth it
MAX_SEARCHED_BATCH = 512


@dataclass(frozen=True)
class Settings:
    """What is asked besides the profiles. `price_per_hour` is of one GPU, in any currency; None gives no cost."""

    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int, ...] = (1,)
    max_nodes: int = 15
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Choice:
    """The budget with most tokens per second at one shape; 0 is a plain step."""

    budget: int
    rates: Array  # tokens per second and request for 0..m nodes, (m + 1,)
    tokens: Array  # tokens per round for 0..m nodes, (m + 1,)

    @property
    def rate(self) -> float:
        """Tokens per second of one request at the chosen budget."""
        return float(self.rates[self.budget])


def choose(
    pricer: Pricer, tokens: Array, context_tokens: int, num_requests: int, case: str = "expected", errors: Errors = None
) -> Choice:
    """argmax over n of tokens(n) / round(n), with n = 0 the plain step; ties go to the smaller budget.

    In the case `cheap` every part costs its low end and as many tokens are accepted as their interval allows, in the case
    `dear` the opposite. One pricing then holds for all budgets alike, which is how a choice can err.
    """
    accepted = tokens_in_case(tokens, errors, case)
    rates = accepted / pricer.budgets(tokens.size - 1, context_tokens, num_requests).case(case)
    return Choice(int(np.argmax(rates)), rates, accepted)


def best_fixed(choices: Sequence[Choice]) -> int:
    """The one budget (0 is plain decoding) with the highest geometric mean of tokens per second over the shapes given."""
    logs = np.log(np.stack([choice.rates for choice in choices]))
    return int(np.argmax(logs.mean(axis=0)))


def what_if(
    pricers: Sequence[Pricer],
    acceptance: Acceptance,
    settings: Settings,
    memories: Sequence[Memory],
    prices: Sequence[float | None] | None = None,
) -> list[dict[str, Any]]:
    """One row for every profile, context and batch; times in milliseconds, memory in bytes. A misfit is a row too.

    `prices` are per profile and hour, in place of the one in `settings`.
    """
    prices = prices or [settings.price_per_hour] * len(pricers)
    tokens = expected_tokens(acceptance, settings.max_nodes)
    errors = acceptance.relative_errors(tokens.size - 1)
    rows = []
    for pricer, memory, price in zip(pricers, memories, prices, strict=True):
        own = replace(settings, price_per_hour=price)
        shapes = [(context, batch) for context in own.contexts for batch in own.batches]
        choices = {shape: [choose(pricer, tokens, *shape, case, errors) for case in CASES] for shape in shapes}
        fits = {context: memory.largest_batch(context, 0) for context in own.contexts}
        served = [found[0] for (context, batch), found in choices.items() if _within(batch, fits[context])]
        fixed = best_fixed(served or [found[0] for found in choices.values()])
        stops = {context: stops_paying(pricer, tokens, memory, context, errors) for context in own.contexts}
        for (context, batch), found in choices.items():
            row = _row(pricer, found, context, batch, fixed)
            row |= _money(row, own.price_per_hour)
            row |= _fit(memory, context, batch, found[0].budget)
            row["interval"] |= stops[context]["interval"]
            rows.append(row | {key: value for key, value in stops[context].items() if key != "interval"})
    return rows


def _row(pricer: Pricer, choices: Sequence[Choice], context: int, batch: int, fixed: int) -> dict[str, Any]:
    choice, many, few = choices  # as expected, in the cheap case, in the dear one
    budget, tokens = choice.budget, float(choice.tokens[choice.budget])
    priced = pricer.budgets(choice.rates.size - 1, context, batch)
    seconds, low, high = (float(item[budget]) for item in (priced.seconds, priced.low, priced.high))
    plain, plain_low, plain_high = (float(item[0]) for item in (priced.seconds, priced.low, priced.high))
    fewest, most = float(few.tokens[budget]), float(many.tokens[budget])
    per_gpu = batch / pricer.tensor_parallel
    gains = [float(case.rates[budget] / case.rates[fixed] - 1.0) for case in choices]
    ends = [1.0, 1.0] if budget == 0 else [fewest / high * plain_low, most / low * plain_high]
    interval = {
        "budget": [min(case.budget for case in choices), max(case.budget for case in choices)],
        "tokens_per_round": [fewest, most],
        "round_ms": [1e3 * low, 1e3 * high],
        "ms_per_token": [1e3 * low / most, 1e3 * high / fewest],
        "tokens_per_second_per_user": [fewest / high, most / low],
        "tokens_per_second_per_gpu": [per_gpu * fewest / high, per_gpu * most / low],
        "speedup_over_plain": ends,
        "gain_over_fixed": [min(gains), max(gains)],
        "plain_ms_per_token": [1e3 * plain_low, 1e3 * plain_high],
    }
    return {
        "profile": pricer.name, "device": pricer.cost.identity.device, "target": pricer.cost.identity.target,
        "provenance": pricer.provenance(batch), "profile_provenance": pricer.cost.provenance,
        "priced_by": pricer.priced_by(batch), "not_charged": list(pricer.not_charged),
        "outside": list(pricer.outside(budget, context, batch)),
        "context_tokens": context, "batch": batch, "budget": budget, "verify_tokens": batch * (budget + 1),
        "tokens_per_round": tokens, "round_ms": 1e3 * seconds, "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_second_per_user": tokens / seconds, "tokens_per_second_per_gpu": per_gpu * tokens / seconds,
        "plain_ms_per_token": 1e3 * plain, "speedup_over_plain": float(choice.rate / choice.rates[0]),
        "fixed_budget": fixed, "gain_over_fixed": gains[0],
        "verdict": _verdict(budget, gains[0], fixed, pricer.cost.diagnostics.degenerate_reason), "interval": interval,
    }  # fmt: skip


def _verdict(budget: int, gain: float, fixed: int, degenerate: str | None) -> str:
    if degenerate:
        return f"no decision: {degenerate}"
    worth = f"worth it (+{gain:.0%} over fixed {fixed})" if gain >= WORTH_IT else f"not worth it (fixed {fixed} does)"
    return f"do not speculate; {worth}" if budget == 0 else worth


def _money(row: dict[str, Any], price_per_hour: float | None) -> dict[str, Any]:
    """Cost per million tokens = price per GPU-hour / 3600 / (tokens per second and GPU) x 1e6; None without a price."""
    if price_per_hour is None:
        row["interval"]["cost_per_million_tokens"] = None
        return {"price_per_hour": None, "cost_per_million_tokens": None}
    cost = price_per_hour / 3600 * 1e6
    low, high = row["interval"]["tokens_per_second_per_gpu"]
    row["interval"]["cost_per_million_tokens"] = [cost / high, cost / low]
    return {"price_per_hour": price_per_hour, "cost_per_million_tokens": cost / row["tokens_per_second_per_gpu"]}


def _fit(memory: Memory, context: int, batch: int, budget: int) -> dict[str, Any]:
    largest = memory.largest_batch(context, budget)
    return {
        "weights_bytes": memory.weights_bytes,
        "cache_bytes": memory.cache_bytes(context, budget, batch),
        "gpu_bytes": memory.gpu_bytes,
        "largest_batch": largest,
        "fits": None if largest is None else batch <= largest,
        "memory_unknown": memory.unknown,
    }


def stops_paying(pricer: Pricer, tokens: Array, memory: Memory, context: int, errors: Errors = None) -> dict[str, Any]:
    """The batch from which speculation no longer beats plain decoding; None where it pays as far as was searched.

    Searched up to the largest batch that fits (512 where unknown), by steps of half as much again and then bisection: a
    staircase may hide a short stretch between the steps. The interval holds the answers of the cheap and the dear case.
    """
    fits = memory.largest_batch(context, 0)
    limit = MAX_SEARCHED_BATCH if fits is None else max(min(fits, MAX_SEARCHED_BATCH), 1)

    def pays(case: str, batch: int) -> bool:
        return choose(pricer, tokens, context, batch, case, errors).budget > 0

    found = [_stop(partial(pays, case), limit) for case in CASES]
    ends = sorted(found, key=lambda batch: limit + 1 if batch is None else batch)
    interval = {"stops_paying_at_batch": [ends[0], ends[-1]]}
    return {"stops_paying_at_batch": found[0], "searched_to_batch": limit, "interval": interval}


def _within(batch: int, most: int | None) -> bool:
    return most is None or batch <= most


def _stop(pays: Callable[[int], bool], limit: int) -> int | None:
    paying, tried = 0, 1
    while pays(tried):
        if tried >= limit:
            return None
        paying, tried = tried, min(limit, max(tried + 1, tried * 3 // 2))
    while tried - paying > 1:
        middle = (tried + paying) // 2
        paying, tried = (middle, tried) if pays(middle) else (paying, middle)
    return tried
