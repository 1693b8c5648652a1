"""DDTree's tree: nodes without the root, parents with it, child maps and visibility; and a drop-in for its builder."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from selector.adapters.arrays import as_kind_of, host_array, require_equal, tree_from_parents
from selector.adapters.errors import AdapterError
from selector.search.growing import expand_logits
from selector.tree import DraftTree


class DDTreeArrays(NamedTuple):
    """What `build_ddtree_tree` of github.com/liranringel/ddtree returns, in its order.

    Attributes:
        node_token_ids, node_depths: (n,) int64, the root not among them; depth 1 is the root's children.
        parents: n + 1 slots, -1 for the root. child_maps: per slot {token: slot of the child}.
        visibility: (n + 1, n + 1) bool, ancestors and self.
    Arrays are torch tensors on the processor where the caller's logits were a tensor, else numpy.
    """

    node_token_ids: Any
    node_depths: Any
    parents: list[int]
    child_maps: list[dict[int, int]]
    visibility: Any


def from_tree(tree: DraftTree, like: Any = None) -> DDTreeArrays:
    """The tree in DDTree's form; arrays are of the kind (numpy or torch) of `like`."""
    child_maps: list[dict[int, int]] = [{} for _ in range(tree.num_verify_tokens)]
    parents = tree.parents.tolist()
    for slot, (parent, token) in enumerate(zip(parents[1:], tree.token_ids[1:].tolist(), strict=True), start=1):
        child_maps[parent][token] = slot
    return DDTreeArrays(
        as_kind_of(tree.token_ids[1:].copy(), like, same_device=False),
        as_kind_of(tree.depths[1:].astype(np.int64), like, same_device=False),
        parents,
        child_maps,
        as_kind_of(tree.attention_mask(), like, same_device=False),
    )


def to_tree(arrays: DDTreeArrays, root_token: int = -1) -> DraftTree:
    """The tree of DDTree's arrays (they do not name the root's token). Raises AdapterError if they contradict each other."""
    tokens = np.concatenate([[root_token], host_array(arrays.node_token_ids, np.int64)])
    tree = tree_from_parents(tokens, arrays.parents)
    require_equal("node_depths", arrays.node_depths, tree.depths[1:].astype(np.int64))
    require_equal("visibility", arrays.visibility, tree.attention_mask())
    if len(arrays.child_maps) != tree.num_verify_tokens:
        raise AdapterError(f"child_maps hold {len(arrays.child_maps)} slots, the tree {tree.num_verify_tokens}")
    for slot, children in enumerate(from_tree(tree).child_maps):
        if arrays.child_maps[slot] != children:
            raise AdapterError(f"child_maps[{slot}] contradicts the parents: {arrays.child_maps[slot]}, not {children}")
    return tree


def build_ddtree_tree(draft_logits: Any, budget: int) -> DDTreeArrays:
    """Drop-in for the public builder: the `budget` nodes of highest reach over the whole vocabulary.

    Args:
        draft_logits: (depth, vocab), numpy or torch. budget: nodes, the root not counted.

    Equal reaches are ordered as `selector.search.expansion` says, where the public code goes by ranks; sums of reach are equal.
    """
    if budget <= 0 or len(draft_logits) == 0:
        return from_tree(DraftTree.root_only(), draft_logits)
    _, expansion = expand_logits(draft_logits, budget)
    return from_tree(DraftTree.from_expansion(expansion, "budget"), draft_logits)

