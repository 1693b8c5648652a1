"""Trees for requests that share one forward: one order of all their nodes, one price, one cost curve on total tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        status: "optimal", "budget", "exhausted", "truncated:max_nodes" or "degenerate-cost", as in DraftTree; or
            "truncated:top_k": an unlisted candidate may belong before the first node left out or, where the size is
            fixed, before the last one taken.
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

    Raises CostCurveError for bad curves, or if the engine's sizes cannot even hold the roots.
    """
    caps = _caps(max_nodes, len(candidates))
    order = _merge([expand_candidates(each, cap) for each, cap in zip(candidates, caps, strict=True)])
    seconds, executed = _paid(np.arange(len(order.reach) + 1), len(candidates), round_seconds, executable_verify_tokens)
    total = len(candidates) * bonus + np.concatenate([[0.0], np.cumsum(order.reach)])
    if total_nodes is not None:
        n = min(total_nodes, len(seconds) - 1)
        status = "budget" if n == total_nodes else "exhausted"  # or the curve ends there
    elif is_flat(round_seconds):
        return _degenerate(candidates, order, round_seconds, executable_verify_tokens, root_tokens, bonus)
    else:
        n = _best(total, seconds, price)
        cut_off = n == len(seconds) - 1 and (n < len(order.reach) or order.is_capped)
        status = "truncated:max_nodes" if cut_off else "optimal"
    counts = np.bincount(order.requests[:n], minlength=len(candidates))
    if _best_unlisted(candidates, order.expansions, counts) > _next_reach(order, n, fixed_size=status != "optimal"):
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
    r = len(candidates)
    expansions = [expand_candidates(each, max_nodes) for each in candidates]
    sizes = np.arange(max((len(each.reach) for each in expansions), default=0) + 1)
    sums = [np.concatenate([[0.0], np.cumsum(each.reach)]) for each in expansions]
    total = r * bonus + sum((each[np.minimum(sizes, len(each) - 1)] for each in sums), np.zeros(len(sizes)))
    seconds, executed = _paid(r * sizes, r, round_seconds, executable_verify_tokens)
    flat = is_flat(round_seconds)
    n = min(max(each.depth for each in candidates), len(seconds) - 1) if flat else _best(total, seconds, price)
    counts = np.array([min(n, len(each.reach)) for each in expansions], np.int64)
    status = "optimal" if n < len(seconds) - 1 else "truncated:max_nodes"
    status = "degenerate-cost" if flat else status
    return _finish(expansions, counts, int(executed[n]), float(total[n]), float(seconds[n]), status, root_tokens)


@dataclass(frozen=True)
class _MergedOrder:
    """Nodes of all requests by falling reach: whose each is, its reach; ties go to the shallower, then the earlier request."""

    expansions: list[Expansion]
    requests: Ints
    reach: Array
    is_capped: bool  # a request may have more nodes than its cap let out


def _merge(expansions: list[Expansion]) -> _MergedOrder:
    reach = np.concatenate([each.reach for each in expansions] or [np.zeros(0)])
    depths = np.concatenate([each.depths for each in expansions] or [np.zeros(0, np.int32)])
    requests = np.repeat(np.arange(len(expansions)), [len(each.reach) for each in expansions])
    order = np.lexsort((requests, depths, -reach))
    return _MergedOrder(expansions, requests[order], reach[order], any(each.end == END_MAX_NODES for each in expansions))


def _caps(max_nodes: int | Sequence[int], num_requests: int) -> list[int]:
    return np.broadcast_to(np.asarray(max_nodes, np.int64), num_requests).tolist()  # type: ignore[no-any-return]


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


def _next_reach(order: _MergedOrder, n: int, fixed_size: bool) -> float:
    """Reach of the first node left out, or of the last one taken where no further one may be; 0 where there is none."""
    if fixed_size:
        return float(order.reach[n - 1]) if n else 1.0
    return float(order.reach[n]) if n < len(order.reach) else 0.0


def _best_unlisted(candidates: Sequence[Candidates], expansions: Sequence[Expansion], counts: Ints) -> float:
    """Largest reach that a candidate beyond the listed K can have, given the nodes taken of every request."""
    best = 0.0
    for each, expansion, n in zip(candidates, expansions, counts.tolist(), strict=True):
        if isinstance(each, CandidatePool):
            continue
        children = np.bincount(expansion.parents[:n], minlength=n + 1)
        for slot in np.flatnonzero(children == each.top_k).tolist():
            depth = int(expansion.depths[slot - 1]) if slot else 0
            rows, row = each.edges_by_parent[depth], 0
            if len(rows) > 1 and slot:
                row = int(np.flatnonzero(each.token_ids[depth - 1] == expansion.token_ids[slot - 1])[0])
            listed = np.exp(rows[row])
            missing = 1.0 - float(listed.sum())
            if missing > UNLISTED_MASS_TOLERANCE:
                best = max(best, (expansion.reach[slot - 1] if slot else 1.0) * min(missing, float(listed.min())))
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
