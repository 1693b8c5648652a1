"""Trees for requests that share one forward: one order of all their nodes, one price, one cost curve on total tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UsageError
from selector.errors import CostCurveError
from selector.policies import Candidates, Curve, expand_candidates, is_flat
from selector.pool import CandidatePool
from selector.search.expansion import Expansion
from selector.search.kernels import END_MAX_NODES, UNLISTED_MASS_TOLERANCE
from selector.tree import DraftTree

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BatchSelection:
    """One tree per request and what they cost together.

    Attributes:
        trees: in the order of the requests; a request may get the root alone, which is its plain step.
        num_verify_tokens: slots of all trees. executed_verify_tokens: what the engine runs for them, padding included.
        expected_tokens: of all requests, bonus tokens included. expected_seconds: of the shared round.
        status: "optimal", "budget", "exhausted", "truncated:max_nodes" (of all or of one request) or "degenerate-cost", as
            in DraftTree; or "truncated:top_k": an unlisted candidate may belong before the first node left out or, where
            the size is fixed, before the last one taken.
    """

    trees: tuple[DraftTree, ...]
    num_verify_tokens: int
    executed_verify_tokens: int
    expected_tokens: float
    expected_seconds: float
    status: str

    @property
    def num_nodes(self) -> Ints:
        """(r,) nodes of every request."""
        return np.array([tree.num_nodes for tree in self.trees], np.int64)

    @property
    def padding_tokens(self) -> int:
        """Executed tokens that no tree asked for."""
        return self.executed_verify_tokens - self.num_verify_tokens


def batch_curve(
    cost: Any, num_requests: int, max_nodes: int, context_tokens: float | Sequence[float] = 0, form: str = "table"
) -> Array:
    """(max_nodes + 1,) seconds of a round of `num_requests` requests with n nodes in all at index n (n + r verify tokens).

    `context_tokens` may be one number or one per request; their mean is what a forward's attention goes by.
    """
    context = float(np.mean(context_tokens))
    curve = cost.round_seconds(max_nodes + num_requests, context, num_requests, form)
    return np.array(curve[num_requests - 1 :], np.float64)


def executed_sizes(verify_tokens: Ints, executable: int | Sequence[int] | None) -> Ints:
    """What an engine runs for so many verify tokens; -1 where it has no size that large.

    Args:
        executable: None runs what is asked; an int rounds up to its multiples (a layout that is uniform over r requests
            runs multiples of r); a sequence rounds up to the next of its sizes (captured graphs).

    Raises CostCurveError for sizes below 1.
    """
    if executable is None:
        return verify_tokens
    sizes = np.unique(np.asarray(executable, np.int64))
    if not sizes.size or sizes[0] < 1:
        raise CostCurveError(f"sizes an engine can run are at least 1, got {executable!r}")
    if np.ndim(executable) == 0:
        return -(-verify_tokens // sizes[0]) * sizes[0]
    index = np.searchsorted(sizes, verify_tokens)
    return np.where(index < len(sizes), sizes[np.minimum(index, len(sizes) - 1)], -1)


def select_batch(
    candidates: Sequence[Candidates],
    round_seconds: Curve,
    price: float | None = None,
    total_nodes: int | None = None,
    max_nodes: int | Sequence[int] = 256,
    executable_verify_tokens: int | Sequence[int] | None = None,
    root_tokens: Sequence[int] | None = None,
    bonus: float = 1.0,
) -> BatchSelection:
    """The trees that together yield the most tokens per second.

    The best sets of n nodes in all are the first n of all requests' orders merged by reach (each order's prefix is its
    best tree, and sums of concave functions are maximised by taking the largest steps first), so only n is searched.

    Args:
        candidates: a trellis or pool per request.
        round_seconds: seconds of a round with n nodes in all at index n (`batch_curve`); its length limits n.
        price: tokens per second of the whole batch that a second is worth: takes the n that maximises tokens less
            price x seconds. None maximises tokens / seconds of this round.
        total_nodes: take exactly so many (or all there are), whatever they cost.
        max_nodes: largest tree, for all requests or one number per request.
        executable_verify_tokens: what the engine can run, see `executed_sizes`; padding is paid for.
        root_tokens: (r,) tokens of the slots 0. bonus: as in RoundInputs.

    Raises CostCurveError for bad curves, or if the engine's sizes cannot even hold the roots; UsageError for no requests,
    negative numbers of nodes, or other than one number per request.
    """
    flat = is_flat(round_seconds)
    if total_nodes is not None and total_nodes < 0:
        raise UsageError(f"total_nodes must not be negative, got {total_nodes}")
    caps = _caps(max_nodes, candidates, root_tokens)
    order = _merge([expand_candidates(each, cap) for each, cap in zip(candidates, caps, strict=True)])
    seconds, executed = _paid(np.arange(len(order.reach) + 1), len(candidates), round_seconds, executable_verify_tokens)
    total = len(candidates) * bonus + np.concatenate([[0.0], np.cumsum(order.reach)])
    if total_nodes is not None:
        n = min(total_nodes, len(seconds) - 1)
        status = "budget" if n == total_nodes else "truncated:max_nodes" if _cut_off(order, seconds, n) else "exhausted"
    elif flat:
        return _degenerate(candidates, order, round_seconds, executable_verify_tokens, root_tokens, bonus)
    else:
        n = _best(total, seconds, price)
        status = "truncated:max_nodes" if _cut_off(order, seconds, n) else "optimal"
    counts = np.bincount(order.requests[:n], minlength=len(candidates))
    next_reach = _next_reach(order.reach, n, fixed_size=status != "optimal")
    if any(_best_unlisted(*each) > next_reach for each in zip(candidates, order.expansions, counts.tolist(), strict=True)):
        status = "truncated:top_k"
    return _finish(order.expansions, counts, int(executed[n]), float(total[n]), float(seconds[n]), status, root_tokens)


def select_batch_uniform(
    candidates: Sequence[Candidates],
    round_seconds: Curve,
    price: float | None = None,
    max_nodes: int = 256,
    executable_verify_tokens: int | Sequence[int] | None = None,
    root_tokens: Sequence[int] | None = None,
    bonus: float = 1.0,
) -> BatchSelection:
    """The baseline: every request runs equally many slots, the best such number; a tree that falls short is padded.

    Arguments as `select_batch`.
    """
    r, flat = len(candidates), is_flat(round_seconds)
    caps = _caps(max_nodes, candidates, root_tokens)
    expansions = [expand_candidates(each, cap) for each, cap in zip(candidates, caps, strict=True)]
    sizes = np.arange(max((len(each.reach) for each in expansions), default=0) + 1)
    sums = [np.concatenate([[0.0], np.cumsum(each.reach)]) for each in expansions]
    total = r * bonus + sum((each[np.minimum(sizes, len(each) - 1)] for each in sums), np.zeros(len(sizes)))
    seconds, executed = _paid(r * sizes, r, round_seconds, executable_verify_tokens)
    n = min(max(each.depth for each in candidates), len(seconds) - 1) if flat else _best(total, seconds, price)
    counts = np.array([min(n, len(each.reach)) for each in expansions], np.int64)
    more = n + 1 < len(sizes) or any(each.end == END_MAX_NODES for each in expansions)
    status = "truncated:max_nodes" if n == len(seconds) - 1 and more else "optimal"
    for each, expansion, count in zip(candidates, expansions, counts.tolist(), strict=True):
        if _best_unlisted(each, expansion, count) > _next_reach(expansion.reach, n, fixed_size=status != "optimal"):
            status = "truncated:top_k"
    status = "degenerate-cost" if flat else status
    return _finish(expansions, counts, int(executed[n]), float(total[n]), float(seconds[n]), status, root_tokens)


@dataclass(frozen=True)
class _MergedOrder:
    """Nodes of all requests by falling reach: whose each is, its reach; ties go to the shallower, then the earlier request."""

    expansions: list[Expansion]
    requests: Ints
    reach: Array


def _merge(expansions: list[Expansion]) -> _MergedOrder:
    reach = np.concatenate([each.reach for each in expansions] or [np.zeros(0)])
    depths = np.concatenate([each.depths for each in expansions] or [np.zeros(0, np.int32)])
    requests = np.repeat(np.arange(len(expansions)), [len(each.reach) for each in expansions])
    order = np.lexsort((requests, depths, -reach))
    return _MergedOrder(expansions, requests[order], reach[order])


def _cut_off(order: _MergedOrder, seconds: Array, n: int) -> bool:
    """Whether more nodes might do better: the curve, the engine or a request's own cap ended what could be looked at."""
    if n == len(seconds) - 1 and n < len(order.reach):
        return True
    counts = np.bincount(order.requests[:n], minlength=len(order.expansions)).tolist()
    return any(
        each.end == END_MAX_NODES and count == len(each.reach) for each, count in zip(order.expansions, counts, strict=True)
    )


