"""What a bench reports: rates, paired ratios with intervals, rows per data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoder.records import STAGES, Generation

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One prompt under one policy."""

    policy: str
    prompt: int
    dataset: str | None
    result: Generation


def median_ratio(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median of paired ratios and its 95 % bootstrap interval over prompts: (median, low, high)."""
    values = np.asarray(ratios, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def paired_ratios(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Tokens per second of each prompt's run over plain decoding's on the same prompt, where both had rounds."""
    base = {run.prompt: run.result.tokens_per_second for run in plain}
    pairs = [(run.result.tokens_per_second, base.get(run.prompt, 0.0)) for run in runs if run.result.rounds]
    return [mine / plains for mine, plains in pairs if plains > 0]


def summarise(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """One policy's row: rates over all rounds, medians by prompt, milliseconds by stage of a mean round."""
    rounds = [entry for run in runs for entry in run.result.rounds]
    seconds = sum(entry.seconds for entry in rounds)
    tokens = sum(entry.num_emitted for entry in rounds)
    num = max(1, len(rounds))
    drafted = [entry for entry in rounds if entry.drafted]
    row: dict[str, Any] = {
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "tokens_per_round": tokens / num,
        "mean_nodes": sum(entry.num_nodes for entry in rounds) / num,
        "num_rounds": len(rounds),
        "drafted_share": len(drafted) / num,
        "prefill_milliseconds": 1e3 * float(np.median([run.result.prefill_seconds for run in runs])),
        "stage_milliseconds": {stage: 1e3 * sum(run.result.stage_seconds()[stage] for run in runs) / num for stage in STAGES},
        "select_share": sum(entry.select_seconds for entry in rounds) / seconds if seconds else 0.0,
    }
    rates = [run.result.tokens_per_second for run in runs if run.result.rounds]
    if rates:
        low, middle, high = np.percentile(rates, [10, 50, 90])
        row["tokens_per_second_by_prompt"] = {"p10": float(low), "median": float(middle), "p90": float(high)}
    ratios = paired_ratios(runs, plain)
    if ratios:
        median, low, high = median_ratio(ratios)
        row["speedup_over_plain"] = median
        row["speedup_interval"] = [low, high]
    else:
        row["speedup_over_plain"] = row["speedup_interval"] = None
    return row


def by_dataset(runs: Sequence[Run], policies: Sequence[str]) -> list[dict[str, Any]]:
    """One entry per data set and policy, and a mean over data sets (each counts once, as the papers report)."""
    names = list(dict.fromkeys(run.dataset for run in runs))
    if names == [None]:
        return []
    rows = []
    for dataset in names:
        plain = [run for run in runs if run.policy == "plain" and run.dataset == dataset]
        for policy in policies:
            chosen = [run for run in runs if run.policy == policy and run.dataset == dataset]
            summary = summarise(chosen, plain)
            rows.append({"dataset": dataset or "none", "name": policy, "num_prompts": len(chosen),
                         **{key: summary[key] for key in ("tokens_per_second", "tokens_per_round", "speedup_over_plain")}})
    for policy in policies:
        mine = [row for row in rows if row["name"] == policy and row["dataset"] != "mean"]
        speedups = [row["speedup_over_plain"] for row in mine if row["speedup_over_plain"] is not None]
        rows.append({"dataset": "mean", "name": policy, "num_prompts": sum(row["num_prompts"] for row in mine),
                     "tokens_per_second": float(np.mean([row["tokens_per_second"] for row in mine])),
                     "tokens_per_round": float(np.mean([row["tokens_per_round"] for row in mine])),
                     "speedup_over_plain": float(np.mean(speedups)) if speedups else None})
    return rows
