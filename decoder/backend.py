"""The transformers engine as the profiler sees it: the live loop's own target, drafter, selector and cache, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from costmodel import CostModel
from decoder.batchdraft import BatchDrafts, other_block_sizes
from decoder.batchverify import TreeSource, random_tree, verify_trees
from decoder.drafters.base import Drafter
from decoder.errors import TargetError, UsageError
from decoder.graphs import DEFAULT_SIZES, CapturedForwards
from decoder.identity import target_identity
from decoder.parallel import FirstRank, follow, join_ranks, rank_of
from decoder.sampling import Sampling, TokenChooser
from decoder.target import Target
from decoder.verify import RootTree, verify_tree
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET
from selector import DraftTree, TreeSelector

__all__ = ["TransformersBackend", "random_tree"]

TOKENS_PER_ROUND = 2  # tokens whose features a timed draft takes over first, as a typical live round does


class TransformersBackend:
    """Implements `costmodel.backend.Backend` for batches of requests of one context, on CPU or CUDA, eager or captured.

    Each call runs what the live loop runs for that stage: `verify` includes the mask, the output head and the walk, `draft`
    the drafter's take-over of a round's features, `select` the way from logits to tree. The rows it returns are counted
    where the layers run, not taken from what was asked.
    """

    def __init__(self, target: str | Target = DEFAULT_TARGET, drafter: str | Drafter | None = DEFAULT_DRAFTER,
                 dtype: str = DEFAULT_DTYPE, device: str = "cpu", threads: int | None = None, linear: str = "auto",
                 random_weights: bool = False, seed: int = 0, tensor_parallel: int = 1, mode: str = "eager",
                 captured_sizes: Sequence[int] | None = None) -> None:
        if mode not in ("eager", "captured"):
            raise UsageError(f"unknown mode {mode!r}: allowed are eager and captured")
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(target, str):
            device = join_ranks(tensor_parallel, device)
        torch.manual_seed(seed)  # random weights are the same on every rank
        self.target = target if isinstance(target, Target) else Target.load(
            target, dtype=dtype, device=device, linear=linear, random_weights=random_weights, tensor_parallel=tensor_parallel)
        self.drafter = self._load_drafter(drafter)
        self.target.set_feature_layers(() if self.drafter is None else self.drafter.feature_layers)
        self.captured = CapturedForwards(self.target, captured_sizes or DEFAULT_SIZES) if mode == "captured" else None
        self.identity = target_identity(self.target, self.drafter, mode)
        self.random = np.random.default_rng(seed)
        self.chooser = TokenChooser(Sampling())
        max_depth = 7 if self.drafter is None else self.drafter.block_size - 1
        self.source = TreeSource(max_depth, self.target.shape["vocab"], self.random)
        self.tokens = self.random.integers(0, self.target.shape["vocab"], 64)
        self.whole = self.target.new_cache()
        self.features: torch.Tensor | None = None
        self.cache = self.target.new_cache()
        self.verify_token_ids: np.ndarray | None = None
        self._drafted_in_a_row = False
        self._next: tuple[int, list[DraftTree]] | None = None
        self._selectors: dict[int, TreeSelector] = {}

    def _load_drafter(self, drafter: str | Drafter | None) -> Drafter | None:
        if drafter is None or not isinstance(drafter, str):
            return drafter
        from decoder.drafters.registry import load_drafter

        return load_drafter(drafter, self.target)

    @property
    def num_target_forwards(self) -> int:
        """Forwards of the target's layers so far, replayed ones included."""
        return self.target.num_forwards + (0 if self.captured is None else self.captured.num_replays)

    @property
    def executable_verify_tokens(self) -> tuple[int, ...] | None:
        """The sizes that were captured; None in eager mode, which runs any."""
        return None if self.captured is None else tuple(self.captured.sizes)

    @property
    def draft_block_sizes(self) -> tuple[int, ...]:
        """Block sizes beside the drafter's own at which drafting can be timed."""
        return () if self.drafter is None else other_block_sizes(self.drafter)

    @property
    def notes(self) -> list[str]:
        """What a profile of this backend should say about how it ran."""
        if self.drafter is None or not self._drafted_in_a_row:
            return []
        return [f"drafter {self.drafter.name} has no batched form: drafts of r requests are r calls in a row"]

    @property
    def num_requests(self) -> int:
        """Requests of the prepared batch."""
        return self.cache.num_requests

    @torch.inference_mode()
    def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
        """A cache (and a drafter's cache) of that many random tokens for every request."""
        limit = self.target.max_context_tokens
        if context_tokens > limit:
            raise UsageError(f"context {context_tokens} is beyond what {self.target.name} can look back on, {limit} tokens",
                             hint="lower --max-context or --context")
        try:
            self._prepare(context_tokens, num_requests)
        except torch.OutOfMemoryError as error:
            raise TargetError(f"{num_requests} requests of {context_tokens} tokens do not fit into the device's memory",
                              hint="lower --max-context (or --context) or --batch") from error

    def _prepare(self, context_tokens: int, num_requests: int) -> None:
        self._extend_whole(context_tokens)
        if num_requests != self.cache.num_requests:
            self.cache = self.target.new_cache(1)  # lets go of the old buffers first
            if self.captured is not None:
                self.captured.forget()
            self.cache = self.target.new_cache(context_tokens + 1024, num_requests)
        self.cache.copy_prefix(self.whole, context_tokens)
        if self.cache.store.keys is None:
            trees = self.source.trees(1, num_requests)  # a forward allocates, so that a commit finds buffers
            verify_trees(self.target, self.cache, trees, self.chooser)
        if self.drafter is not None:
            self.drafts = BatchDrafts(self.drafter, num_requests)
            self._drafted_in_a_row |= num_requests > 1 and not self.drafts.joint
            self._extend_drafter(context_tokens, once=True)
            self.logits = self._draft(0)

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

    def _extend_drafter(self, num_tokens: int, once: bool = False) -> None:
        if self.drafter is None or self.drafter.feature_layers == () or self.features is None:
            return
        rows = torch.arange(num_tokens) % len(self.features)
        self.drafts.extend(self.features[rows.to(self.features.device)], once)

    def _draft(self, block_size: int) -> list[torch.Tensor]:
        return self.drafts.draft([int(self.tokens[0])] * self.num_requests, block_size)

    def _slots(self, num_verify_tokens: int) -> int:
        """Slots of every request's tree; captured graphs pad up to the next size."""
        requests = self.num_requests
        if self.captured is not None:
            return self.captured.padded(num_verify_tokens, requests) // requests
        if num_verify_tokens < requests or num_verify_tokens % requests:
            raise UsageError(f"{num_verify_tokens} verify tokens cannot be shared evenly by {requests} requests")
        return num_verify_tokens // requests

    @torch.inference_mode()
    def make_ready(self, stage: str, size: int) -> None:
        """Draw the trees that are verified next and capture their graph, before the clock starts."""
        if stage != "verify":
            return
        slots = self._slots(size)
        if self.captured is not None:
            self.captured.make_ready(slots, self.cache)
        self._next = (size, self.source.trees(slots, self.num_requests))

    @torch.inference_mode()
    def verify(self, num_verify_tokens: int) -> int:
        """Forward random trees of that many slots in all and walk them, nothing is committed; returns the rows executed."""
        if self._next is None or self._next[0] != num_verify_tokens:
            self.make_ready("verify", num_verify_tokens)
        assert self._next is not None
        trees, self._next = self._next[1], None
        rows = self._run(trees)
        self.verify_token_ids = np.concatenate([tree.token_ids for tree in trees])
        return rows

    def _run(self, trees: list[DraftTree]) -> int:
        before = self.target.num_rows
        if self.captured is not None:
            verify_trees(self.target, self.cache, trees, self.chooser, self.captured.forward)
            return sum(tree.num_verify_tokens for tree in trees)  # what the graph that was replayed holds
        if len(trees) == 1:
            tree: Any = trees[0] if trees[0].num_nodes else RootTree()
            verify_tree(self.target, self.cache, tree, int(trees[0].token_ids[0]), self.chooser)
        else:
            verify_trees(self.target, self.cache, trees, self.chooser)
        return self.target.num_rows - before

    @torch.inference_mode()
    def draft(self, block_size: int = 0) -> int:
        """Take over a round's features and draft once for every request; returns the block size, 0 without a drafter.

        `block_size` 0 is the drafter's own. The drafter's context grows a little.
        """
        if self.drafter is None:
            return 0
        self._extend_drafter(TOKENS_PER_ROUND)
        logits = self._draft(block_size)
        if not block_size:
            self.logits = logits
        return int(logits[0].shape[0]) + 1

    @torch.inference_mode()
    def select(self, num_nodes: int) -> int:
        """From the last draft's logits to trees of at most that many nodes in all; returns their nodes."""
        if self.drafter is None:
            return 0
        share, rest = divmod(num_nodes, self.num_requests)
        total = 0
        for request, logits in enumerate(self.logits):
            nodes = share + (request < rest)
            if nodes or self.num_requests == 1:
                total += int(self._selector(nodes).select(logits, self.cache.length, root_token=int(self.tokens[0])).num_nodes)
        return total

    def _selector(self, num_nodes: int) -> TreeSelector:
        if num_nodes not in self._selectors:
            cost = CostModel.from_points([1, 2, 1024], [1.0, 1.01, 11.0])
            self._selectors[num_nodes] = TreeSelector(cost, policy=f"fixed:{num_nodes}", max_nodes=max(num_nodes, 1))
        return self._selectors[num_nodes]

    @torch.inference_mode()
    def commit(self, num_tokens: int) -> int:
        """Commit that many slots of every request's forwarded tree, so that all but the root move, and undo it."""
        store = self.cache.store
        slots = [2 * place for place in range(num_tokens)]
        store.reserve(store.length + slots[-1] + 2)
        store.written = store.length + slots[-1] + 2
        if self.num_requests == 1:
            self.cache.commit(slots)
        else:  # every request its own path
            self.cache.commit_each([[0, *(slot + request % 2 for slot in slots[1:])] for request in range(self.num_requests)])
        self.cache.undo(num_tokens)
        return num_tokens

    def synchronize(self) -> None:
        """Wait for the device."""
        self.target.synchronize()

    @property
    def rank(self) -> int:
        """Which of the tensor-parallel processes this is."""
        return rank_of(self.target.tensor_parallel)

    def lead(self) -> FirstRank:
        """On rank 0 of a tensor-parallel target: the backend that makes every rank run what this one times."""
        return FirstRank(self)

    def follow(self) -> None:
        """On every other rank: run what rank 0 times, until it is done."""
        follow(self)
