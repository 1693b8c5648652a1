"""One round's verification: a target forward over the tree's slots and the walk that accepts a path of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decoder.cache import TreeCache
from decoder.sampling import TokenChooser
from decoder.target import Target


@dataclass(frozen=True)
class Verified:
    """A verified tree: the accepted `slots` (root first), the tokens the round commits, the features of the slots.

    `token_ids` are the accepted nodes' tokens and then the bonus token, which is the next root; `logits` (t, vocab) those of
    all slots.
    """

    slots: list[int]
    token_ids: list[int]
    features: torch.Tensor | None
    logits: torch.Tensor

    @property
    def num_accepted(self) -> int:
        """Accepted nodes; the root does not count."""
        return len(self.slots) - 1


@dataclass(frozen=True)
class RootTree:
    """The tree of a plain step: the root alone."""

    num_nodes: int = 0

    def child_with_token(self, slot: int, token: int) -> int:
        """A root has no children: -1."""
        return -1


def accept(tree: Any, logits: torch.Tensor, chooser: TokenChooser) -> tuple[list[int], list[int]]:
    """Walk the tree from the root while the target's own token is a drafted child.

    Returns the visited slots and the target's token at each. At temperature 0 that is the text plain decoding gives; above
    it, every emitted token is a draw from the target's distribution given the tokens before, whatever was drafted.
    """
    return walk(tree, chooser.prepare(logits).token)


def walk(tree: Any, token_at: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """The visited slots and the token at each; `token_at(slot)` is asked for visited slots only, once and in order."""
    slots, tokens, slot = [], [], 0
    while slot >= 0:
        slots.append(slot)
        tokens.append(token_at(slot))
        slot = int(tree.child_with_token(slot, tokens[-1]))
    return slots, tokens


def verify_tree(target: Target, cache: TreeCache, tree: Any, root_token: int, chooser: TokenChooser) -> Verified:
    """Forward all slots of `tree` behind the cache and walk; the cache still has to be told to commit the slots."""
    if tree.num_nodes == 0:
        output = target.forward([root_token], [cache.length], cache)
    else:
        token_ids = np.array(tree.token_ids, dtype=np.int64)
        token_ids[0] = root_token
        output = target.forward(token_ids, tree.position_ids(cache.length), cache, tree.attention_mask())
    slots, tokens = accept(tree, output.logits, chooser)
    features = output.features
    if features is not None and len(slots) < features.shape[0]:
        features = features[slots]
    return Verified(slots, tokens, features, output.logits)
