"""The transformers engine as the profiler sees it: the live loop's own target, drafter, selector and cache, stage by stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from costmodel import CostModel
from decoder.drafters.base import Drafter
from decoder.errors import UsageError
from decoder.identity import target_identity
from decoder.sampling import Sampling, TokenChooser
from decoder.target import Target
from decoder.verify import RootTree, verify_tree
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET
from selector import DraftTree, TreeSelector

TOKENS_PER_ROUND = 2  # tokens whose features a timed draft takes over first, as a typical live round does


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


class TransformersBackend:
    """Implements `costmodel.backend.Backend` for one request at a time, on CPU or CUDA.

    Each call runs what the live loop runs for that stage: `verify` includes the mask, the output head and the walk, `draft`
    the drafter's take-over of a round's features, `select` the way from logits to tree.
    """

    def __init__(self, target: str | Target = DEFAULT_TARGET, drafter: str | Drafter | None = DEFAULT_DRAFTER,
                 dtype: str = DEFAULT_DTYPE, device: str = "cpu", threads: int | None = None, linear: str = "auto",
                 random_weights: bool = False, seed: int = 0) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.target = target if isinstance(target, Target) else Target.load(
            target, dtype=dtype, device=device, linear=linear, random_weights=random_weights)
        self.drafter = self._load_drafter(drafter)
        self.target.set_feature_layers(() if self.drafter is None else self.drafter.feature_layers)
        self.identity = target_identity(self.target, self.drafter)
        self.random = np.random.default_rng(seed)
        self.chooser = TokenChooser(Sampling())
        self.max_depth = 7 if self.drafter is None else self.drafter.block_size - 1
        self.tokens = self.random.integers(0, self.target.shape["vocab"], 64)
        self.whole = self.target.new_cache()
        self.features: torch.Tensor | None = None
        self.cache = self.target.new_cache()
        self._selectors: dict[int, TreeSelector] = {}
        self._trees: dict[int, Any] = {}

    def _load_drafter(self, drafter: str | Drafter | None) -> Drafter | None:
        if drafter is None or not isinstance(drafter, str):
            return drafter
        from decoder.drafters.registry import load_drafter

        return load_drafter(drafter, self.target)

    @torch.inference_mode()
    def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
        """A cache (and a drafter's cache) of that many random tokens; raises UsageError for more than one request."""
        if num_requests != 1:
            raise UsageError(f"the transformers backend runs one request at a time, {num_requests} were asked for")
        self._extend_whole(context_tokens)
        self.cache.copy_prefix(self.whole, context_tokens)
        if self.cache.store.keys is None:
            self.verify(1)  # allocates, so that a commit finds buffers
        if self.drafter is not None:
            self.drafter.start()
            self.drafted_tokens = 0
            self._extend_drafter(context_tokens)
            self.logits = self._draft()

    def _extend_whole(self, context_tokens: int) -> None:
        """Forward what is still missing of the longest context asked for so far; shorter ones are copies of its start."""
        have = self.whole.length
        if context_tokens <= have:
            return
        more = max(0, context_tokens - len(self.tokens))
        self.tokens = np.concatenate([self.tokens, self.random.integers(0, self.target.shape["vocab"], more)])
        output = self.target.forward(self.tokens[have:context_tokens], np.arange(have, context_tokens), self.whole,
                                     logits_rows=slice(-1, None))
        self.whole.commit_first(context_tokens - have)
        if output.features is not None:
            self.features = output.features if self.features is None else torch.cat([self.features, output.features])

    def _extend_drafter(self, num_tokens: int) -> None:
        if self.drafter is None or self.drafter.feature_layers == () or self.features is None:
            return
        rows = torch.arange(num_tokens) % len(self.features)
        self.drafter.extend(self.features[rows.to(self.features.device)])
        self.drafted_tokens += num_tokens

    def _draft(self) -> torch.Tensor:
        assert self.drafter is not None
        return self.drafter.draft(int(self.tokens[0]), self.drafted_tokens)

    @torch.inference_mode()
    def verify(self, num_verify_tokens: int) -> int:
        """Forward a random tree of that many slots and walk it; nothing is committed."""
        verify_tree(self.target, self.cache, self._tree(num_verify_tokens), int(self.tokens[0]), self.chooser)
        return num_verify_tokens

    def _tree(self, num_slots: int) -> Any:
        """One tree per size, made before it is timed the first time."""
        if num_slots not in self._trees:
            vocab = self.target.shape["vocab"]
            self._trees[num_slots] = RootTree() if num_slots == 1 else random_tree(num_slots, self.max_depth, vocab, self.random)
        return self._trees[num_slots]

    @torch.inference_mode()
    def draft(self) -> int:
        """Take over a round's features and draft once; returns the block size. The drafter's context grows a little."""
        if self.drafter is None:
            return 0
        self._extend_drafter(TOKENS_PER_ROUND)
        self.logits = self._draft()
        return self.drafter.block_size

    @torch.inference_mode()
    def select(self, num_nodes: int) -> int:
        """From the last draft's logits to a tree of at most that many nodes; returns its nodes."""
        if self.drafter is None:
            return 0
        if num_nodes not in self._selectors:
            cost = CostModel.from_points([1, 2, 1024], [1.0, 1.01, 11.0])
            self._selectors[num_nodes] = TreeSelector(cost, policy=f"fixed:{num_nodes}", max_nodes=max(num_nodes, 1))
        return int(self._selectors[num_nodes].select(self.logits, self.cache.length, root_token=int(self.tokens[0])).num_nodes)

    @torch.inference_mode()
    def commit(self, num_tokens: int) -> int:
        """Commit every second slot of a forwarded tree, so that all but the root move, and undo it."""
        store = self.cache.store
        slots = [2 * place for place in range(num_tokens)]
        store.reserve(store.length + slots[-1] + 1)
        store.written = store.length + slots[-1] + 1
        self.cache.commit(slots)
        self.cache.undo(num_tokens)
        return num_tokens

    def synchronize(self) -> None:
        """Wait for the device."""
        self.target.synchronize()
