"""Policies against each other, live: one target, one cache, prompt by prompt in alternating order, differences explained."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from costmodel import CostModel
from decoder.benchstats import Run, by_dataset, summarise
from decoder.differences import Difference, explain_difference
from decoder.drafters.base import Drafter
from decoder.errors import UsageError
from decoder.identity import target_identity
from decoder.loop import Decoder
from decoder.predict import Prediction, can_predict, predict
from decoder.prompts import Prompt, encode_prompt, prompts_sha256
from decoder.speed import SpeedReference
from decoder.target import Target
from selector import TreeSelector
from selector.pause import PauseSettings
from selector.registry import parse_policy

Progress = Callable[..., Any]
DEFAULT_POLICIES = ("plain", "chain", "fixed:8", "fixed:16", "unimodal", "exact", "priced")
PAUSING = ("exact", "priced", "plan")


@dataclass(frozen=True)
class BenchSettings:
    """What to run. `policies` are selector policies, or `plan` for the given plan's; `plain` is always run.

    `pause` lets `exact`, `priced` and `plan` stop drafting where it does not pay; the papers' policies always draft.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    max_new_tokens: int = 128
    max_nodes: int = 64
    top_k: int = 16
    warmup_tokens: int = 24
    predict: bool = True
    pause: bool = True

    def __post_init__(self) -> None:
        """Write policies as the selector names them (fixed:04 is fixed:4); refuse duplicates and senseless numbers."""
        names = tuple(name if name == "plan" else parse_policy(name).name for name in self.policies)
        object.__setattr__(self, "policies", names)
        if len(set(self.policies)) != len(self.policies):
            raise UsageError(f"policies are named twice: {', '.join(self.policies)}")
        if self.max_new_tokens < 2:
            raise UsageError(f"max_new_tokens must be at least 2 for a rate, got {self.max_new_tokens}")

    @property
    def names(self) -> tuple[str, ...]:
        """Policies in the order they are reported, plain decoding first."""
        return ("plain", *(name for name in self.policies if name != "plain"))


@dataclass
class BenchResult:
    """Everything a bench found; `record` makes the JSON document of it."""

    runs: list[Run] = field(default_factory=list)
    differences: dict[str, list[Difference]] = field(default_factory=dict)
    prediction: Prediction = field(default_factory=Prediction)
    selector_stats: dict[str, Any] = field(default_factory=dict)
    machine_speed: dict[str, Any] | None = None
    num_prompts: int = 0  # that every policy has decoded
    interrupted: bool = False
    seconds: float = 0.0

    def of(self, policy: str) -> list[Run]:
        """The runs of one policy, in the order of the prompts."""
        return sorted((run for run in self.runs if run.policy == policy), key=lambda run: run.prompt)

    def cut_short(self, labels: Sequence[str]) -> None:
        """Keep the prompts that every policy has decoded, of the given labels, and say that there were to be more."""
        self.interrupted = True
        self.runs = [run for run in self.runs if run.prompt < self.num_prompts]
        for differences in self.differences.values():
            differences[:] = [difference for difference in differences if difference.prompt in labels[: self.num_prompts]]


def make_selectors(names: Sequence[str], cost: CostModel, settings: BenchSettings, plan: Any = None) -> dict[str, TreeSelector]:
    """One fresh selector per policy; its price and counters live on from prompt to prompt."""
    selectors = {}
    for name in names:
        pause = PauseSettings() if settings.pause and name in PAUSING else None
        if name == "plan":
            if plan is None:
                raise UsageError("policy `plan` needs a plan", hint="make one with `selector tune`, or name it with --plan")
            selectors[name] = TreeSelector(cost, plan=plan, pause=pause)
        else:
            selectors[name] = TreeSelector(cost, policy=name, max_nodes=settings.max_nodes, top_k=settings.top_k, pause=pause)
    return selectors


