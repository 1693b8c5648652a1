"""Run with the stand-in preloaded: captures what the decoder captures on a GPU, and prints what came of it as JSON.

Values mean nothing here: kernels do nothing. What is real is torch's own code for CUDA, and what it asks of the runtime.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from costmodel.adaptive import AdaptivePlan
from costmodel.measure import profile_backend
from decoder.backend import TransformersBackend
from decoder.capture import capture_cuda
from decoder.device import CapturedSearch, search_on_device
from decoder.device.search import RULES
from decoder.graphs import CapturedForwards
from decoder.target import Target
from selector.scorer import Scorer
from tests.decoder.helpers import tiny_dflash, tiny_model, tiny_qwen3
from tests.selector.random_scorers import VOCAB, make_scorer

COUNTS = ("nodes", "waits", "refusals", "graph_launches")
NODES = 64


def counts() -> dict[str, int]:
    """What the stand-in has seen; `nodes` of the last capture, the rest since the start."""
    numbers = (ctypes.c_long * len(COUNTS))()
    ctypes.CDLL(None).stand_in_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


def nodes_of(function: Callable[[], Any]) -> int:
    """Nodes of the graph of a function; -1 where its capture is refused."""
    try:
        capture_cuda(function)
    except RuntimeError:
        return -1
    return counts()["nodes"]


def controls() -> dict[str, int]:
    """Calls that CUDA captures, and calls that it refuses."""
    x, host = torch.zeros(3, 1000, device="cuda"), torch.zeros(3)
    mask = x > 0

    def kept() -> None:
        kept.tensor = torch.empty(3, device="cuda")  # type: ignore[attr-defined]

    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + 1, "sort": lambda: x.sort(dim=1, stable=True), "product": lambda: x @ x.T, "allocate": kept,
        "item": lambda: x.sum().item(), "nonzero": lambda: x.nonzero(), "by mask": lambda: x[mask], "unique": lambda: x.unique(),
        "to the host": lambda: x.cpu(), "from the host": lambda: host.to("cuda"), "wait": torch.cuda.synchronize,
    }  # fmt: skip
    return {name: nodes_of(call) for name, call in calls.items()}


def search(policy: str, scorer: Scorer | None, shape: tuple[int, int, int]) -> dict[str, int]:
    """The search as a graph, replayed once; and operation by operation, with the waits of the host counted."""
    curve = None if policy == "fixed" else torch.ones(NODES + 1, dtype=torch.float64, device="cuda")
    before = counts()
    captured = CapturedSearch(shape, NODES, policy, round_seconds=curve, scorer=scorer)
    nodes = counts()["nodes"]
    captured(torch.zeros(shape, device="cuda"), torch.zeros(shape[0], dtype=torch.int64, device="cuda"), 0.5)
    middle = counts()
    trees = search_on_device(captured.logits, NODES, policy, curve, captured.price, 16, captured.root_tokens, scorer=scorer)
    trees.walk(trees.token_ids, shape[1])
    trees.position_ids(captured.root_tokens)
    after = counts()
    return {"nodes": nodes, "replays": middle["graph_launches"] - before["graph_launches"],
            "waits": after["waits"] - middle["waits"], "refusals": after["refusals"] - before["refusals"]}  # fmt: skip


def forwards(make: Callable[[], Any]) -> dict[str, int]:
    """Nodes of the graphs of a target's forward, by verify tokens, for two requests behind three tokens."""
    target = Target(make().to("cuda"), feature_layers=(0, 2))
    prompt, cache = target.new_cache(), target.new_cache(num_requests=2)
    target.forward([3, 1, 4], range(3), prompt)
    prompt.commit_first(3)
    cache.copy_prefix(prompt, 3)
    captured, found = CapturedForwards(target, (1, 2, 4, 8)), {}
    for slots in (1, 2, 4):
        captured.make_ready(slots, cache)
        found[str(slots)] = counts()["nodes"]
    return found


def profile() -> dict[str, Any]:
    """`costmodel profile --mode captured`, small."""
    target = Target(tiny_model().to("cuda"), feature_layers=(0, 2))
    backend = TransformersBackend(target, tiny_dflash(target), mode="captured", captured_sizes=(1, 2, 4, 8))
    before = counts()
    plan = AdaptivePlan(max_verify_tokens=8, max_context_tokens=32, num_requests=(1, 2), samples=2, max_seconds=2.0)
    made = profile_backend(backend, plan)
    after = counts()
    return {"cells": len(made.verify), "replays": after["graph_launches"] - before["graph_launches"],
            "refusals": after["refusals"] - before["refusals"]}  # fmt: skip


def main() -> None:
    """Everything, one JSON document on stdout."""
    Target._check_head = lambda _self: None  # type: ignore[method-assign]  # which compares values
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "controls": controls()}
    scorers = {"drafted": None, "scored": make_scorer(np.random.default_rng(0))}
    shape = (3, 4, VOCAB)
    record["search"] = {f"{policy} {name}": search(policy, scorer, shape) for policy in RULES for name, scorer in scorers.items()}
    record["search"]["large"] = search("exact", None, (64, 15, 151_936))
    record["forwards"] = {"llama": forwards(tiny_model), "qwen3": forwards(tiny_qwen3)}
    record["profile"] = profile()
    json.dump(record, sys.stdout)


if __name__ == "__main__":
    main()