def _caps(max_nodes: int | Sequence[int], candidates: Sequence[Candidates], root_tokens: Sequence[int] | None) -> list[int]:
    """The largest tree of every request; raises UsageError for other than one number and one root per request."""
    r = len(candidates)
    if r == 0:
        raise UsageError("a batch needs at least one request, got none")
    caps, roots = np.asarray(max_nodes, np.int64).reshape(-1), r if root_tokens is None else len(root_tokens)
    if len(caps) not in (1, r) or caps.min() < 0:
        raise UsageError(f"max_nodes must be one number of at least 0, or {r} of them, got {max_nodes!r}")
    if roots != r:
        raise UsageError(f"{r} requests need as many root_tokens, got {roots}")
    return np.broadcast_to(caps, r).tolist()  # type: ignore[no-any-return]


def _paid(nodes: Ints, num_requests: int, curve: Curve, executable: int | Sequence[int] | None) -> tuple[Array, Ints]:
    """Seconds and executed verify tokens for every total of nodes, as far as curve and engine go."""
    executed = executed_sizes(nodes + num_requests, executable)
    fits = (executed >= 0) & (executed - num_requests < len(curve))
    count = len(fits) if fits.all() else int(np.argmin(fits))
    if count == 0:
        raise CostCurveError(
            f"{num_requests} roots alone run as {executed[0] if len(executed) else 0} tokens, which the cost curve "
            f"({len(curve)} totals) or the engine's sizes do not reach"
        )
    return np.asarray(curve, np.float64)[executed[:count] - num_requests], executed[:count]


