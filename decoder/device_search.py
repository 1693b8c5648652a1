"""The selector's search for logits on an accelerator: batched, fixed shapes, and nothing the host has to wait for.

Level by level: of the nodes of one depth only the best `max_nodes` can be in the tree, and only under parents that are
such nodes themselves. So each level is a table of (kept parents) x (K candidates) and one stable sort, and a last stable
sort over all levels gives the order of nodes. The tables are laid out so that stability alone settles ties as
`selector.search.expansion` does: a row of candidates by token id, parents by their own rank, levels by depth.

Every operation has a shape that depends on its arguments' shapes only, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from selector.errors import PolicyError
from selector.search.kernels import BUDGET, EXACT, FIRST_DESCENT, PRICED
from selector.tree import DraftTree

RULES = {"fixed": BUDGET, "exact": EXACT, "priced": PRICED, "unimodal": FIRST_DESCENT}
MAX_CHUNK_BYTES = 2**28  # of 64-bit sort keys made at a time by `top_k_by_id`
_LOW_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class DeviceTrellis:
    """Trellises of R requests.

    Attributes:
        token_ids: (R, depth, K) int64, -1 pads. log_edges: (R, depth, K), or (R, depth, K, K) by parent and child; float64.
    """

    token_ids: Tensor
    log_edges: Tensor


@dataclass(frozen=True)
class DeviceOrder:
    """The first N nodes of every request in the selector's order.

    Attributes:
        token_ids, parents (slots, 0 the root), depths: (R, N) int64. log_reach: (R, N) float64, -inf where there is no node.
        sizes: (R,) int64, nodes there are.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    log_reach: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of R requests in N + 1 slots each; slots beyond `num_nodes` are padding.

    Padding holds token `pad_token`, hangs below the root at depth 1, sees the root and itself, and is seen by no node.

    Attributes:
        token_ids, parents (-1 for the root), depths: (R, N + 1) int64. reach: (R, N + 1) float64, 0 for padding.
        num_nodes: (R,) int64. attention_mask: (R, N + 1, N + 1) bool, ancestors and self.
        last_rank_used: (R,) bool, True where a listed candidate of the lowest rank is in the tree, so that an unlisted
            one might belong there too (search again with a larger top-k).
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    reach: Tensor
    num_nodes: Tensor
    attention_mask: Tensor
    last_rank_used: Tensor

    def position_ids(self, context_tokens: Tensor) -> Tensor:
        """(R, N + 1) int64: context_tokens, of shape (R,), plus depth."""
        return context_tokens.unsqueeze(1) + self.depths

    def walk(self, target_tokens: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
        """Accepted slots, root first, given the target's token at every slot, (R, N + 1).

        Returns (R, max_depth + 1) int64 slots padded with -1, and (R,) int64 accepted nodes. No host synchronisation.
        """
        requests, slots = self.token_ids.shape
        index = torch.arange(slots, device=self.token_ids.device)
        is_node = (index <= self.num_nodes.unsqueeze(1)) & (index > 0)
        at = torch.zeros(requests, 1, dtype=torch.int64, device=self.token_ids.device)
        path, going = [at], torch.ones_like(at, dtype=torch.bool)
        for _ in range(max_depth):
            said = target_tokens.gather(1, at)
            match = is_node & (self.parents == at) & (self.token_ids == said)
            following = torch.where(match, index, slots).amin(1, keepdim=True)
            going = going & (following < slots)
            at = torch.where(going, following, at)
            path.append(torch.where(going, at, -1))
        walked = torch.cat(path, 1)
        return walked, (walked >= 0).sum(1) - 1

    def to_trees(self, status: str = "optimal") -> list[DraftTree]:
        """The trees on the host, padding dropped. This one waits for the device."""
        tokens, parents, depths = (each.cpu().numpy() for each in (self.token_ids, self.parents, self.depths))
        reach, counts = self.reach.cpu().numpy(), self.num_nodes.cpu().tolist()
        parents, depths = parents.astype(np.int32), depths.astype(np.int32)
        return [
            DraftTree(tokens[r, : n + 1], parents[r, : n + 1], depths[r, : n + 1], reach[r, : n + 1], status)
            for r, n in enumerate(counts)
        ]


def top_k_by_id(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row of (rows, vocab) float32 and their ids; of equal values the lower ids, in that order.

    `torch.topk` leaves ties open. Here value and id make one 64-bit key: no two are equal.
    """
    rows, vocab = logits.shape
    step = max(1, MAX_CHUNK_BYTES // (8 * vocab))
    falling = torch.arange(_LOW_BITS, _LOW_BITS - vocab, -1, device=logits.device)
    keys = []
    for start in range(0, max(rows, 1), step):
        bits = (logits[start : start + step] + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys.append((ordered.to(torch.int64) * 2**32 + falling).topk(k, dim=1).values)
    ids = _LOW_BITS - (torch.cat(keys) & _LOW_BITS)
    return logits.gather(1, ids), ids


def trellis_from_logits(logits: Tensor, top_k: int) -> DeviceTrellis:
    """Best candidates of every row, normalised over the vocabulary; rules as `Trellis.from_logits`.

    Args:
        logits: (R, depth, vocab) of any float type. top_k: candidates per depth; capped at vocab.
    """
    requests, depth, vocab = logits.shape
    k = min(top_k, vocab)
    rows = logits.reshape(-1, vocab).float()
    values, ids = top_k_by_id(rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    logprobs = values.double() - rows.logsumexp(1, keepdim=True).double()
    infinite = rows == torch.inf  # such a row says nothing but that these ids share all the mass
    num_infinite = infinite.sum(1, keepdim=True)
    shares = torch.where(values == torch.inf, -num_infinite.clamp(min=1).double().log(), -torch.inf)
    logprobs = torch.where(num_infinite > 0, shares, logprobs)
    usable = ~rows.isnan().any(1, keepdim=True) & (values[:, :1] > -torch.inf)
    goes_on = usable.reshape(requests, depth, 1).to(torch.int64).cumprod(1) > 0  # a bad row ends the trellis before it
    listed = goes_on & (values > -torch.inf).reshape(requests, depth, k)
    listed = listed & (logprobs > -torch.inf).reshape(requests, depth, k)
    return DeviceTrellis(
        torch.where(listed, ids.reshape(requests, depth, k), -1),
        torch.where(listed, logprobs.reshape(requests, depth, k), -torch.inf),
    )


def expand_on_device(trellis: DeviceTrellis, max_nodes: int) -> DeviceOrder:
    """The first `max_nodes` nodes of every request; the same order as `selector.search.expansion.expand`, ties included."""
    token_ids, by_token = trellis.token_ids.sort(dim=2, stable=True)
    requests, depth, k = token_ids.shape
    conditional = trellis.log_edges.dim() == 4
    log_edges = torch.where(trellis.log_edges > -torch.inf, trellis.log_edges, -torch.inf)  # NaN never enters
    device = token_ids.device
    reach = torch.zeros(requests, 1, dtype=torch.float64, device=device)
    columns = torch.zeros(requests, 1, dtype=torch.int64, device=device)  # each kept parent's candidate, before sorting
    levels = []
    for d in range(depth):
        edges = log_edges[:, d]  # (R, K) or (R, parent, K)
        rows = edges.gather(1, columns.unsqueeze(2).expand(-1, -1, k)) if conditional else edges.unsqueeze(1)
        rows = rows.gather(2, by_token[:, d].unsqueeze(1).expand(-1, rows.shape[1], -1))
        num_parents = reach.shape[1]
        table = (reach.unsqueeze(2) + rows).transpose(1, 2)  # (R, K, parents): by token, then by parent
        order = table.reshape(requests, -1).sort(dim=1, descending=True, stable=True)
        kept = min(max_nodes, k * num_parents)
        reach, index = order.values[:, :kept], order.indices[:, :kept]
        parents, ranks = index % num_parents, index // num_parents
        levels.append((reach, token_ids[:, d].gather(1, ranks), parents))
        columns = by_token[:, d].gather(1, ranks)
    return _merge_levels(levels, max_nodes, requests, device)


def _merge_levels(
    levels: list[tuple[Tensor, Tensor, Tensor]], max_nodes: int, requests: int, device: torch.device
) -> DeviceOrder:
    """One order from the levels' orders; parents, given as ranks within the level above, become slots."""
    if not levels:
        nothing = torch.zeros(requests, max_nodes, dtype=torch.int64, device=device)
        none = torch.full((requests, max_nodes), -torch.inf, dtype=torch.float64, device=device)
        return DeviceOrder(nothing - 1, nothing, nothing + 1, none, nothing.sum(1))
    reach, tokens = torch.cat([level[0] for level in levels], 1), torch.cat([level[1] for level in levels], 1)
    above, depths, start = [levels[0][2] - 1], [torch.ones_like(levels[0][2])], 0
    for d in range(1, len(levels)):
        above.append(levels[d][2] + start)
        depths.append(torch.full_like(levels[d][2], d + 1))
        start += levels[d - 1][0].shape[1]
    order = reach.sort(dim=1, descending=True, stable=True)
    everywhere = torch.arange(1, reach.shape[1] + 1, device=device).expand(requests, -1)
    slots = torch.zeros_like(everywhere).scatter(1, order.indices, everywhere)
    up = torch.cat(above, 1)
    parents = torch.where(up >= 0, slots.gather(1, up.clamp(min=0)), 0)
    count = min(max_nodes, reach.shape[1])
    index = order.indices[:, :count]
    log_reach = order.values[:, :count]
    fields = [tokens.gather(1, index), parents.gather(1, index), torch.cat(depths, 1).gather(1, index)]
    if count < max_nodes:
        padding = (0, max_nodes - count)
        fields = [torch.nn.functional.pad(field, padding) for field in fields]
        log_reach = torch.nn.functional.pad(log_reach, padding, value=-torch.inf)
    return DeviceOrder(fields[0], fields[1], fields[2], log_reach, (log_reach > -torch.inf).sum(1))


def choose_sizes(
    order: DeviceOrder, rule: int, round_seconds: Tensor | None = None, price: Tensor | float = 0.0, bonus: Tensor | float = 1.0
) -> Tensor:
    """(R,) int64 nodes to take of every order; rules, `price` and `bonus` as `selector.search.expansion.expand`.

    Args:
        round_seconds: (N + 1,) or (R, N + 1) float64 on the device, seconds of a round with n nodes at index n. A curve
            that does not rise cannot size a tree: check that on the host, once (`selector.policies.is_flat`).
    """
    if rule == BUDGET or round_seconds is None:
        return order.sizes
    start = torch.zeros_like(order.log_reach[:, :1]) + bonus
    total = torch.cat([start, order.log_reach.exp()], 1).cumsum(1)
    value = total - price * round_seconds if rule == PRICED else total / round_seconds
    n = torch.arange(value.shape[1], device=value.device).expand(value.shape[0], -1)
    if rule == FIRST_DESCENT:
        falls = ~(value[:, 1:] > value[:, :-1])
        first = torch.where(falls, n[:, :-1], value.shape[1] - 1).amin(1)
        return torch.minimum(first, order.sizes)
    value = torch.where(n <= order.sizes.unsqueeze(1), value, -torch.inf)
    best = value.amax(1, keepdim=True)
    return torch.where(value == best, n, value.shape[1]).amin(1)  # of equal values the smallest tree


def build_trees(
    order: DeviceOrder, num_nodes: Tensor, max_depth: int, root_tokens: Tensor | None = None, pad_token: int = 0
) -> DeviceTrees:
    """Trees of the first `num_nodes` (R,) nodes of every order; `root_tokens` (R,) int64 go into slot 0 (else -1)."""
    requests, size = order.token_ids.shape
    device = order.token_ids.device
    is_node = torch.arange(size, device=device) < num_nodes.unsqueeze(1)
    roots = torch.full((requests, 1), -1, dtype=torch.int64, device=device) if root_tokens is None else root_tokens.unsqueeze(1)
    no_parent = torch.full((requests, 1), -1, dtype=torch.int64, device=device)
    parents = torch.cat([no_parent, torch.where(is_node, order.parents, 0)], 1)
    depths = torch.nn.functional.pad(torch.where(is_node, order.depths, 1), (1, 0))
    reach = torch.nn.functional.pad(torch.where(is_node, order.log_reach.exp(), 0.0), (1, 0), value=1.0)
    mask = torch.eye(size + 1, dtype=torch.bool, device=device).expand(requests, -1, -1).clone()
    up = parents.clamp(min=0)
    ancestor = up
    for _ in range(max_depth):
        mask.scatter_(2, ancestor.unsqueeze(2), True)
        ancestor = up.gather(1, ancestor)
    tokens = torch.cat([roots, torch.where(is_node, order.token_ids, pad_token)], 1)
    return DeviceTrees(tokens, parents, depths, reach, num_nodes, mask, torch.zeros_like(num_nodes, dtype=torch.bool))


def search_on_device(
    logits: Tensor,
    max_nodes: int,
    policy: str = "fixed",
    round_seconds: Tensor | None = None,
    price: Tensor | float = 0.0,
    top_k: int = 16,
    root_tokens: Tensor | None = None,
    bonus: Tensor | float = 1.0,
) -> DeviceTrees:
    """From draft logits (R, depth, vocab) to trees of at most `max_nodes` nodes, all on the logits' device.

    Args:
        policy: "fixed" takes max_nodes; "exact", "priced" and "unimodal" as the selector's policies, on `round_seconds`.
        round_seconds: (N + 1,) or (R, N + 1) float64, see `choose_sizes`.
        price, bonus: a number, or a tensor of shape () or (R, 1) that may change between replays of a captured graph.

    Raises PolicyError for another policy, or one that lacks its curve.
    """
    if policy not in RULES:
        raise PolicyError(f"policy is {policy!r}; on a device allowed are {', '.join(RULES)}")
    if policy != "fixed" and round_seconds is None:
        raise PolicyError(f"policy {policy!r} needs round_seconds")
    trellis = trellis_from_logits(logits, top_k)
    order = expand_on_device(trellis, max_nodes)
    num_nodes = choose_sizes(order, RULES[policy], round_seconds, price, bonus)
    trees = build_trees(order, num_nodes, max(1, logits.shape[1]), root_tokens)
    if logits.shape[1] == 0 or trellis.token_ids.shape[2] == logits.shape[2]:
        return trees
    last = trellis.token_ids[:, :, -1]  # columns fall in probability
    is_last = order.token_ids == last.gather(1, order.depths.clamp(min=1) - 1)
    taken = torch.arange(max_nodes, device=logits.device) < num_nodes.unsqueeze(1)
    return replace(trees, last_rank_used=(is_last & taken).any(1))
