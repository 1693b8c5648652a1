"""The questions asked backwards: which batch keeps a latency, which acceptance pays, how many GPUs carry a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.planning.acceptance import rate_of_mean
from costmodel.planning.memory import Memory
from costmodel.planning.pricing import Pricer
from costmodel.planning.whatif import CASES, MAX_SEARCHED_BATCH, Choice, Errors, choose

Array = NDArray[np.float64]
MAX_WAIT_PROBABILITY = 0.05
EXACT_LOAD = 200_000.0  # requests in flight up to which the queue is computed term by term
ARRIVALS = (
    "arrivals are Poisson, balanced over all GPUs; every GPU is as many servers as its batch, a request holds one for "
    "output tokens x ms per token of a full batch (+ prefill where given); GPUs are the fewest with which at most "
    f"{MAX_WAIT_PROBABILITY:.0%} of requests wait for a place (Erlang C)"
)


def largest_batch_within(
    pricer: Pricer, tokens: Array, memory: Memory, context_tokens: int, slo_ms_per_token: float, errors: Errors = None
) -> dict[str, Any]:
    """The largest batch whose best budget stays within `slo_ms_per_token` for every user, and what limits it.

    On a staircase milliseconds per token may fall as the batch grows, so every batch is looked at, from the largest that
    fits down. Batch 0: none is served fast enough (or fits). The interval of the batch holds the answers where everything
    costs its high end (the batch that is safe) and its low end.
    """
    found = {case: _largest_batch(pricer, tokens, memory, context_tokens, slo_ms_per_token, case, errors) for case in CASES}
    good, limited = found["expected"]
    batches = [batch for batch, _ in found.values()]
    row: dict[str, Any] = {
        "profile": pricer.name, "context_tokens": context_tokens, "slo_ms_per_token": slo_ms_per_token,
        "largest_batch": good, "limited_by": limited, "provenance": pricer.provenance(max(good, 1)),
        "interval": {"largest_batch": [min(batches), max(batches)]},
    }  # fmt: skip
    if good:
        choices = {case: choose(pricer, tokens, context_tokens, good, case, errors) for case in CASES}
        budget = choices["expected"].budget
        priced = pricer.round_interval(budget, context_tokens, good)
        most, fewest = (float(choices[case].tokens[budget]) for case in ("cheap", "dear"))
        budgets = [choice.budget for choice in choices.values()]
        row |= {"budget": budget, "ms_per_token": 1e3 / choices["expected"].rate}
        row["interval"] |= {
            "budget": [min(budgets), max(budgets)],
            "ms_per_token": [1e3 * float(priced.low[0]) / most, 1e3 * float(priced.high[0]) / fewest],
        }
    return row


def _largest_batch(
    pricer: Pricer, tokens: Array, memory: Memory, context_tokens: int, slo_ms_per_token: float, case: str, errors: Errors
) -> tuple[int, str]:
    fits = memory.largest_batch(context_tokens, 0)
    limit = MAX_SEARCHED_BATCH if fits is None else min(fits, MAX_SEARCHED_BATCH)

    def best(batch: int) -> Choice:
        return choose(pricer, tokens, context_tokens, batch, case, errors)

    good, limited = 0, "memory" if fits is not None and fits <= MAX_SEARCHED_BATCH else "search"
    for batch in range(limit, 0, -1):
        choice = best(batch)
        if fits is not None and batch > (memory.largest_batch(context_tokens, choice.budget) or 0):
            limited = "memory"  # the drafted tokens' own cache
        elif 1e3 / choice.rate <= slo_ms_per_token:
            good = batch
            break
        else:
            limited = "latency"
    return good, limited


def break_even(pricer: Pricer, max_nodes: int, context_tokens: int, num_requests: int) -> list[dict[str, Any]]:
    """For every chain length: the acceptance length, rate and constant conditional acceptance at which it ties with plain.

    A round of n nodes pays where tokens per round exceed round(n) / plain; `conditional_acceptance` solves
    1 + p + ... + p^n for it and is None where even full acceptance does not pay. The interval takes the round's and the
    plain step's ends against each other.
    """
    priced = pricer.budgets(max_nodes, context_tokens, num_requests)
    rows = []
    for nodes in range(1, max_nodes + 1):
        needed = float(priced.seconds[nodes] / priced.seconds[0])
        ends = [float(priced.low[nodes] / priced.high[0]), float(priced.high[nodes] / priced.low[0])]
        rows.append({
            "profile": pricer.name, "context_tokens": context_tokens, "batch": num_requests, "budget": nodes,
            "provenance": pricer.provenance(num_requests), "acceptance_length": needed,
            "acceptance_rate": _rate(needed, nodes), "conditional_acceptance": _conditional(needed, nodes),
            "interval": {
                "acceptance_length": ends, "acceptance_rate": [_rate(end, nodes) for end in ends],
                "conditional_acceptance": [_conditional(end, nodes) for end in ends],
            },
        })  # fmt: skip
    return rows


def _rate(length: float, nodes: int) -> float | None:
    return None if length > nodes + 1 else max(length - 1.0, 0.0) / nodes


def _conditional(length: float, nodes: int) -> float | None:
    if length > nodes + 1:
        return None
    return 0.0 if length <= 1 else rate_of_mean(length, nodes)


def fleet(
    rows: Sequence[dict[str, Any]], requests_per_second: float, output_tokens: float, prefill_ms: float, parallel: dict[str, int]
) -> list[dict[str, Any]]:
    """GPUs that carry a load, for every what-if row; None where the row's batch does not fit. See ARRIVALS."""
    found = []
    for row in rows:
        seconds = [
            (prefill_ms + output_tokens * value) / 1e3 for value in (*row["interval"]["ms_per_token"], row["ms_per_token"])
        ]
        counts = [gpus_needed(requests_per_second * item, row["batch"]) * parallel[row["profile"]] for item in seconds]
        misfit = row["fits"] is False
        found.append({
            "profile": row["profile"], "context_tokens": row["context_tokens"], "batch": row["batch"],
            "budget": row["budget"], "provenance": row["provenance"], "fits": row["fits"],
            "gpus": None if misfit else counts[2], "requests_in_flight": requests_per_second * seconds[2],
            "interval": {
                "gpus": None if misfit else counts[:2], "requests_in_flight": [requests_per_second * end for end in seconds[:2]],
            },
        })  # fmt: skip
    return found


def gpus_needed(load: float, slots: int, max_wait: float = MAX_WAIT_PROBABILITY) -> int:
    """The fewest GPUs of `slots` servers each that let at most `max_wait` of arrivals wait, `load` requests in flight.

    Erlang C from Erlang B: B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)); C(k) = B / (1 - (a / k)(1 - B)). Beyond 200,000
    requests in flight or servers, a + 2 sqrt(a) servers (square-root staffing) are taken instead.
    """
    if load > EXACT_LOAD or slots > EXACT_LOAD:
        return math.ceil((load + 2.0 * math.sqrt(load)) / slots)
    blocked, servers = 1.0, 0
    while True:
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
        if servers % slots == 0 and servers > load:
            waiting = blocked / (1.0 - load / servers * (1.0 - blocked))
            if waiting <= max_wait:
                return servers // slots
