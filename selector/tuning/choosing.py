"""The record of every candidate beside its baselines, and which one a plan takes, with the reason in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.replaying.metrics import gain_interval
from selector.tuning.candidates import Candidate
from selector.tuning.judging import Judged

WORTH_IT = 0.02  # a smaller gain over the best fixed budget is reported as "not worth it"
MIN_SPEEDUP = 1.02  # below this over plain decoding, or within its noise, the plan is plain


def best(rows: list[Judged], *kinds: str) -> Judged:
    """The fastest candidate of some kinds, or of all kinds that draft."""
    chosen = [row for row in rows if (row.candidate.kind in kinds if kinds else row.candidate.kind != "plain")]
    return max(chosen, key=lambda row: row.tokens_per_second)


def record(row: Judged, rows: list[Judged], weights: NDArray[np.float64]) -> dict[str, Any]:
    """One candidate beside the baselines, JSON types; gains are ratios of throughput less 1, intervals 95 % over texts."""
    bases = {"plain": best(rows, "plain"), "best_chain": best(rows, "chain")}
    bases["best_fixed"] = next(other for other in rows if other.candidate == Candidate("fixed"))
    made: dict[str, Any] = {
        "name": row.candidate.label,
        "policies": list(row.policies),
        "policy_settings": list(row.settings),
        "edges": row.candidate.edges,
        "calibrated": row.candidate.edges == CALIBRATED,
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_round": row.num_tokens / max(int(row.text_rounds.sum()), 1),
        "mean_nodes": row.mean_nodes,
    }
    for name, base in bases.items():
        made |= gain_over(row, base, weights, name)
    made["speedup_over_plain"] = made["gain_over_plain"] + 1
    return made


def evidence(winner: Judged, rows: list[Judged], weights: NDArray[np.float64]) -> dict[str, Any]:
    """What a plan records of its choice: the winner's record, what the scorer gains, and whether it is worth it."""
    made = {name: value for name, value in record(winner, rows, weights).items() if name != "name"}
    made |= {"gain_over_best_fixed_chosen_elsewhere": gain_chosen_elsewhere(rows, weights)}
    return made | scorer_gain(rows, weights) | {"worth_it": made["gain_over_best_fixed"] >= WORTH_IT}


def gain_chosen_elsewhere(rows: list[Judged], weights: NDArray[np.float64]) -> float | None:
    """What the best candidate gains over the best fixed budget on texts that it was not chosen on.

    The best of many is flattered by what it was chosen on (the winner's curse). So in every resample the best is chosen on
    the texts in it and judged on those that are not (about a third), over all resamples together. None where no resample
    leaves a text out.
    """
    drafting = [row for row in rows if row.candidate.kind != "plain"]
    seconds = np.array([row.text_seconds for row in drafting])  # (candidates, T)
    fixed = next(row.text_seconds for row in rows if row.candidate == Candidate("fixed"))
    chosen = (weights @ seconds.T).argmin(axis=1)  # all decode the same tokens
    outside = (weights == 0).astype(np.float64)
    spent = float((outside * seconds[chosen]).sum())
    return float((outside @ fixed).sum()) / spent - 1 if spent > 0 else None


def gain_over(row: Judged, base: Judged, weights: NDArray[np.float64], name: str) -> dict[str, Any]:
    """`gain_over_NAME` and its interval."""
    return {
        f"gain_over_{name}": row.tokens_per_second / base.tokens_per_second - 1,
        f"gain_over_{name}_interval": list(gain_interval(row.text_seconds, base.text_seconds, weights)),
    }


def choose(rows: list[Judged], weights: NDArray[np.float64]) -> tuple[Judged, str]:
    """The winner and why, in words."""
    drafting = best(rows)
    made = record(drafting, rows, weights)
    low, high = (1 + bound for bound in made["gain_over_plain_interval"])
    speedup = made["speedup_over_plain"]
    found = f"{drafting.candidate.label} decodes {speedup:.3f} times as fast as plain decoding (95 %: {low:.3f} to {high:.3f})"
    if speedup < MIN_SPEEDUP or low <= 1.0:
        reason = f"drafting does not pay here: the best way to draft, {found}, is not faster by more than 2 % and its noise"
        return best(rows, "plain"), reason
    gain, bounds = made["gain_over_best_fixed"], made["gain_over_best_fixed_interval"]
    reason = found
    if drafting.candidate != Candidate("fixed", DRAFTED):
        reason += f", {gain:+.1%} over the best fixed budget (95 %: {bounds[0]:+.1%} to {bounds[1]:+.1%})"
        elsewhere = gain_chosen_elsewhere(rows, weights)
        reason += "" if elsewhere is None else f", {elsewhere:+.1%} where it is chosen on other texts than it is judged on"
        reason += "" if gain >= WORTH_IT else ": not worth it, the fixed budget would do as well"
    scored = scorer_gain(rows, weights)
    if scored:
        share, (low, high) = scored["gain_over_unscored"], scored["gain_over_unscored_interval"]
        reason += f"; the scorer is worth {share:+.1%} over the best without it (95 %: {low:+.1%} to {high:+.1%})"
    return drafting, reason


def scorer_gain(rows: list[Judged], weights: NDArray[np.float64]) -> dict[str, Any]:
    """What the best scored candidate gains over the best other one, its own time paid; empty without a scorer."""
    scored = [row for row in rows if row.candidate.edges == SCORED]
    if not scored:
        return {}
    return gain_over(best(scored), best([row for row in rows if row.candidate.edges != SCORED]), weights, "unscored")
