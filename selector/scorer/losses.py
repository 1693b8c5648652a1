"""The two losses of TAPS (arXiv 2606.00487, section 4.2): the local distribution, and the reach along the path."""

from __future__ import annotations

from typing import Any

LOG_SMALLEST = -60.0
REACH_MARGIN = 1e-6  # log reach is kept this far below 0 where log(1 - reach) is taken


def local_loss(torch: Any, log_q: Any, labels: Any) -> Any:
    """(G,) cross-entropy from labels (G, k + 1) to exp(log_q) (G, k + 1): their KL divergence up to a constant."""
    return -(labels * log_q.clamp(min=LOG_SMALLEST)).sum(-1)


def reach_loss(torch: Any, log_q: Any, label: Any, mask: Any) -> Any:
    """(G,) binary cross-entropy of the reach of every child on the true path's tree, summed over siblings.

    The reach of a child is the product of the true path's edges above it and its own edge; it was accepted if it is the
    true token, and was not otherwise.

    Args:
        log_q: (G, k + 1). label: (G,) true column, k for none. mask: (B, D) places of the G groups, row by row.
    """
    k = log_q.shape[1] - 1
    chosen = log_q.gather(1, label[:, None])[:, 0]
    path = torch.zeros(mask.shape, dtype=log_q.dtype, device=log_q.device).masked_scatter(mask, chosen)
    above = (path.cumsum(1) - path)[mask]
    log_reach = (above[:, None] + log_q[:, :k]).clamp(min=LOG_SMALLEST, max=-REACH_MARGIN)
    failed = torch.log(-torch.expm1(log_reach))
    index = label.clamp(max=k - 1)[:, None]
    hit = (label < k).to(log_q.dtype)
    return -failed.sum(1) - hit * (log_reach - failed).gather(1, index)[:, 0]