def _best(total: Array, seconds: Array, price: float | None) -> int:
    reached = total[: len(seconds)]
    return int(np.argmax(reached / seconds if price is None else reached - price * seconds))


def _degenerate(
    candidates: Sequence[Candidates],
    order: _MergedOrder,
    curve: Curve,
    executable: int | Sequence[int] | None,
    root_tokens: Sequence[int] | None,
    bonus: float,
) -> BatchSelection:
    """A flat curve cannot size trees: as many nodes as each draft is deep, as far as the curve goes."""
    counts = np.array([min(each.depth, len(e.reach)) for each, e in zip(candidates, order.expansions, strict=True)], np.int64)
    seconds, executed = _paid(np.arange(int(counts.sum()) + 1), len(candidates), curve, executable)
    while counts.sum() >= len(seconds):
        counts[int(np.argmax(counts))] -= 1
    n = int(counts.sum())
    reach = sum(float(e.reach[:count].sum()) for e, count in zip(order.expansions, counts, strict=True))
    total = len(candidates) * bonus + reach
    return _finish(order.expansions, counts, int(executed[n]), total, float(seconds[n]), "degenerate-cost", root_tokens)


def _next_reach(reach: Array, n: int, fixed_size: bool) -> float:
    """Reach of the first node left out, or of the last one taken where no further one may be; 0 where there is none."""
    if fixed_size:
        return float(reach[min(n, len(reach)) - 1]) if min(n, len(reach)) else 1.0
    return float(reach[n]) if n < len(reach) else 0.0


def _best_unlisted(candidates: Candidates, expansion: Expansion, count: int) -> float:
    """Largest reach that a candidate beyond the listed K can have, given the first `count` nodes of a request."""
    if isinstance(candidates, CandidatePool) or candidates.depth == 0:
        return 0.0
    best, rows = 0.0, candidates.edges_by_parent
    listed = (rows > -np.inf).sum(axis=2)  # (depth, P)
    taken = np.bincount(expansion.parents[:count], minlength=count + 1)
    depths = np.concatenate([[0], expansion.depths[:count]])
    for slot in np.flatnonzero((depths < candidates.depth) & (taken > 0)).tolist():
        depth, row = int(depths[slot]), 0
        if rows.shape[1] > 1 and slot:
            row = int(np.flatnonzero(candidates.token_ids[depth - 1] == expansion.token_ids[slot - 1])[0])
        if taken[slot] < listed[depth, row]:
            continue
        probabilities = np.exp(rows[depth, row])
        missing = 1.0 - float(probabilities.sum())
        if missing > UNLISTED_MASS_TOLERANCE:
            least = float(probabilities[probabilities > 0].min())
            best = max(best, (float(expansion.reach[slot - 1]) if slot else 1.0) * min(missing, least))
    return best


def _finish(
    expansions: Sequence[Expansion],
    counts: Ints,
    executed: int,
    total: float,
    seconds: float,
    status: str,
    root_tokens: Sequence[int] | None,
) -> BatchSelection:
    roots = [-1] * len(expansions) if root_tokens is None else root_tokens
    trees = tuple(
        DraftTree.from_expansion(each._replace(num_chosen=int(n)), status, int(root), seconds)
        for each, n, root in zip(expansions, counts, roots, strict=True)
    )
    return BatchSelection(trees, int(counts.sum()) + len(trees), executed, total, seconds, status)
