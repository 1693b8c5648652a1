"""How many nodes of an order to take, and the trees of them with parents, depths, reach and mask."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.device.tables import DeviceOrder, DeviceTrees
from selector.search.kernels import BUDGET, FIRST_DESCENT, PRICED


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
    known = (n <= order.sizes.unsqueeze(1)) & ~value.isnan()  # a NaN among the seconds never wins; all of them give the root
    value = torch.where(known, value, -torch.inf)
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
