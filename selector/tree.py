"""The draft tree of one round: what the target verifies in one forward pass. Slot 0 is the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from selector.search.expansion import Expansion


@njit(cache=True)
def _ancestor_mask(parents):
    t = parents.shape[0]
    mask = np.zeros((t, t), np.bool_)
    for i in range(t):
        if parents[i] >= 0:
            mask[i, :i] = mask[parents[i], :i]
        mask[i, i] = True
    return mask


@njit(cache=True)
def _walk(token_ids, parents, target_tokens):
    """Slots of the accepted path, root first: a child is accepted where it holds what the target says at its parent."""
    t = parents.shape[0]
    path = np.empty(t, np.int64)
    path[0] = 0
    length, slot = 1, 0
    for i in range(1, t):  # children lie behind their parents, so one sweep is enough
        if parents[i] == slot and token_ids[i] == target_tokens[slot]:
            path[length] = i
            length += 1
            slot = i
    return path[:length]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A prefix-closed tree of drafted tokens; parents come before their children.

    Attributes:
        token_ids: (t,) int64, slot 0 the root's token (-1 where it was not given).
        parents: (t,) int32 slots, -1 for the root. depths: (t,) int32, 0 for the root.
        reach: (t,) float64, Pr(the walk visits the slot); 1 for the root.
        status: what is known about the choice:
            "optimal"              no tree within the cost curve's range has a higher value;
            "truncated:max_nodes"  the best tree is the largest one allowed, or the budget asked for was cut to it;
            "truncated:top_k"      the K candidates listed per depth ran out: an unlisted one might have come before;
            "degenerate-cost"      the cost curve is flat, so the largest tree always looks best: measure the curve;
            "first-descent"        `unimodal` met the first size that is no better (optimal if the curve is convex);
            "budget"               a fixed number of nodes or a chain was asked for and taken;
            "threshold"            `taps` left out what is not useful enough;
            "exhausted"            the drafter proposed fewer nodes than were asked for;
            "plain"                no drafting was asked for;
            "given"                the tree came from elsewhere, nothing is known of the choice.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    reach: NDArray[np.float64]
    status: str = "optimal"
    expected_seconds: float | None = field(default=None, compare=False)  # what the cost curve says of this round

    @classmethod
    def from_expansion(
        cls, expansion: Expansion, status: str, root_token: int = -1, expected_seconds: float | None = None
    ) -> DraftTree:
        """The tree of the first `num_chosen` nodes of an expansion."""
        n = expansion.num_chosen
        token_ids, parents = np.empty(n + 1, np.int64), np.empty(n + 1, np.int32)
        depths, reach = np.empty(n + 1, np.int32), np.empty(n + 1, np.float64)
        token_ids[0], parents[0], depths[0], reach[0] = root_token, -1, 0, 1.0
        token_ids[1:], parents[1:] = expansion.token_ids[:n], expansion.parents[:n]
        depths[1:], reach[1:] = expansion.depths[:n], expansion.reach[:n]
        return cls(token_ids, parents, depths, reach, status, expected_seconds)

    @classmethod
    def root_only(cls, root_token: int = -1, status: str = "plain", expected_seconds: float | None = None) -> DraftTree:
        """The tree without nodes: verifying it is a plain step."""
        token_ids, parents = np.array([root_token], np.int64), np.array([-1], np.int32)
        return cls(token_ids, parents, np.zeros(1, np.int32), np.ones(1), status, expected_seconds)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes; the root is not counted."""
        return len(self.parents) - 1

    @property
    def num_verify_tokens(self) -> int:
        """Slots the target forwards: nodes and the root."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.depths.max())

    @cached_property
    def expected_tokens(self) -> float:
        """Tokens the round is expected to commit: 1 (the bonus token) plus the nodes' reaches."""
        return float(self.reach.sum())

    def position_ids(self, context_tokens: int) -> NDArray[np.int64]:
        """(t,) int64: context_tokens + depth of every slot."""
        return self.depths.astype(np.int64) + int(context_tokens)

    def attention_mask(self) -> NDArray[np.bool_]:
        """(t, t) bool: row i may see its ancestors and itself. (The committed context is visible to every slot.)"""
        return _ancestor_mask(self.parents)  # type: ignore[no-any-return]

    def walk(self, target_tokens: ArrayLike) -> NDArray[np.int64]:
        """Accepted slots, root first, given the target's own next token at every slot, `target_tokens` of shape (t,).

        The round commits `len(path)` tokens after the root's: the accepted nodes' and target_tokens[path[-1]].
        """
        tokens = np.ascontiguousarray(target_tokens, np.int64)
        if tokens.shape != self.token_ids.shape:
            raise ValueError(f"target_tokens must have shape {self.token_ids.shape}, got {tokens.shape}")
        return _walk(self.token_ids, self.parents, tokens)  # type: ignore[no-any-return]

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents[1:].tolist(), self.token_ids[1:].tolist(), strict=True)
        return {pair: slot for slot, pair in enumerate(pairs, start=1)}

    def child_with_token(self, slot: int, token: int) -> int:
        """The child of `slot` that holds `token`, or -1."""
        return self._children.get((int(slot), int(token)), -1)

    def children(self, slot: int) -> Sequence[int]:
        """Slots of the children of `slot`, in order of reach."""
        return np.flatnonzero(self.parents == slot).tolist()  # type: ignore[no-any-return]
