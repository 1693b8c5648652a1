"""What a target would do on a GPU, at a context, in a batch: the best budget and everything that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.acceptance import Acceptance
from costmodel.planning.memory import Memory
from costmodel.planning.pricing import Pricer
from costmodel.planning.reach import expected_tokens

Array = NDArray[np.float64]
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


def choose(pricer: Pricer, tokens: Array, context_tokens: int, num_requests: int) -> Choice:
    """argmax over n of tokens(n) / round(n), with n = 0 the plain step; ties go to the smaller budget."""
    seconds = np.empty(tokens.size)
    seconds[0] = pricer.plain(context_tokens, num_requests)
    seconds[1:] = pricer.rounds(tokens.size - 1, context_tokens, num_requests)
    rates = tokens / seconds
    return Choice(int(np.argmax(rates)), rates, tokens)


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
    rows = []
    for pricer, memory, price in zip(pricers, memories, prices, strict=True):
        own = replace(settings, price_per_hour=price)
        shapes = [(context, batch) for context in own.contexts for batch in own.batches]
        choices = {shape: choose(pricer, tokens, *shape) for shape in shapes}
        fits = [memory.largest_batch(context, 0) for context, _ in shapes]
        served = [choice for (shape, choice), most in zip(choices.items(), fits, strict=True) if most is None or shape[1] <= most]
        fixed = best_fixed(served or list(choices.values()))
        stops = {context: stops_paying(pricer, tokens, memory, context) for context in own.contexts}
        for (context, batch), choice in choices.items():
            row = _row(pricer, acceptance, choice, context, batch, fixed)
            row |= _money(row, pricer, own.price_per_hour)
            row |= _fit(memory, context, batch, choice.budget)
            rows.append(row | stops[context])
    return rows


def _row(pricer: Pricer, acceptance: Acceptance, choice: Choice, context: int, batch: int, fixed: int) -> dict[str, Any]:
    budget, tokens = choice.budget, float(choice.tokens[choice.budget])
    priced = pricer.round_interval(budget, context, batch)
    plain = pricer.round_interval(0, context, batch)
    seconds, low, high = (float(item[0]) for item in (priced.seconds, priced.low, priced.high))
    error = acceptance.relative_error(budget)
    fewest, most = tokens * (1 - error), tokens * (1 + error)
    per_gpu = batch / pricer.tensor_parallel
    gain = float(choice.rate / choice.rates[fixed] - 1.0)
    speedup = float(choice.rate / choice.rates[0])
    ends = [1.0, 1.0] if budget == 0 else [fewest / high * float(plain.low[0]), most / low * float(plain.high[0])]
    interval = {
        "tokens_per_round": [fewest, most],
        "round_ms": [1e3 * low, 1e3 * high],
        "ms_per_token": [1e3 * low / most, 1e3 * high / fewest],
        "tokens_per_second_per_user": [fewest / high, most / low],
        "tokens_per_second_per_gpu": [per_gpu * fewest / high, per_gpu * most / low],
        "speedup_over_plain": ends,
        "plain_ms_per_token": [1e3 * float(plain.low[0]), 1e3 * float(plain.high[0])],
    }
    return {
        "profile": pricer.name, "device": pricer.cost.identity.device, "target": pricer.cost.identity.target,
        "provenance": pricer.provenance(batch), "profile_provenance": pricer.cost.provenance,
        "priced_by": pricer.priced_by(batch), "not_charged": list(pricer.not_charged),
        "outside": list(pricer.outside(budget, context, batch)),
        "context_tokens": context, "batch": batch, "budget": budget, "verify_tokens": batch * (budget + 1),
        "tokens_per_round": tokens, "round_ms": 1e3 * seconds, "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_second_per_user": tokens / seconds, "tokens_per_second_per_gpu": per_gpu * tokens / seconds,
        "plain_ms_per_token": 1e3 * float(plain.seconds[0]), "speedup_over_plain": speedup,
        "fixed_budget": fixed, "gain_over_fixed": gain,
        "verdict": _verdict(budget, gain, fixed, pricer.cost.diagnostics.degenerate_reason), "interval": interval,
    }  # fmt: skip


def _verdict(budget: int, gain: float, fixed: int, degenerate: str | None) -> str:
    if degenerate:
        return f"no decision: {degenerate}"
    worth = f"worth it (+{gain:.0%} over fixed {fixed})" if gain >= WORTH_IT else f"not worth it (fixed {fixed} does)"
    return f"do not speculate; {worth}" if budget == 0 else worth


def _money(row: dict[str, Any], pricer: Pricer, price_per_hour: float | None) -> dict[str, Any]:
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


def stops_paying(pricer: Pricer, tokens: Array, memory: Memory, context: int) -> dict[str, Any]:
    """The batch from which speculation no longer beats plain decoding; None where it pays as far as was searched.

    Searched up to the largest batch that fits (512 where unknown), by steps of half as much again and then bisection: a
    staircase may hide a short stretch between the steps.
    """
    fits = memory.largest_batch(context, 0)
    limit = MAX_SEARCHED_BATCH if fits is None else max(min(fits, MAX_SEARCHED_BATCH), 1)
    paying, tried = 0, 1
    while True:
        if choose(pricer, tokens, context, tried).budget == 0:
            break
        paying = tried
        if tried >= limit:
            return {"stops_paying_at_batch": None, "searched_to_batch": limit}
        tried = min(limit, max(tried + 1, tried * 3 // 2))
    while tried - paying > 1:
        middle = (tried + paying) // 2
        paying, tried = (paying, middle) if choose(pricer, tokens, context, middle).budget == 0 else (middle, tried)
    return {"stops_paying_at_batch": tried, "searched_to_batch": limit}
