"""The selector's structures for a batch of requests on an accelerator: trellises, orders of nodes, trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selector.tree import DraftTree


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
