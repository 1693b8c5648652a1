"""The compiled best-first search: a frontier that reveals siblings and children lazily, and the rules that stop it.

All compiled code that calls other compiled code is in this one file, since numba's disk cache watches one file per
function: a change anywhere here compiles everything here again, and nothing stale survives an upgrade.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Stopping rules
BUDGET, EXACT, PRICED, FIRST_DESCENT = 0, 1, 2, 3
# Why the search ended
END_CERTIFIED, END_EXHAUSTED, END_MAX_NODES, END_DESCENT = 0, 1, 2, 3
# Columns of a heap entry
DEPTH, TOKEN, PARENT, ROW, RANK = 0, 1, 2, 3, 4

UNLISTED_MASS_TOLERANCE = 1e-6  # missing probability below this is rounding, not an unlisted candidate

NEVER = 2**30  # rank of a path node that is not among the nodes


class Frontier(NamedTuple):
    """Arrays of one search: the trellis, its siblings in order, the heap and what its entries say."""

    edges: NDArray[np.float64]  # (depth, P, K)
    token_ids: NDArray[np.int64]  # (depth, K)
    order: NDArray[np.int32]  # (depth, P, K) columns by falling probability
    counts: NDArray[np.int32]  # (depth, P) columns with a probability above 0; -1 = not sorted yet
    keys: NDArray[np.float64]  # log reach of every entry ever pushed
    entries: NDArray[np.int64]  # depth (0-based), token id, parent slot, edge row, rank among siblings
    heap: NDArray[np.int64]  # entry indices
    log_reach: NDArray[np.float64]  # by slot


@njit(cache=True, inline="always")
def _before(keys, entries, a, b):
    """Whether entry a comes before entry b in the order of nodes."""
    if keys[a] != keys[b]:
        return keys[a] > keys[b]
    if entries[a, DEPTH] != entries[b, DEPTH]:
        return entries[a, DEPTH] < entries[b, DEPTH]
    if entries[a, TOKEN] != entries[b, TOKEN]:
        return entries[a, TOKEN] < entries[b, TOKEN]
    return entries[a, PARENT] < entries[b, PARENT]


@njit(cache=True, inline="always")
def _sift_up(heap, size, keys, entries, entry):
    """Add an entry; returns the new size."""
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if not _before(keys, entries, entry, heap[above]):
            break
        heap[i] = heap[above]
        i = above
    heap[i] = entry
    return size + 1


@njit(cache=True, inline="always")
def pop(heap, size, keys, entries):
    """Remove the first entry; returns the new size."""
    size -= 1
    entry = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _before(keys, entries, heap[child + 1], heap[child]):
            child += 1
        if not _before(keys, entries, heap[child], entry):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = entry
    return size


@njit(cache=True)
def _sort_siblings(edges, tokens, order):
    """Columns with a probability above 0 by falling probability, ties by lower token id; returns how many."""
    count = 0
    for column in range(edges.shape[0]):
        if not edges[column] > -np.inf:  # -inf and NaN alike
            continue
        j = count
        while j > 0 and (
            edges[order[j - 1]] < edges[column]
            or (edges[order[j - 1]] == edges[column] and tokens[order[j - 1]] > tokens[column])
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = column
        count += 1
    return count


@njit(cache=True)
def _unlisted_bound(edges, last_column):
    """Probability that the best candidate beyond the K listed ones can have, given the last one listed."""
    mass = 0.0
    for column in range(edges.shape[0]):
        mass += np.exp(edges[column])
    missing = 1.0 - mass
    return 0.0 if missing < UNLISTED_MASS_TOLERANCE else min(missing, np.exp(edges[last_column]))


@njit(cache=True, inline="always")
def _push(frontier, size, used, depth, row, rank, parent):
    """Make entry number `used` of the rank-th sibling of a row and put it into the heap; returns the heap's new size."""
    column = frontier.order[depth, row, rank]
    frontier.keys[used] = frontier.log_reach[parent] + frontier.edges[depth, row, column]
    frontier.entries[used, DEPTH], frontier.entries[used, TOKEN] = depth, frontier.token_ids[depth, column]
    frontier.entries[used, PARENT], frontier.entries[used, ROW], frontier.entries[used, RANK] = parent, row, rank
    return _sift_up(frontier.heap, size, frontier.keys, frontier.entries, used)


