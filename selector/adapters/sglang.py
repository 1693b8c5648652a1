"""SGLang's layout of draft trees in a batch: linked first children and siblings, positions, and three kinds of mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.adapters.arrays import tree_from_parents
from selector.adapters.errors import AdapterError
from selector.tree import DraftTree

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2
PACKED_DTYPES = ((8, "<u1"), (16, "<u2"), (32, "<u4"))


@dataclass(frozen=True, eq=False)
class SglangBatch:
    """Trees of `bs` requests, D slots each (sglang 0.5.23, srt/speculative/eagle_utils.py; names as in its Python).

    Slots beyond a tree are padding: token `pad_token`, position of depth 1, seeing the root and themselves, and linked
    to by no slot, so that verification never accepts them.

    Attributes:
        draft_token: (bs * D,) int64. positions: (bs * D,) int64, sequence length + depth.
        retrieve_index: (bs, D) int64, b * D + i.
        retrieve_next_token: (bs, D) int64, the first child's slot, -1 for a leaf.
        retrieve_next_sibling: (bs, D) int64, -1 for the last.
        seq_lens: (bs,) int64, committed tokens.
        masks: (bs, D, D) bool, ancestors and self; `tree_mask` lays it out as the engine wants it.
    """

    draft_token: NDArray[np.int64]
    positions: NDArray[np.int64]
    retrieve_index: NDArray[np.int64]
    retrieve_next_token: NDArray[np.int64]
    retrieve_next_sibling: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    masks: NDArray[np.bool_]

    @property
    def num_draft_tokens(self) -> int:
        """Slots per request, D; the root counts."""
        return int(self.retrieve_index.shape[1])

    def tree_mask(self, mode: int = FULL_MASK) -> NDArray[np.generic]:
        """The mask in one of SGLang's modes.

        FULL_MASK: flat bool; per request D rows of (sequence length + D), the committed part all True.
        QLEN_ONLY: flat bool, bs * D * D. QLEN_ONLY_BITPACKING: (bs * D,) little-endian words, bit j of row i set where
        slot i sees slot j; uint8, 16 or 32 for D up to 8, 16 or 32. Raises AdapterError for a larger D or another mode.
        """
        if mode == QLEN_ONLY:
            return self.masks.reshape(-1)
        if mode == FULL_MASK:
            ones = [np.ones((self.num_draft_tokens, length), bool) for length in self.seq_lens.tolist()]
            rows = [np.concatenate(pair, axis=1).reshape(-1) for pair in zip(ones, self.masks, strict=True)]
            return np.concatenate(rows) if rows else np.zeros(0, bool)
        if mode != QLEN_ONLY_BITPACKING:
            raise AdapterError(f"mask mode is {mode}, allowed are 0 (FULL_MASK), 1 (QLEN_ONLY), 2 (QLEN_ONLY_BITPACKING)")
        for bits, dtype in PACKED_DTYPES:
            if self.num_draft_tokens <= bits:
                weights = np.left_shift(np.uint64(1), np.arange(self.num_draft_tokens, dtype=np.uint64))
                return (self.masks * weights).sum(axis=2, dtype=np.uint64).astype(dtype).reshape(-1)  # type: ignore[no-any-return]
        raise AdapterError(
            f"a bit-packed mask holds 32 slots at most, got {self.num_draft_tokens}", hint="use QLEN_ONLY, or at most 31 nodes"
        )


def from_trees(
    trees: Sequence[DraftTree], seq_lens: ArrayLike, num_draft_tokens: int | None = None, pad_token: int = 0
) -> SglangBatch:
    """Lay out one tree per request.

    Args:
        trees: with their root's token in slot 0. seq_lens: (bs,) committed tokens, the root not among them.
        num_draft_tokens: D; default the largest tree's number of verify tokens.

    Raises AdapterError if a tree has more slots than D.
    """
    lengths = np.array(seq_lens, np.int64).reshape(-1)
    if len(lengths) != len(trees):
        raise AdapterError(f"{len(trees)} trees need as many seq_lens, got {len(lengths)}")
    largest = max((tree.num_verify_tokens for tree in trees), default=1)
    size = largest if num_draft_tokens is None else int(num_draft_tokens)
    if largest > size:
        raise AdapterError(f"a tree of {largest} verify tokens (root included) does not fit num_draft_tokens {size}")
    bs = len(trees)
    tokens, depths = np.full((bs, size), pad_token, np.int64), np.ones((bs, size), np.int64)
    child, sibling = np.full((bs, size), -1, np.int64), np.full((bs, size), -1, np.int64)
    masks = np.broadcast_to(np.eye(size, dtype=bool), (bs, size, size)).copy()
    masks[:, :, 0] = True
    for b, tree in enumerate(trees):
        t = tree.num_verify_tokens
        tokens[b, :t], depths[b, :t] = tree.token_ids, tree.depths
        masks[b, :t, :t] = tree.attention_mask()
        _link(tree.parents, child[b], sibling[b])
    index = np.arange(bs * size, dtype=np.int64).reshape(bs, size)
    positions = (lengths[:, None] + depths).reshape(-1)
    return SglangBatch(tokens.reshape(-1), positions, index, child, sibling, lengths, masks)


def _link(parents: NDArray[np.int32], child: NDArray[np.int64], sibling: NDArray[np.int64]) -> None:
    """Fill the links of one tree: the first child has the lowest slot, siblings follow by slot."""
    for slot in range(len(parents) - 1, 0, -1):
        parent = parents[slot]
        sibling[slot], child[parent] = child[parent], slot


def from_tree(tree: DraftTree, seq_len: int, num_draft_tokens: int | None = None, pad_token: int = 0) -> SglangBatch:
    """A batch of one request; as `from_trees`."""
    return from_trees([tree], [seq_len], num_draft_tokens, pad_token)


def to_tree(batch: SglangBatch, request: int = 0) -> DraftTree:
    """The tree of one request, read off the links; padding is what no link leads to.

    Raises AdapterError if the links meet a slot twice, leave a gap before the last slot reached, or contradict positions,
    or for a request that the batch does not hold.
    """
    size = batch.num_draft_tokens
    if not 0 <= request < len(batch.seq_lens):
        raise AdapterError(f"request is {request}, the batch holds 0 to {len(batch.seq_lens) - 1}")
    child, sibling = batch.retrieve_next_token[request].tolist(), batch.retrieve_next_sibling[request].tolist()
    parents = np.full(size, -2, np.int64)
    parents[0] = -1
    waiting = [0]
    while waiting:
        parent = waiting.pop()
        slot = child[parent]
        while slot != -1:
            if not 0 <= slot < size or parents[slot] != -2:
                raise AdapterError(f"request {request}: the links lead to slot {slot} twice, or outside of {size} slots")
            parents[slot] = parent
            waiting.append(slot)
            slot = sibling[slot]
    t = int((parents > -2).sum())
    if (parents[:t] == -2).any():
        raise AdapterError(f"request {request}: slot {int(np.flatnonzero(parents == -2)[0])} is linked by none, later ones are")
    rows = slice(request * size, request * size + t)
    tree = tree_from_parents(batch.draft_token[rows], parents[:t])
    expected = tree.position_ids(int(batch.seq_lens[request]))
    if not np.array_equal(batch.positions[rows], expected):
        found = batch.positions[rows].tolist()
        raise AdapterError(f"request {request}: positions {found} contradict the links, which say {expected.tolist()}")
    return tree


def to_trees(batch: SglangBatch) -> list[DraftTree]:
    """The trees of all requests."""
    return [to_tree(batch, request) for request in range(len(batch.seq_lens))]
