"""Timing contenders against each other in one process: interleaved samples, their spread, and paired ratios."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

Calls = Mapping[str, tuple[Callable[[], Any], int]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender: best, median, 10th and 90th percentile of the samples."""

    best_ms: float
    median_ms: float
    low_ms: float
    high_ms: float
    samples: int


@dataclass(frozen=True)
class Ratio:
    """How many times as long one contender takes as another: by interleaved pairs of samples, and of the best samples."""

    median: float
    low: float
    high: float
    of_best: float

    def __str__(self) -> str:
        return f"{self.median:5.1f}x ({self.low:.1f}-{self.high:.1f}, best {self.of_best:.1f})"


def measure(
    calls: Calls, repeats: int, ratios: Mapping[str, tuple[str, str]], wait: Callable[[], Any] = lambda: None
) -> tuple[dict[str, Timing], dict[str, Ratio]]:
    """Interleaved samples, in turn forwards and backwards, after one warm-up of each.

    Args:
        calls: name -> (call, calls per sample). ratios: name -> (slow, fast), those whose names are both in `calls`.
        wait: ends a sample, for devices that work on while the host goes ahead.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-1, repeats):
        for name in list(calls) if repeat % 2 else reversed(list(calls)):
            call, count = calls[name]
            wait()
            start = time.perf_counter_ns()
            for _ in range(count):
                call()
            wait()
            if repeat >= 0:
                samples[name].append((time.perf_counter_ns() - start) / count / 1e6)
    timings = {
        name: Timing(min(each), statistics.median(each), *(float(q) for q in np.quantile(each, [0.1, 0.9])), len(each))
        for name, each in samples.items()
    }
    found = {}
    for name, (slow, fast) in ratios.items():
        if slow not in calls or fast not in calls:
            continue
        low, median, high = np.quantile(np.array(samples[slow]) / np.array(samples[fast]), [0.1, 0.5, 0.9])
        found[name] = Ratio(float(median), float(low), float(high), timings[slow].best_ms / timings[fast].best_ms)
    return timings, found


def hardware() -> dict[str, Any]:
    """What the figures belong to."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    torch = sys.modules.get("torch")
    return {
        "cpu": model, "num_cpus": os.cpu_count(), "load_average": list(os.getloadavg()), "threads": 1,
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
        "torch": torch.__version__ if torch else None,
    }  # fmt: skip
