"""How long choosing takes: the compiled search against plain Python on the same drafts, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from selector import Trellis
from selector.search.expansion import expand
from selector.search.reference import expand_in_python

NUM_ROUNDS = 120
BUDGETS = (8, 16, 64)


def selection_times(trace: Any, budgets: tuple[int, ...] = BUDGETS) -> list[dict[str, float]]:
    """One row per number of nodes: median microseconds of both searches over drafts of the trace, and their ratio.

    Both see the same trellises one after the other; the compiled one is warm.
    """
    drafts = [(text.draft_token_ids[a], text.draft_logprobs[a]) for text in trace.texts for a in range(text.num_anchors)]
    picked = [drafts[i] for i in np.linspace(0, len(drafts) - 1, min(NUM_ROUNDS, len(drafts))).astype(int)]
    trellises = [Trellis(ids.astype(np.int64), logprobs.astype(np.float64)) for ids, logprobs in picked]
    rows = []
    for budget in budgets:
        expand(trellises[0], budget)
        pairs = [(_seconds(expand, trellis, budget), _seconds(expand_in_python, trellis, budget)) for trellis in trellises]
        compiled, python = np.median(np.array(pairs), axis=0) * 1e6
        rows.append({"num_nodes": budget, "search_microseconds": float(compiled), "python_microseconds": float(python),
                     "python_over_search": float(python / compiled)})
    return rows


def _seconds(search: Callable[[Trellis, int], Any], trellis: Trellis, budget: int) -> float:
    begun = time.perf_counter()
    search(trellis, budget)
    return time.perf_counter() - begun
