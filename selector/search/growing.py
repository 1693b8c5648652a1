"""From raw logits to nodes in order of reach, with a small top-k that grows only in the rows where it was too small."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from selector.policies import FixedShape, Policy, RoundInputs
from selector.search.expansion import Expansion, expand
from selector.search.kernels import BUDGET
from selector.taps import Taps
from selector.tree import DraftTree
from selector.trellis import Trellis

FIRST_TOP_K, GROWTH = 16, 4


@njit(cache=True)
def _last_ranked_popped(depths, tokens, last_tokens):
    """(depth,) bool: whether the last listed candidate of a row is among the nodes."""
    popped = np.zeros(last_tokens.shape[0], np.bool_)
    for i in range(depths.shape[0]):
        row = depths[i] - 1
        if tokens[i] == last_tokens[row]:
            popped[row] = True
    return popped


def rows_to_grow(
    trellis: Trellis, depths: NDArray[np.int32], token_ids: NDArray[np.int64], listed: NDArray[np.int64], vocab: int
) -> NDArray[np.bool_]:
    """(depth,) rows whose last listed candidate is among the nodes (m,) although the vocabulary has more.

    An unlisted candidate comes after every listed one of its row, under any parent. So as long as the last listed
    candidate of a row is not among the nodes, no unlisted one can be.
    """
    last = trellis.token_ids[np.arange(trellis.depth), listed - 1] if trellis.depth else np.zeros(0, np.int64)
    return _last_ranked_popped(depths, token_ids, last) & (listed < vocab)  # type: ignore[no-any-return]


def grow(trellis: Trellis, logits: Any, rows: NDArray[np.bool_], listed: NDArray[np.int64]) -> tuple[Trellis, NDArray[np.int64]]:
    """The trellis with `rows` listed GROWTH times as far, and how many candidates every row lists now."""
    longer = np.where(rows, np.minimum(listed * GROWTH, int(logits.shape[1])), listed)
    return _with_longer_rows(trellis, logits, np.flatnonzero(rows), int(longer.max()), longer), longer


def expand_logits(
    logits: Any,
    max_nodes: int,
    rule: int = BUDGET,
    cost: NDArray[np.float64] | None = None,
    price: float = 0.0,
    bonus: float = 1.0,
    top_k: int | None = None,
) -> tuple[Trellis, Expansion]:
    """The order a search over the whole vocabulary would give, without listing more of it than is needed.

    Rows that turn out too short (see `rows_to_grow`) are scanned again for 4 times as many, until none is left.

    Args:
        logits: (depth, vocab), numpy or torch. max_nodes, rule, cost, price, bonus: as `expansion.expand`.
        top_k: candidates listed at first; default 16, or a 16th of max_nodes if that is more.
    """
    trellis = Trellis.from_logits(logits, top_k or max(FIRST_TOP_K, max_nodes // 16))
    vocab = int(logits.shape[1]) if len(logits) else 0
    listed = np.full(trellis.depth, trellis.top_k, np.int64)
    while True:
        expansion = expand(trellis, max_nodes, rule, cost, price, bonus)
        short = rows_to_grow(trellis, expansion.depths, expansion.token_ids, listed, vocab)
        if not short.any():
            return trellis, expansion._replace(truncated_by_k=False)
        trellis, listed = grow(trellis, logits, short, listed)


def _with_longer_rows(trellis: Trellis, logits: Any, rows: NDArray[np.intp], width: int, listed: NDArray[np.int64]) -> Trellis:
    """The trellis with some rows listed anew; others are padded to the same width with candidates that never enter."""
    token_ids = np.full((trellis.depth, width), -1, np.int64)
    log_edges = np.full((trellis.depth, width), -np.inf)
    token_ids[:, : trellis.top_k], log_edges[:, : trellis.top_k] = trellis.token_ids, trellis.log_edges
    for row in rows.tolist():
        longer = Trellis.from_logits(logits[row : row + 1], int(listed[row]))
        token_ids[row, : longer.top_k], log_edges[row, : longer.top_k] = longer.token_ids[0], longer.log_edges[0]
    return Trellis(token_ids, log_edges, trellis.num_nan_rows)


def may_be_cut_short(policy: Policy, tree: DraftTree) -> bool:
    """Whether an unlisted candidate could belong in a tree, as far as the policy's own certificate tells.

    `exact` and `priced` certify their choice against unlisted candidates, and a full fixed budget says if one could have
    come first. A chain wants the top candidates only, and TAPS lists K children by definition. Anything else has to be
    looked into: `select_grown` does.
    """
    if tree.status == "truncated:top_k":
        return True
    if isinstance(policy, Taps) or (isinstance(policy, FixedShape) and policy.kind == "chain"):
        return False
    certain = ("budget", "truncated:max_nodes", "optimal") if policy.name in ("exact", "priced") else ("budget",)
    return tree.status not in certain


def select_grown(policy: Policy, trellis: Trellis, logits: Any, inputs: RoundInputs, tree: DraftTree) -> tuple[DraftTree, bool]:
    """The tree a policy finds over the whole vocabulary, from the one it found over `trellis`, and whether it had to look.

    Rows whose last listed candidate is in the tree are listed further (all rows, where the search passed one that it did
    not take), until no unlisted candidate can belong in it.
    """
    vocab, grown = int(logits.shape[1]), False
    listed = np.full(trellis.depth, trellis.top_k, np.int64)
    while may_be_cut_short(policy, tree):
        rows = rows_to_grow(trellis, tree.depths[1:], tree.token_ids[1:], listed, vocab)
        if not rows.any() and tree.status == "truncated:top_k":
            rows = listed < vocab
        if not rows.any():
            break
        trellis, listed = grow(trellis, logits, rows, listed)
        tree, grown = policy.select(trellis, inputs), True
    return tree, grown
