"""CaDDTree's tree: DDTree's arrays and the number of nodes; and a drop-in for its builder that reads its cost model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selector.adapters import ddtree
from selector.adapters.arrays import require_equal
from selector.errors import PolicyError
from selector.policies import is_flat
from selector.search.growing import expand_logits
from selector.search.kernels import EXACT, FIRST_DESCENT
from selector.tree import DraftTree

RULES = {"exact": EXACT, "unimodal": FIRST_DESCENT}


class CaDDTreeArrays(NamedTuple):
    """What `build_caddtree_tree` of github.com/ZhangShuai1230/CaDDTree returns: `DDTreeArrays` and the budget."""

    node_token_ids: Any
    node_depths: Any
    parents: list[int]
    child_maps: list[dict[int, int]]
    visibility: Any
    budget: int


def from_tree(tree: DraftTree, like: Any = None) -> CaDDTreeArrays:
    """The tree in CaDDTree's form; arrays are of the kind (numpy or torch) of `like`."""
    return CaDDTreeArrays(*ddtree.from_tree(tree, like), tree.num_nodes)


def to_tree(arrays: CaDDTreeArrays, root_token: int = -1) -> DraftTree:
    """The tree of CaDDTree's arrays. Raises AdapterError if they contradict each other."""
    tree = ddtree.to_tree(ddtree.DDTreeArrays(*arrays[:5]), root_token)
    require_equal("budget", arrays.budget, np.asarray(tree.num_nodes))
    return tree


def round_curve(cost_model: Any, context_length: int, max_budget: int) -> NDArray[np.float64]:
    """(max_budget + 1,) round costs by nodes, from our cost model (`round_seconds`) or theirs (`Cd`, `Cv(nodes, context)`)."""
    if hasattr(cost_model, "round_seconds"):
        return np.array(cost_model.round_seconds(max_budget + 1, context_length), np.float64)
    verify = [float(cost_model.Cv(nodes, context_length)) for nodes in range(max_budget + 1)]
    return float(cost_model.Cd) + np.array(verify)


def build_caddtree_tree(
    draft_logits: Any, cost_model: Any, context_length: int, max_budget: int = 1024, policy: str = "exact"
) -> CaDDTreeArrays:
    """Drop-in for the public builder.

    Args:
        draft_logits: (depth, vocab), numpy or torch. cost_model: theirs or ours. context_length: committed tokens.
        max_budget: largest number of nodes.
        policy: "exact" looks past the first fall of (1 + Phi) / cost as far as a larger tree can win; "unimodal" stops
            there, as the public code does (arXiv 2606.01813, optimal if the cost is convex).

    On a flat curve, which cannot size a tree, as many nodes as the draft is deep. Raises PolicyError for another policy.
    """
    if policy not in RULES:
        raise PolicyError(f"policy is {policy!r}, allowed are {', '.join(RULES)}")
    if len(draft_logits) == 0 or max_budget <= 0:
        return from_tree(DraftTree.root_only(), draft_logits)
    curve = round_curve(cost_model, context_length, max_budget)
    if is_flat(curve):
        _, expansion = expand_logits(draft_logits, min(max_budget, len(draft_logits)))
    else:
        _, expansion = expand_logits(draft_logits, max_budget, RULES[policy], curve)
    return from_tree(DraftTree.from_expansion(expansion, policy), draft_logits)
