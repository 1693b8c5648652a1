"""BASTION's tree draft: tokens, parents, depths and mask with the root in slot 0, and one row of slots per leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.adapters.arrays import as_kind_of, require_equal, tree_from_parents
from selector.tree import DraftTree


@dataclass(frozen=True)
class TreeDraft:
    """The fields of `TreeDraft` of github.com/kaist-ai-osi-lab/BASTION (arXiv 2605.29727).

    Attributes:
        token_ids, parent_indices, depths: (t,) int64, slot 0 the root with parent -1 and depth 0.
        tree_mask: (t, t) bool, ancestors and self.
        retrieve_indices: (leaves, deepest + 1) int64 slots from the root to every leaf, leaves by slot, -1 pads.
        path_lens: (leaves,) int64, slots of every such path, the root among them.
    """

    token_ids: Any
    parent_indices: Any
    depths: Any
    tree_mask: Any
    retrieve_indices: Any
    path_lens: Any


def leaf_paths(tree: DraftTree) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`retrieve_indices` and `path_lens` of a tree."""
    is_leaf = np.ones(tree.num_verify_tokens, bool)
    is_leaf[tree.parents[1:]] = False
    leaves = np.flatnonzero(is_leaf)
    paths = np.full((len(leaves), tree.max_depth + 1), -1, np.int64)
    rows: NDArray[Any] = np.arange(len(leaves))
    slots: NDArray[Any] = leaves
    while rows.size:
        paths[rows, tree.depths[slots]] = slots
        slots = tree.parents[slots]
        rows, slots = rows[slots >= 0], slots[slots >= 0]
    return paths, tree.depths[leaves].astype(np.int64) + 1


def from_tree(tree: DraftTree, like: Any = None) -> TreeDraft:
    """The tree in BASTION's form; arrays are of the kind and on the device of `like`, as the public code has them."""
    paths, lengths = leaf_paths(tree)
    arrays = (tree.token_ids.copy(), tree.parents.astype(np.int64), tree.depths.astype(np.int64), tree.attention_mask())
    return TreeDraft(*(as_kind_of(array, like) for array in (*arrays, paths, lengths)))


def to_tree(draft: TreeDraft) -> DraftTree:
    """The tree of a tree draft. Raises AdapterError if its arrays contradict each other."""
    tree = tree_from_parents(draft.token_ids, draft.parent_indices)
    paths, lengths = leaf_paths(tree)
    require_equal("depths", draft.depths, tree.depths.astype(np.int64))
    require_equal("tree_mask", draft.tree_mask, tree.attention_mask())
    require_equal("retrieve_indices", draft.retrieve_indices, paths)
    require_equal("path_lens", draft.path_lens, lengths)
    return tree
