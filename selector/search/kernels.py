"""The compiled best-first search: siblings and children are revealed lazily, and a rule says when to stop.

All compiled code that calls other compiled code is in this one file, since numba's disk cache watches one file per
function: a change anywhere here compiles everything here again, and nothing stale survives an upgrade.

A heap holds the open nodes (`_search`): the number `parent slot * 2**32 + rank among its siblings` beside the log reach.
For a number of nodes given, and edges that hang on no parent, `_order_by_level` finds the same order twice as fast.
Functions take plain arrays and are inlined: a tuple of arrays costs more than the search itself.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Stopping rules
BUDGET, EXACT, PRICED, FIRST_DESCENT = 0, 1, 2, 3
# Why the search ended
END_CERTIFIED, END_EXHAUSTED, END_MAX_NODES, END_DESCENT = 0, 1, 2, 3
# Columns of `slots`: depth of the node there, row of its children
DEPTH, ROW = 0, 1
# Columns of `levels`: rank of the first open node of the depth, ranks that may be open, parents there are, candidates listed
FIRST, WIDTH, PARENTS, LISTED = 0, 1, 2, 3

UNLISTED_MASS_TOLERANCE = 1e-6  # missing probability below this is rounding, not an unlisted candidate
MOST_BY_LEVEL = 2048  # nodes up to which looking at all open nodes of a depth is fast however flat the draft
NEVER = 2**30  # rank of a path node that is not among the nodes
_RANK_MASK = 2**32 - 1
_NO_ROW = -1  # the trellis ends here
_compiled = njit(cache=True, error_model="numpy")  # division by zero raises nothing, so that loops need no way out
_inlined = njit(cache=True, error_model="numpy", forceinline=True)


@_inlined
def _before(key_a, a, key_b, b, slots, ranked_ids):
    """Whether node a comes before node b: higher reach, then shallower, then lower token id, then earlier parent."""
    if key_a != key_b:
        return key_a > key_b
    parent_a, parent_b = a >> 32, b >> 32
    if slots[parent_a, DEPTH] != slots[parent_b, DEPTH]:
        return slots[parent_a, DEPTH] < slots[parent_b, DEPTH]
    id_a = ranked_ids[slots[parent_a, ROW], a & _RANK_MASK]
    id_b = ranked_ids[slots[parent_b, ROW], b & _RANK_MASK]
    return id_a < id_b or (id_a == id_b and parent_a < parent_b)


@_inlined
def _add(keys, nodes, size, key, node, slots, ranked_ids):
    """Add a node to a heap of `size`."""
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if not _before(key, node, keys[above], nodes[above], slots, ranked_ids):
            break
        keys[i], nodes[i] = keys[above], nodes[above]
        i = above
    keys[i], nodes[i] = key, node


@_inlined
def _replace_first(keys, nodes, size, key, node, slots, ranked_ids):
    """Put a node in the place of the first of a heap of `size`."""
    i, child = 0, 1
    while child < size:
        if child + 1 < size and _before(keys[child + 1], nodes[child + 1], keys[child], nodes[child], slots, ranked_ids):
            child += 1
        if not _before(keys[child], nodes[child], key, node, slots, ranked_ids):
            break
        keys[i], nodes[i] = keys[child], nodes[child]
        i = child
        child = 2 * i + 1
    keys[i], nodes[i] = key, node


@_inlined
def _rank_siblings(row, depth, edges, token_ids, ranked_edges, ranked_ids, columns):
    """Fill a row with the columns of a probability above 0: falling, ties by lower token id; returns how many."""
    count, parent = 0, row - depth * edges.shape[1]
    for column in range(edges.shape[2]):
        edge, token = edges[depth, parent, column], token_ids[depth, column]
        if not edge > -np.inf:  # -inf and NaN alike
            continue
        j = count
        while j > 0 and ranked_edges[row, j - 1] <= edge and (ranked_edges[row, j - 1] < edge or ranked_ids[row, j - 1] > token):
            ranked_edges[row, j], ranked_ids[row, j] = ranked_edges[row, j - 1], ranked_ids[row, j - 1]
            columns[row, j] = columns[row, j - 1]
            j -= 1
        ranked_edges[row, j], ranked_ids[row, j], columns[row, j] = edge, token, column
        count += 1
    return count


@_compiled
def _unlisted_bound(ranked_edges):
    """Probability that the best candidate beyond the listed ones of a row can have, given those (no pads)."""
    mass = 0.0
    for rank in range(ranked_edges.shape[0]):
        mass += np.exp(ranked_edges[rank])
    missing = 1.0 - mass
    return 0.0 if missing < UNLISTED_MASS_TOLERANCE else min(missing, np.exp(ranked_edges[-1]))


@_compiled
def _is_ranked(edges, token_ids):
    """Whether every row of (depth, K) edges is in the order that `_rank_siblings` makes."""
    for d in range(edges.shape[0]):
        falls, ties = 0, 0
        for c in range(edges.shape[1] - 1):
            falls += edges[d, c] > edges[d, c + 1]
        if falls < edges.shape[1] - 1:
            for c in range(edges.shape[1] - 1):
                this, following = edges[d, c], edges[d, c + 1]
                ties += this == following and (token_ids[d, c] < token_ids[d, c + 1] or this == -np.inf)
        if falls + ties < edges.shape[1] - 1 or not edges[d, 0] >= -np.inf:  # or NaN
            return False
    return True


@_compiled
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


@_compiled
def tree_value(rule, total, cost, price):
    """What a rule maximises: tokens per second, or tokens less what the seconds are worth."""
    return total - price * cost if rule == PRICED else total / cost


@_compiled
def _none_larger_wins(minorant, peak, n, total, reach, weight, target):
    """Certificate: no m > n has total + (m - n) reach - weight cost(m) above `target`.

    `reach` bounds the reach of every node still to come. The bound is concave in m under the minorant; `peak` is a
    cursor that follows its maximum downwards as reach falls and weight rises. Returns (certified, peak).
    """
    while peak > 0 and weight * (minorant[peak] - minorant[peak - 1]) >= reach:
        peak -= 1
    m = max(peak, n + 1)
    return total + (m - n) * reach - weight * minorant[m] <= target, peak


@_compiled
def _unlisted_wins(rule, minorant, cost, peak, n, total, unlisted, price, weight, target, best):
    """Whether candidates of reach up to `unlisted`, had they been listed, could have gone on where the search ended."""
    if unlisted <= 0.0:
        return False
    if rule == FIRST_DESCENT:
        return tree_value(rule, total + unlisted, cost[n + 1], price) > best
    certified, peak = _none_larger_wins(minorant, peak, n, total, unlisted, weight, target)
    return not certified


@_compiled
def _search(edges, token_ids, rule, cost, price, base, depths, tokens, parents, reaches):
    """`best_first` by a heap, for any rule and edges (depth, P, K)."""
    (num_depths, num_parents, top_k), max_nodes = edges.shape, reaches.shape[0]
    num_rows = num_depths * num_parents
    ranked_edges, ranked_ids = np.empty((num_rows, top_k), np.float64), np.empty((num_rows, top_k), np.int64)
    columns, counts = np.empty((num_rows, top_k), np.int32), np.full(num_rows, -1, np.int32)
    keys, nodes = np.empty(max_nodes + 2, np.float64), np.empty(max_nodes + 2, np.int64)
    slots, log_reach = np.empty((max_nodes + 1, 2), np.int32), np.empty(max_nodes + 1, np.float64)
    by_value = rule == EXACT or rule == PRICED
    minorant = convex_minorant(cost) if by_value else cost
    n, chosen, peak, end, size = 0, 0, max_nodes, END_EXHAUSTED, 0
    total, unlisted, truncated = base, 0.0, False
    best = tree_value(rule, total, cost[0], price)
    weight, target = (best, 0.0) if rule == EXACT else (price, best)
    log_reach[0], slots[0, DEPTH], slots[0, ROW] = 0.0, 0, 0 if num_depths > 0 else _NO_ROW
    while True:
        row = slots[n, ROW]  # the first child of the node taken last enters
        if row != _NO_ROW:
            if counts[row] < 0:
                counts[row] = _rank_siblings(row, slots[n, DEPTH], edges, token_ids, ranked_edges, ranked_ids, columns)
            if counts[row] > 0:
                _add(keys, nodes, size, log_reach[n] + ranked_edges[row, 0], np.int64(n) << 32, slots, ranked_ids)
                size += 1
        if size == 0 or n == max_nodes:
            end = END_MAX_NODES if size else END_EXHAUSTED
            break
        key, node = keys[0], nodes[0]
        reach = np.exp(key)
        if by_value and weight > 0:
            stop, peak = _none_larger_wins(minorant, peak, n, total, max(reach, unlisted), weight, target)
            if stop:
                end = END_CERTIFIED
                break
        elif rule == FIRST_DESCENT and not tree_value(rule, total + reach, cost[n + 1], price) > best:
            end = END_DESCENT
            break
        parent, rank = node >> 32, node & _RANK_MASK
        row, depth = slots[parent, ROW], slots[parent, DEPTH]
        depths[n], tokens[n], parents[n], reaches[n] = depth + 1, ranked_ids[row, rank], parent, reach
        total += reach
        truncated = truncated or reach < unlisted
        if rank + 1 == counts[row]:
            unlisted = max(unlisted, np.exp(log_reach[parent]) * _unlisted_bound(ranked_edges[row, : counts[row]]))
        n += 1
        below = (depth + 1) * num_parents + (columns[row, rank] if num_parents > 1 else 0)
        log_reach[n], slots[n, DEPTH], slots[n, ROW] = key, depth + 1, below if depth + 1 < num_depths else _NO_ROW
        if rank + 1 < counts[row]:
            _replace_first(keys, nodes, size, log_reach[parent] + ranked_edges[row, rank + 1], node + 1, slots, ranked_ids)
        else:
            size -= 1
            _replace_first(keys, nodes, size, keys[size], nodes[size], slots, ranked_ids)
        if rule == BUDGET:
            continue
        value = tree_value(rule, total, cost[n], price)
        if value > best:
            best, chosen = value, n
            weight, target = (best, 0.0) if rule == EXACT else (price, best)
    if rule != BUDGET and not truncated and n < max_nodes and (end == END_EXHAUSTED or end == END_DESCENT):
        truncated = _unlisted_wins(rule, minorant, cost, peak, n, total, unlisted, price, weight, target, best)
    return n, n if rule == BUDGET else chosen, end, truncated


@_inlined
def _first_open(depth, open_keys, token_ids, width):
    """Rank of the best of `width` open nodes of one depth; of equal ones the lower token id."""
    first, highest = 0, open_keys[depth, 0]
    for rank in range(1, width):
        key = open_keys[depth, rank]
        if key >= highest and (key > highest or token_ids[depth, rank] < token_ids[depth, first]):
            first, highest = rank, key
    return first


@_compiled
def _order_by_level(edges, token_ids, depths, tokens, parents, reaches, slots, turns, open_keys, best_keys, levels):
    """`best_first` under BUDGET for ranked edges (depth, K) that all parents share.

    The nodes of a depth are sums of a parent's log reach and an edge, and both fall: rank r of a parent comes after rank r
    of every earlier parent and after rank r - 1 of its own. So per depth and rank one node is open at most, and the first of
    these few is found by looking at them. Scratch: slots (depth, N + 1) of a depth's parents; turns (depth, K), which of
    them has its open child of that rank; open_keys (depth, K); best_keys (depth,); levels (depth, 4).
    """
    (num_depths, top_k), max_nodes = edges.shape, reaches.shape[0]
    log_reach = np.empty(max_nodes + 1, np.float64)
    log_reach[0], n, below, unlisted, truncated, end = 0.0, 0, 0, 0.0, False, END_EXHAUSTED
    for d in range(num_depths):
        best_keys[d], open_keys[d, 0], turns[d, 0] = -np.inf, -np.inf, 0
        levels[d, FIRST], levels[d, WIDTH], levels[d, PARENTS], levels[d, LISTED] = 0, 1, 0, top_k
        while levels[d, LISTED] > 0 and edges[d, levels[d, LISTED] - 1] == -np.inf:
            levels[d, LISTED] -= 1
    while True:
        if below < num_depths:  # the node taken last becomes a parent
            turn = levels[below, PARENTS]
            slots[below, turn], levels[below, PARENTS] = n, turn + 1
            if turns[below, 0] == turn:
                key = log_reach[n] + edges[below, 0]
                open_keys[below, 0] = key
                if key > best_keys[below]:
                    best_keys[below], levels[below, FIRST] = key, 0
                elif key == best_keys[below]:
                    levels[below, FIRST] = _first_open(below, open_keys, token_ids, levels[below, WIDTH])
        depth, key = 0, -np.inf
        for d in range(num_depths):
            if best_keys[d] > key:
                depth, key = d, best_keys[d]
        if key == -np.inf or n == max_nodes:
            end = END_EXHAUSTED if key == -np.inf else END_MAX_NODES
            break
        rank, reach = levels[depth, FIRST], np.exp(key)
        turn = turns[depth, rank]
        parent, following = slots[depth, turn], turn + 1
        depths[n], tokens[n], parents[n], reaches[n] = depth + 1, token_ids[depth, rank], parent, reach
        truncated = truncated or reach < unlisted
        n, below = n + 1, depth + 1
        log_reach[n], turns[depth, rank], open_keys[depth, rank] = key, following, -np.inf
        if following < levels[depth, PARENTS] and (rank == 0 or turns[depth, rank - 1] > following):
            open_keys[depth, rank] = log_reach[slots[depth, following]] + edges[depth, rank]
        if rank + 1 == levels[depth, LISTED]:
            unlisted = max(unlisted, np.exp(log_reach[parent]) * _unlisted_bound(edges[depth, : rank + 1]))
        else:
            if rank + 1 == levels[depth, WIDTH]:
                levels[depth, WIDTH], turns[depth, rank + 1] = rank + 2, 0
            if turns[depth, rank + 1] == turn:
                open_keys[depth, rank + 1] = log_reach[parent] + edges[depth, rank + 1]
        first = _first_open(depth, open_keys, token_ids, levels[depth, WIDTH])
        levels[depth, FIRST], best_keys[depth] = first, open_keys[depth, first]
    return n, n, end, truncated


@_compiled
def best_first(edges, token_ids, rule, cost, price, base, depths, tokens, parents, reaches):
    """Compiled body of `expand`: fills the last four arrays, (max_nodes,) each; returns (nodes, chosen, end, truncated_by_k).

    Edges (depth, K) or (depth, P, K) float64. Cost (max_nodes + 1,); BUDGET looks at cost[0] only.
    """
    (depth, top_k), max_nodes = token_ids.shape, reaches.shape[0]
    num_parents = edges.size // max(edges.shape[0] * top_k, 1)
    by_level = rule == BUDGET and num_parents == 1 and max_nodes <= MOST_BY_LEVEL
    if by_level and _is_ranked(edges.reshape((depth, top_k)), token_ids):
        rows, slots = edges.reshape((depth, top_k)), np.empty((depth, max_nodes + 1), np.int32)
        turns, open_keys = np.empty((depth, top_k), np.int32), np.empty((depth, top_k))
        few, best_keys = np.empty((depth, 4), np.int64), np.empty(depth)
        return _order_by_level(rows, token_ids, depths, tokens, parents, reaches, slots, turns, open_keys, best_keys, few)
    by_parent = edges.reshape((depth, num_parents, top_k))
    return _search(by_parent, token_ids, rule, cost, price, base, depths, tokens, parents, reaches)


@_compiled
def order_anchors(log_edges, token_ids, next_tokens, max_nodes):
    """Compiled body of `expansion.order_all`, edges (A, depth, P, K)."""
    anchors, depth = log_edges.shape[:2]
    phi = np.zeros((anchors, max_nodes + 1), np.float64)
    deepest = np.zeros((anchors, max_nodes + 1), np.int16)
    sizes = np.zeros(anchors, np.int32)
    ranks = np.full((anchors, depth), NEVER, np.int32)
    depths, parents = np.empty(max_nodes, np.int32), np.empty(max_nodes, np.int32)
    tokens, reach = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.float64)
    for a in range(anchors):
        n, _, _, _ = best_first(log_edges[a], token_ids[a], BUDGET, np.ones(1), 0.0, 1.0, depths, tokens, parents, reach)
        sizes[a] = n
        slot, at = 0, 0
        for i in range(n):
            phi[a, i + 1] = phi[a, i] + reach[i]
            deepest[a, i + 1] = max(deepest[a, i], depths[i])
            if at < depth and parents[i] == slot and tokens[i] == next_tokens[a, at]:
                ranks[a, at] = i
                slot, at = i + 1, at + 1
        phi[a, n + 1 :], deepest[a, n + 1 :] = phi[a, n], deepest[a, n]
    return phi, deepest, sizes, ranks