def run_bench(target: Target, drafter: Drafter | None, cost: CostModel, prompts: Sequence[Prompt], settings: BenchSettings,
              *, plan: Any = None, progress: Progress = lambda *_args, **_kwargs: None,
              after_prompt: Callable[[BenchResult], None] = lambda result: None) -> BenchResult:
    """Decode every prompt with every policy, greedily; the order of policies is reversed at every other prompt (ABBA).

    The first prompt is decoded once more beforehand, by every policy, and that is dropped. After every run the machine's
    speed is measured anew (`SpeedReference`). `progress(steps, note)` is called after each prompt and policy,
    `after_prompt(result)` after each prompt that all have decoded. Ctrl-C ends the bench there, without predictions; before
    the first such prompt it passes through. Raises what the decoder and the selectors raise.
    """
    begun = time.perf_counter()
    if drafter is None and any(name != "plain" for name in settings.names):
        raise UsageError("without a drafter only the policy plain can run", hint="name a drafter, or ask for --policies plain")
    encoded = [encode_prompt(target.tokenizer, prompt.text) for prompt in prompts]
    selectors = make_selectors(settings.names, cost, settings, plan)
    cache = target.new_cache()
    decoders = {name: Decoder(target, drafter, selector, cache=cache, keep_logits=name == "plain")
                for name, selector in selectors.items()}
    result = BenchResult(differences={name: [] for name in settings.names})
    lengths = [len(ids) for ids in encoded]
    context_tokens = sum(lengths) // len(lengths) + settings.max_new_tokens // 2
    reference = SpeedReference.of(target, drafter, cost, context_tokens) if settings.predict and can_predict(drafter) else None
    for name in settings.names:
        decoders[name].generate(encoded[0], min(settings.warmup_tokens, settings.max_new_tokens))
        progress(1, f"warm-up, {name}")
    labels = [prompt.key or str(place) for place, prompt in enumerate(prompts)]
    try:
        for place, ids in enumerate(encoded):
            for name in settings.names if place % 2 == 0 else reversed(settings.names):
                generation = decoders[name].generate(ids, settings.max_new_tokens)
                result.runs.append(Run(name, place, prompts[place].dataset, generation))
                if reference is not None:
                    reference.measure()
                progress(1, name)
            _compare(result, place, labels[place])
            result.num_prompts = place + 1
            after_prompt(result)
    except KeyboardInterrupt:
        if result.num_prompts == 0:
            raise
        result.cut_short(labels)
    result.selector_stats = {name: _stats(selector) for name, selector in selectors.items()}
    if reference is not None:
        result.machine_speed = reference.record()
    if result.interrupted:
        result.prediction = Prediction(note=f"interrupted after {result.num_prompts} of {len(prompts)} prompts")
    elif settings.predict:
        texts = {name: [run.result.token_ids for run in result.of(name)] for name in settings.names}
        result.prediction = predict(target, drafter, cost, prompts, encoded, texts, plan=plan, top_k=settings.top_k,
                                    max_nodes=settings.max_nodes)
    result.seconds = time.perf_counter() - begun
    return result


def _stats(selector: Any) -> dict[str, Any]:
    return {"price": selector.price, "reach_scale": selector.reach_scale, **selector.stats.to_dict()}


def _compare(result: BenchResult, place: int, label: str) -> None:
    """Explain where the texts of one prompt leave plain decoding's, then drop the logits kept for that."""
    here = {run.policy: run.result for run in result.runs if run.prompt == place}
    plain = here["plain"]
    logits = torch.cat(plain.logits)
    plain.logits.clear()
    for name, generation in here.items():
        difference = explain_difference(plain.token_ids, logits, generation.token_ids, label)
        if difference is not None:
            result.differences[name].append(difference)


def bench_record(result: BenchResult, target: Target, drafter: Drafter | None, cost: CostModel, prompts: Sequence[Prompt],
                 settings: BenchSettings) -> dict[str, Any]:
    """The bench as one JSON document: hardware, configuration, a row per policy, rows per data set. Units are in the names.

    Of a bench that goes on or was interrupted, about the prompts that every policy has decoded.
    """
    prompts, policies = list(prompts)[: result.num_prompts], []
    plain = result.of("plain")
    speed = result.machine_speed["speed"] if result.machine_speed else 1.0
    for name in settings.names:
        by_profile = result.prediction.rates.get(name)
        runs, differences = result.of(name), result.differences.get(name, [])
        policies.append({
            "name": name,
            **summarise(runs, plain),
            "predicted_tokens_per_second": None if by_profile is None else by_profile * speed,
            "predicted_by_profile_alone": by_profile,
            "identical_to_plain": len(runs) - len(differences),
            "identical_share": (len(runs) - len(differences)) / max(1, len(runs)),
            "differences": [difference.to_dict() for difference in differences],
            "selector": result.selector_stats.get(name),
        })
    return {
        "schema": "treebudget.bench",
        "version": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "identity": target_identity(target, drafter).to_dict(),
        "hardware": {"device": cost.identity.device, "machine": platform.machine(), "torch": torch.__version__,
                     "num_threads": torch.get_num_threads()},
        "settings": asdict(settings),
        "profile": {"provenance": cost.provenance, "source": cost.profile.source, "identity": cost.identity.to_dict()},
        "prompts": {"num_prompts": len(prompts), "sha256": prompts_sha256(prompts)},
        "interrupted": result.interrupted,
        "ceiling_tokens_per_second": ceiling(cost, drafter),
        "policies": policies,
        "datasets": by_dataset(result.runs, settings.names),
        "prediction_note": result.prediction.note,
        "machine_speed": result.machine_speed,
        "selection": result.prediction.selection,
        "seconds": result.seconds,
    }


def ceiling(cost: CostModel, drafter: Drafter | None, context_tokens: int = 256) -> float:
    """Tokens per second if every drafted chain were accepted whole, by the profile: what no policy can beat by much."""
    block = 1 if drafter is None else drafter.block_size
    return block / float(cost.round_seconds(block, context_tokens)[block - 1])