@njit(cache=True, inline="always")
def push_first_child(frontier, size, used, depth, row, parent):
    """Push the best child of `parent`, if the trellis goes that deep and it has one; returns the heap's new size."""
    if depth >= frontier.edges.shape[0]:
        return size
    if frontier.counts[depth, row] < 0:
        edges, order = frontier.edges[depth, row], frontier.order[depth, row]
        frontier.counts[depth, row] = _sort_siblings(edges, frontier.token_ids[depth], order)
    if frontier.counts[depth, row] == 0:
        return size
    return _push(frontier, size, used, depth, row, 0, parent)


@njit(cache=True, inline="always")
def push_successors(frontier, size, n, depth, row, rank, parent):
    """After node n (its slot) left the heap: push its next sibling and its first child; returns the heap's new size."""
    column = frontier.order[depth, row, rank]
    if rank + 1 < frontier.counts[depth, row]:
        size = _push(frontier, size, n + size, depth, row, rank + 1, parent)
    child_row = column if frontier.edges.shape[1] > 1 else 0
    return push_first_child(frontier, size, n + size, depth + 1, child_row, n)


@njit(cache=True)
def unlisted_reach(frontier, depth, row, rank, parent):
    """Largest reach an unlisted sibling can have once the last of K listed siblings is popped."""
    return np.exp(frontier.log_reach[parent]) * _unlisted_bound(frontier.edges[depth, row], frontier.order[depth, row, rank])


@njit(cache=True)
def new_frontier(edges, token_ids, max_nodes):
    """An empty frontier for a search of at most `max_nodes` nodes."""
    depth, num_rows, top_k = edges.shape
    capacity = 2 * max_nodes + 2
    return Frontier(
        edges,
        token_ids,
        np.empty((depth, num_rows, top_k), np.int32),
        np.full((depth, num_rows), -1, np.int32),
        np.empty(capacity, np.float64),
        np.empty((capacity, 5), np.int64),
        np.empty(max_nodes + 3, np.int64),
        np.zeros(max_nodes + 1, np.float64),
    )


@njit(cache=True)
def convex_minorant(cost):
    """Largest convex function on 0..n-1 that lies nowhere above `cost` (lower hull of its points), float64 (n,)."""
    n = cost.shape[0]
    hull = np.empty(n, np.int64)
    size = 0
    for i in range(n):
        while size >= 2:
            a, b = hull[size - 2], hull[size - 1]
            if (cost[b] - cost[a]) * (i - a) < (cost[i] - cost[a]) * (b - a):
                break
            size -= 1
        hull[size] = i
        size += 1
    minorant = np.empty(n, np.float64)
    minorant[0] = cost[0]
    for k in range(1, size):
        a, b = hull[k - 1], hull[k]
        for i in range(a + 1, b):
            minorant[i] = cost[a] + (cost[b] - cost[a]) * ((i - a) / (b - a))
        minorant[b] = cost[b]
    return minorant


@njit(cache=True)
def tree_value(rule, total, cost, price):
    """What a rule maximises: tokens per second, or tokens less what the seconds are worth."""
    return total - price * cost if rule == PRICED else total / cost


@njit(cache=True)
def _none_larger_wins(minorant, peak, n, total, reach, weight, target):
    """Certificate: no m > n has total + (m - n) reach - weight cost(m) above `target`.

    `reach` bounds the reach of every node still to come. The bound is concave in m under the minorant; `peak` is a
    cursor that follows its maximum downwards as reach falls and weight rises. Returns (certified, peak).
    """
    while peak > 0 and weight * (minorant[peak] - minorant[peak - 1]) >= reach:
        peak -= 1
    m = max(peak, n + 1)
    return total + (m - n) * reach - weight * minorant[m] <= target, peak


