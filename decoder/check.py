"""The losslessness check: every policy's text against plain decoding's, and drafts that are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from costmodel import CostModel
from decoder.bench import BenchResult, BenchSettings, run_bench
from decoder.benchstats import summarise
from decoder.identity import target_identity
from decoder.prompts import Prompt
from decoder.target import Target

MANY_NODES = 100  # that many rejections in a row are no accident of a drafter worth using


def step_seconds(target: Target, num_steps: int = 5) -> float:
    """Median seconds of a plain step after a few tokens."""
    cache, seconds = target.new_cache(), []
    for _ in range(num_steps + 1):
        begun = time.perf_counter()
        target.forward([0], [cache.length], cache)
        target.synchronize()
        seconds.append(time.perf_counter() - begun)
        cache.commit([0])
    return float(np.median(seconds[1:]))


def made_up_cost(plain_seconds: float) -> CostModel:
    """A curve on which trees of some size always pay, in proportion to a plain step: texts do not depend on it."""
    return CostModel.from_points([1, 8, 16, 32, 64], [plain_seconds * factor for factor in (1.0, 1.1, 1.3, 1.7, 2.6)])


def check_settings(policies: tuple[str, ...], max_new_tokens: int) -> BenchSettings:
    """A bench without pauses, so that every policy drafts in every round, and without predictions."""
    return BenchSettings(policies, max_new_tokens, max_nodes=63, warmup_tokens=4, predict=False, pause=False)


def run_check(target: Target, drafter: Any, prompts: Sequence[Prompt], settings: BenchSettings,
              progress: Callable[..., Any] = lambda *_args, **_kwargs: None) -> dict[str, Any]:
    """Run and judge; the record lists a row per policy, every difference, and the failures in words."""
    result = run_bench(target, drafter, made_up_cost(step_seconds(target)), prompts, settings, progress=progress)
    failures = find_failures(result, settings.names, exact=str(target.dtype) == "torch.float32")
    rows = []
    for name in settings.names:
        row = summarise(result.of(name), result.of("plain"))
        differences = [difference.to_dict() for difference in result.differences[name]]
        rows.append({"name": name, "num_prompts": len(prompts), "identical_to_plain": len(prompts) - len(differences),
                     "tokens_per_round": row["tokens_per_round"], "mean_nodes": row["mean_nodes"], "differences": differences})
    return {"schema": "treebudget.check", "version": 1, "passed": not failures, "failures": failures,
            "identity": target_identity(target, drafter).to_dict(), "policies": rows}


def find_failures(result: BenchResult, names: Sequence[str], exact: bool) -> list[str]:
    """What is wrong: texts that differ (`exact`), differences that rounding does not explain, drafts never accepted."""
    failures = []
    for name in names:
        differences = result.differences[name]
        wrong = differences if exact else [difference for difference in differences if not difference.near_tie]
        if wrong:
            first = wrong[0]
            failures.append(f"{name}: {len(wrong)} texts differ from plain decoding, "
                            f"the first at token {first.position} of prompt {first.prompt} (logit gap {first.gap:.3g})")
    return failures + _acceptance_failures(result, names)


def _acceptance_failures(result: BenchResult, names: Sequence[str]) -> list[str]:
    """Policies that verified many nodes and had none accepted; or all together, where each verified few."""
    nodes, accepted = {}, {}
    for name in names:
        rounds = [entry for run in result.of(name) for entry in run.result.rounds]
        nodes[name] = sum(entry.num_nodes for entry in rounds)
        accepted[name] = sum(entry.num_accepted for entry in rounds)
    failures = [f"{name}: not one of {nodes[name]} drafted tokens was accepted" for name in names
                if accepted[name] == 0 and nodes[name] >= MANY_NODES]
    if not failures and len(names) > 1 and not any(accepted.values()):
        failures = [f"no policy had a drafted token accepted ({sum(nodes.values())} were verified)"]
    return failures
