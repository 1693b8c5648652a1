"""Best-first order on an accelerator, level by level.

Of the nodes of one depth only the best `max_nodes` can be in the tree, and only under parents that are such nodes
themselves. So each level is a table of (kept parents) x (K candidates) and one stable sort, and a last stable sort over all
levels gives the order of nodes. The tables are laid out so that stability alone settles ties as `selector.search.expansion`
does: a row of candidates by token id, parents by their own rank, levels by depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.device.tables import DeviceOrder, DeviceTrellis


def expand_on_device(trellis: DeviceTrellis, max_nodes: int) -> DeviceOrder:
    """The first `max_nodes` nodes of every request; the same order as `selector.search.expansion.expand`, ties included."""
    token_ids, by_token = trellis.token_ids.sort(dim=2, stable=True)
    requests, depth, k = token_ids.shape
    conditional = trellis.log_edges.dim() == 4
    log_edges = torch.where(trellis.log_edges > -torch.inf, trellis.log_edges, -torch.inf)  # NaN never enters
    if not conditional:
        log_edges = log_edges.unsqueeze(2)  # one row for all parents
    log_edges = log_edges.gather(3, by_token.unsqueeze(2).expand(-1, -1, log_edges.shape[2], -1))
    device = token_ids.device
    reach = torch.zeros(requests, 1, dtype=torch.float64, device=device)
    columns = torch.zeros(requests, 1, dtype=torch.int64, device=device)  # each kept parent's candidate, before sorting
    levels = []
    for d in range(depth):
        rows = log_edges[:, d]  # (R, 1 or K parents, K)
        rows = rows.gather(1, columns.unsqueeze(2).expand(-1, -1, k)) if conditional else rows
        num_parents = reach.shape[1]
        table = (reach.unsqueeze(2) + rows).transpose(1, 2)  # (R, K, parents): by token, then by parent
        order = table.reshape(requests, -1).sort(dim=1, descending=True, stable=True)
        kept = min(max_nodes, k * num_parents)
        reach, index = order.values[:, :kept], order.indices[:, :kept]
        parents, ranks = index % num_parents, index // num_parents
        levels.append((reach, token_ids[:, d].gather(1, ranks), parents))
        columns = by_token[:, d].gather(1, ranks) if conditional else columns
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
