"""From draft logits to trees, all on the logits' device, with the drafter's probabilities or a scorer's.

Every operation has a shape that depends on its arguments' shapes only, and none is waited for by the host, so a call can be
captured in a CUDA graph (`decoder.device.captured`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from decoder.device.candidates import trellis_from_logits
from decoder.device.order import expand_on_device
from decoder.device.tables import DeviceOrder, DeviceTrees, DeviceTrellis
from decoder.device.trees import build_trees, choose_sizes
from selector.errors import PolicyError
from selector.search.kernels import BUDGET, EXACT, FIRST_DESCENT, PRICED

RULES = {"fixed": BUDGET, "exact": EXACT, "priced": PRICED, "unimodal": FIRST_DESCENT}


class DeviceScorer(Protocol):
    """Path-conditioned chances of acceptance on an accelerator; `selector.scorer.Scorer` is one."""

    @property
    def top_k(self) -> int:
        """Candidates per depth that are scored; the others never enter a tree."""

    def edges_torch(self, token_ids: Any, log_probs: Any, root_token_ids: Any) -> Any:
        """(R, depth, k, k) log edges of (R, depth, K) candidates, as `EdgeScorer.edges`, on their device."""


def search_on_device(
    logits: Tensor,
    max_nodes: int,
    policy: str = "fixed",
    round_seconds: Tensor | None = None,
    price: Tensor | float = 0.0,
    top_k: int = 16,
    root_tokens: Tensor | None = None,
    bonus: Tensor | float = 1.0,
    scorer: DeviceScorer | None = None,
) -> DeviceTrees:
    """From draft logits (R, depth, vocab) to trees of at most `max_nodes` nodes, all on the logits' device.

    Args:
        policy: "fixed" takes max_nodes; "exact", "priced" and "unimodal" as the selector's policies, on `round_seconds`.
        round_seconds: (N + 1,) or (R, N + 1) float64, see `choose_sizes`.
        price, bonus: a number, or a tensor of shape () or (R, 1) that may change between replays of a captured graph.
        root_tokens: (R,) int64, for slot 0; a scorer needs them.
        scorer: its edges replace the drafter's; it sees its own `top_k` candidates at most. Put its weights on the device
            before capturing a graph, by one call outside of it.

    Raises PolicyError for another policy, one that lacks its curve, or a scorer without root tokens.
    """
    check_search(policy, round_seconds is not None, scorer is not None, root_tokens is not None)
    trellis = trellis_from_logits(logits, top_k if scorer is None else min(top_k, scorer.top_k))
    weighed = trellis
    if scorer is not None:
        weighed = DeviceTrellis(trellis.token_ids, scorer.edges_torch(trellis.token_ids, trellis.log_edges, root_tokens).double())
    order = expand_on_device(weighed, max_nodes)
    num_nodes = choose_sizes(order, RULES[policy], round_seconds, price, bonus)
    trees = build_trees(order, num_nodes, max(1, logits.shape[1]), root_tokens)
    # A scorer's probabilities are about the listed candidates: a longer list is no answer there.
    may_grow = scorer is None and logits.shape[1] > 0 and trellis.token_ids.shape[2] < logits.shape[2]
    return replace(trees, last_rank_used=_uses_last_rank(trellis, order, num_nodes)) if may_grow else trees


def check_search(policy: str, has_curve: bool, has_scorer: bool, has_roots: bool) -> None:
    """Raise PolicyError for a combination that `search_on_device` cannot run."""
    if policy not in RULES:
        raise PolicyError(f"policy is {policy!r}; on a device allowed are {', '.join(RULES)}")
    if policy != "fixed" and not has_curve:
        raise PolicyError(f"policy {policy!r} needs round_seconds")
    if has_scorer and not has_roots:
        raise PolicyError("a scorer needs root_tokens: it looks at the parent of every candidate")


def _uses_last_rank(trellis: DeviceTrellis, order: DeviceOrder, num_nodes: Tensor) -> Tensor:
    """(R,) bool, whether a listed candidate of the lowest rank is among the first `num_nodes` of an order."""
    last = trellis.token_ids[:, :, -1]  # columns fall in probability
    is_last = order.token_ids == last.gather(1, order.depths.clamp(min=1) - 1)
    taken = torch.arange(order.token_ids.shape[1], device=num_nodes.device) < num_nodes.unsqueeze(1)
    return (is_last & taken).any(1)
