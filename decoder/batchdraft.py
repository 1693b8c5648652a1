"""Drafting for a batch of requests at one context, with any block size a drafter can be timed at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decoder.drafters.base import Drafter
from decoder.drafters.dflash import ContextCache, DFlashDrafter


class BatchDrafts:
    """Drafts of one drafter for r requests: one pass for all where it is a DFlash drafter, else r calls in a row."""

    def __init__(self, drafter: Drafter, num_requests: int = 1) -> None:
        self.drafter, self.num_requests = drafter, num_requests
        self.drafter.start()
        self.length = 0
        self.joint = isinstance(drafter, DFlashDrafter) and num_requests > 1
        if isinstance(drafter, DFlashDrafter) and num_requests > 1:
            self.cache = ContextCache(len(drafter.model.layers), num_requests)

    @torch.inference_mode()
    def extend(self, features: torch.Tensor, once: bool = False) -> None:
        """Take over the features (n, F) of committed tokens, the same for every request.

        `once` computes them for one request and copies (for preparing a long context, not for timing).
        """
        if self.joint:
            assert isinstance(self.drafter, DFlashDrafter)
            rows = features[None] if once else features.repeat(self.num_requests, 1, 1)
            positions = torch.arange(self.length, self.length + len(features), device=features.device)
            for layer, (keys, values) in enumerate(self.drafter.model.context(rows, positions.expand(len(rows), -1))):
                self.cache.append(layer, keys, values)
            self.cache.length += len(features)
        else:
            self.drafter.extend(features)
        self.length += len(features)

    @torch.inference_mode()
    def draft(self, root_tokens: list[int], block_size: int = 0) -> list[torch.Tensor]:
        """Logits (block_size - 1, vocab) for every request; `block_size` 0 is the drafter's own."""
        with block_of(self.drafter, block_size or self.drafter.block_size):
            if self.joint:
                assert isinstance(self.drafter, DFlashDrafter)
                return list(self.drafter.draft_rows(root_tokens, self.cache))
            return [self.drafter.draft(root, self.length) for root in root_tokens]


def other_block_sizes(drafter: Drafter) -> tuple[int, ...]:
    """Block sizes beside its own at which a drafter can be timed: half of it and twice of it for DFlash, else none."""
    if not isinstance(drafter, DFlashDrafter):
        return ()
    own = drafter.block_size
    return (own // 2, 2 * own) if own >= 4 else (2 * own,)


@contextmanager
def block_of(drafter: Any, block_size: int) -> Iterator[None]:
    """Let a drafter draft blocks of another size: what they cost does not depend on what it was trained for."""
    own = drafter.block_size
    if block_size == own:
        yield
        return
    drafter.block_size = block_size
    try:
        yield
    finally:
        drafter.block_size = own
