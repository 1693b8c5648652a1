"""How fast the machine is during a bench, beside what its profile says: a few reference shapes, timed again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from costmodel import CostModel
from decoder.backend import TransformersBackend
from decoder.drafters.base import Drafter
from decoder.target import Target

TREE_TOKENS = 9  # a small tree, as the cost-aware policies draw on slow machines


@dataclass
class SpeedReference:
    """Seconds of a plain step, of a draft and of verifying a small tree, measured in between what a bench decodes.

    A shared machine drifts by 10-20 % within minutes, and a profile is older than the bench it predicts. The references say
    how much slower or faster everything is now. They decode nothing, so a prediction scaled by them has still not seen
    what it predicts.

    Attributes:
        context_tokens: the context of every reference. expected: seconds by the profile, by name. calls: what is timed.
        before: called ahead of every round of measurements. samples: seconds as measured, by name.
    """

    context_tokens: int
    expected: dict[str, float]
    calls: dict[str, Callable[[], Any]]
    before: Callable[[], None]
    samples: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None, cost: CostModel, context_tokens: int) -> SpeedReference:
        """References on a cache of their own, through the very backend that profiles are measured with."""
        backend = TransformersBackend(target, drafter)
        layers = target.feature_layers

        def before() -> None:
            backend.prepare(context_tokens)  # anew: the drafter is shared, and what was decoded since has moved it elsewhere
            target.set_feature_layers(layers)

        before()
        tree = max(1, min(TREE_TOKENS, cost.max_verify_tokens))
        expected = {name: float(cost.verify_seconds(size, context_tokens)) for name, size in (("plain", 1), ("tree", tree))}
        calls: dict[str, Callable[[], Any]] = {"plain": lambda: backend.verify(1), "tree": lambda: backend.verify(tree)}
        draft_seconds = float(cost.draft_seconds(context_tokens))
        if drafter is not None and draft_seconds > 0:
            expected["draft"], calls["draft"] = draft_seconds, backend.draft
        for call in calls.values():
            call()
        return cls(context_tokens, expected, calls, before, {name: [] for name in calls})

    def measure(self) -> None:
        """Time every reference once."""
        self.before()
        for name, call in self.calls.items():
            begin = time.perf_counter()
            call()
            self.samples[name].append(time.perf_counter() - begin)

    @property
    def speed(self) -> float:
        """Seconds by the profile over mean seconds measured: 0.9 where the machine takes a ninth longer than profiled.

        Means, not medians: what slows a few calls slows decoding by as much.
        """
        return sum(self.expected.values()) / sum(float(np.mean(values)) for values in self.samples.values())

    def record(self) -> dict[str, Any]:
        """JSON types: the speed, and per reference the profile's milliseconds, the mean and the 10th and 90th percentile."""
        rows = {name: _row(self.expected[name], values) for name, values in self.samples.items()}
        return {"speed": self.speed, "context_tokens": self.context_tokens, "references": rows}


def _row(expected: float, values: Sequence[float]) -> dict[str, float]:
    low, high = np.percentile(values, [10, 90])
    seconds = {"profile": expected, "mean": float(np.mean(values)), "p10": float(low), "p90": float(high)}
    return {f"{name}_milliseconds": 1e3 * value for name, value in seconds.items()} | {"num_samples": len(values)}
