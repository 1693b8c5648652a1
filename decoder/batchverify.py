"""Random trees for a batch of requests, and their verification in one forward with a walk for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from decoder.cache import TreeCache
from decoder.sampling import TokenChooser
from decoder.target import Target, TargetOutput
from decoder.verify import walk
from selector import DraftTree

Forward = Callable[[torch.Tensor, torch.Tensor, TreeCache, "torch.Tensor | None"], TargetOutput]


def random_tree(num_slots: int, max_depth: int, vocab: int, random: np.random.Generator) -> DraftTree:
    """A tree of `num_slots` slots, root included, at most `max_depth` deep, leaning to early slots as drafted trees do."""
    parents, depths = np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.int32)
    for slot in range(1, num_slots):
        parent = int(slot * random.random() ** 1.5)
        while depths[parent] >= max_depth:
            parent = int(parents[parent])
        parents[slot], depths[slot] = parent, depths[parent] + 1
    token_ids = random.integers(0, vocab, num_slots)
    return DraftTree(token_ids.astype(np.int64), parents, depths, np.power(0.5, depths.astype(float)), status="budget")


class TreeSource:
    """Trees of every size asked for: their forms are drawn once per size and batch, their token ids anew every time.

    New ids every time, since on a mixture of experts what a forward reads depends on them.
    """

    def __init__(self, max_depth: int, vocab: int, random: np.random.Generator) -> None:
        self.max_depth, self.vocab, self.random = max_depth, vocab, random
        self._forms: dict[tuple[int, int], list[DraftTree]] = {}

    def trees(self, num_slots: int, num_requests: int) -> list[DraftTree]:
        """`num_requests` trees of `num_slots` slots each."""
        key = (num_slots, num_requests)
        if key not in self._forms:
            self._forms[key] = [random_tree(num_slots, self.max_depth, self.vocab, self.random) for _ in range(num_requests)]
        return [replace(form, token_ids=self.random.integers(0, self.vocab, num_slots)) for form in self._forms[key]]


def verify_trees(target: Target, cache: TreeCache, trees: Sequence[DraftTree], chooser: TokenChooser,
                 forward: Forward | None = None) -> list[list[int]]:
    """Forward r trees of equally many slots behind a cache of r requests, and walk each; returns the accepted slots.

    `forward` runs (ids, positions, cache, mask) as `Target.forward_batch` does, which it is by default.
    """
    ids = torch.from_numpy(np.stack([tree.token_ids for tree in trees]))
    positions = torch.from_numpy(np.stack([tree.position_ids(cache.length) for tree in trees]))
    mask = batch_mask(trees, cache.length, target.device)
    output = (forward or target.forward_batch)(ids.to(target.device), positions.to(target.device), cache, mask)
    choice = chooser.prepare(output.logits)
    slots = trees[0].num_verify_tokens
    return [walk(tree, lambda slot, first=request * slots: choice.token(first + slot))[0]  # type: ignore[misc]
            for request, tree in enumerate(trees)]


def batch_mask(trees: Sequence[DraftTree], context_tokens: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """Who sees what: (r, 1, t, context + t) boolean; None for roots alone, which see everything."""
    if trees[0].num_verify_tokens == 1:
        return None
    own = torch.from_numpy(np.stack([tree.attention_mask() for tree in trees]))[:, None].to(device)  # (r, 1, t, t)
    return torch.cat([own.new_ones((*own.shape[:3], context_tokens)), own], dim=3)