@njit(cache=True)
def _search(frontier, popped, reaches, rule, cost, price, base):
    """Pop nodes until the rule stops; fills popped (entry indices) and reaches, returns (n, chosen, end, truncated)."""
    max_nodes = popped.shape[0]
    minorant = convex_minorant(cost) if rule == EXACT or rule == PRICED else cost
    n, chosen, peak, end = 0, 0, max_nodes, END_EXHAUSTED
    total, unlisted, truncated = base, 0.0, False
    best = tree_value(rule, total, cost[0], price)
    weight, target = (best, 0.0) if rule == EXACT else (price, best)
    size = push_first_child(frontier, 0, 0, 0, 0, 0)
    while size > 0:
        if n == max_nodes:
            end = END_MAX_NODES
            break
        first = frontier.heap[0]
        reach = np.exp(frontier.keys[first])
        if (rule == EXACT or rule == PRICED) and weight > 0:
            stop, peak = _none_larger_wins(minorant, peak, n, total, max(reach, unlisted), weight, target)
            if stop:
                end = END_CERTIFIED
                break
        elif rule == FIRST_DESCENT and not tree_value(rule, total + reach, cost[n + 1], price) > best:
            end = END_DESCENT
            break
        size = pop(frontier.heap, size, frontier.keys, frontier.entries)
        depth, row = frontier.entries[first, DEPTH], frontier.entries[first, ROW]
        rank, parent = frontier.entries[first, RANK], frontier.entries[first, PARENT]
        popped[n], reaches[n] = first, reach
        truncated = truncated or reach < unlisted
        if rank + 1 == frontier.edges.shape[2]:
            unlisted = max(unlisted, unlisted_reach(frontier, depth, row, rank, parent))
        total += reach
        n += 1
        frontier.log_reach[n] = frontier.keys[first]
        size = push_successors(frontier, size, n, depth, row, rank, parent)
        value = tree_value(rule, total, cost[n], price)
        if value > best:
            best, chosen = value, n
            weight, target = (best, 0.0) if rule == EXACT else (price, best)
    if end == END_EXHAUSTED and unlisted > 0 and n < max_nodes and (rule == EXACT or rule == PRICED):
        certified, peak = _none_larger_wins(minorant, peak, n, total, unlisted, weight, target)
        truncated = truncated or not certified
    return n, chosen, end, truncated


@njit(cache=True)
def best_first(edges, token_ids, max_nodes, rule, cost, price, base):
    """Compiled body of `expand`: (depths, token_ids, parents, reach, num_chosen, end, truncated_by_k)."""
    frontier = new_frontier(edges, token_ids, max_nodes)
    popped = np.empty(max_nodes, np.int64)
    reaches = np.empty(max_nodes, np.float64)
    n, chosen, end, truncated = _search(frontier, popped, reaches, rule, cost, price, base)
    depths, parents, tokens = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int64)
    for i in range(n):
        entry = frontier.entries[popped[i]]
        depths[i], tokens[i], parents[i] = entry[DEPTH] + 1, entry[TOKEN], entry[PARENT]
    return depths, tokens, parents, reaches[:n], n if rule == BUDGET else chosen, end, truncated


@njit(cache=True)
def chain_path(edges, token_ids, max_nodes):
    """Tokens and reach of the most probable child of the most probable child and so on; ties to the lower token id."""
    depth, num_rows, _ = edges.shape
    length = min(depth, max_nodes)
    tokens, reach = np.empty(length, np.int64), np.empty(length, np.float64)
    row, log_reach, n = 0, 0.0, 0
    while n < length:
        best = -1
        for column in range(edges.shape[2]):
            edge = edges[n, row, column]
            if not edge > -np.inf:
                continue
            if (
                best < 0
                or edge > edges[n, row, best]
                or (edge == edges[n, row, best] and token_ids[n, column] < token_ids[n, best])
            ):
                best = column
        if best < 0:
            break
        log_reach += edges[n, row, best]
        tokens[n], reach[n] = token_ids[n, best], np.exp(log_reach)
        row = best if num_rows > 1 else 0
        n += 1
    return tokens[:n], reach[:n]


@njit(cache=True)
def order_all(log_edges, token_ids, next_tokens, max_nodes):
    """Phi (A, n + 1), deepest node (A, n + 1), nodes there are (A,), ranks of the path (A, depth), chain hits (A,)."""
    anchors, depth, _ = log_edges.shape
    phi = np.zeros((anchors, max_nodes + 1), np.float64)
    deepest = np.zeros((anchors, max_nodes + 1), np.int16)
    sizes = np.zeros(anchors, np.int32)
    ranks = np.full((anchors, depth), NEVER, np.int32)
    no_cost = np.ones(max_nodes + 1, np.float64)
    for a in range(anchors):
        edges = log_edges[a].reshape((depth, 1, log_edges.shape[2]))
        depths, tokens, parents, reach, n, _, _ = best_first(edges, token_ids[a], max_nodes, BUDGET, no_cost, 0.0, 1.0)
        sizes[a] = n
        slot, at = 0, 0
        for i in range(n):
            phi[a, i + 1] = phi[a, i] + reach[i]
            deepest[a, i + 1] = max(deepest[a, i], depths[i])
            if at < depth and parents[i] == slot and tokens[i] == next_tokens[a, at]:
                ranks[a, at] = i
                slot, at = i + 1, at + 1
        phi[a, n + 1 :] = phi[a, n]
        deepest[a, n + 1 :] = deepest[a, n]
    return phi, deepest, sizes, ranks
