"""The scorer in torch: features of a round and logits of its edges, for training and for accelerators.

The first layer is factored: hidden = relu(parent part + child part), so that only the last sum runs over pairs of
parents and children. The logit is a residual on the drafter's own log-probability:

    logit(p -> c, d) = slope_d log p_d(c) + gain_d (out . relu(H_d(p) + G(c)) + scale_d <a_p, b_c> + same_d [p = c])
    logit(none | p, d) = slope_d log(1 - sum of p_d) + gain_d (none_out . relu(H_d(p) + none_hidden_d) + none_bias_d)
                         + none_offset_d

with a, b the projected token tables; slope, gain and none_offset are the calibration, 1, 1 and 0 while the rest is
trained. With zero output weights this is the drafter's marginals. `inference.py` is the same in compiled form; a change
in one is a change in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_ROW, NUM_PARENT, NUM_CHILD = 8, 6, 7
LOG_FLOOR, ODDS_LIMIT, MISSING_FLOOR = -16.0, 16.0, 1e-5
SHAPES: dict[str, tuple[str, ...]] = {  # parameters beside the token tables; d token features, h hidden, D depths
    "parent_in": ("d", "h"),
    "child_in": ("d", "h"),
    "row_features": ("row", "h"),
    "parent_features": ("parent", "h"),
    "child_features": ("child", "h"),
    "depth_bias": ("D", "h"),
    "out": ("h",),
    "scale": ("D",),
    "same": ("D",),
    "none_hidden": ("D", "h"),
    "none_out": ("h",),
    "none_bias": ("D",),
}
ZERO_AT_START = {"out", "same", "none_out", "none_bias", "depth_bias", "scale"}


CALIBRATION = ("slopes", "gains", "none_offsets")


def shapes(num_features: int, hidden: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of a network of that size."""
    sizes = {"d": num_features, "h": hidden, "D": depth, "row": NUM_ROW, "parent": NUM_PARENT, "child": NUM_CHILD}
    return {name: tuple(sizes[letter] for letter in letters) for name, letters in SHAPES.items()}


def round_features(torch: Any, token_ids: Any, log_probs: Any, roots: Any) -> tuple[Any, Any, Any, Any]:
    """Scalar features of rounds, all from the listed log-probabilities, float32.

    Args:
        token_ids: (B, D, k) int64. log_probs: (B, D, k) float32, -inf pads. roots: (B,) int64.

    Returns:
        rows (B, D, 8), parents (B, D, k, 6) of the candidates above (row 0: the root in column 0), children (B, D, k, 7),
        log_missing (B, D).
    """
    logs = log_probs.clamp(min=LOG_FLOOR)
    p = log_probs.exp()
    missing = (1.0 - p.sum(-1)).clamp(min=MISSING_FLOOR)
    log_missing = missing.log()
    entropy = -(p * logs).sum(-1) - missing * log_missing
    top = logs[:, :, 0]
    zero = torch.zeros_like(top[:, :1])
    before = lambda x: torch.cat([zero, x[:, :-1]], 1)  # noqa: E731
    after = lambda x: torch.cat([x[:, 1:], zero], 1)  # noqa: E731
    reach = before(top.cumsum(1)).clamp(min=LOG_FLOOR)
    odds = (logs - (1.0 - p).clamp(min=1e-7).log()).clamp(-ODDS_LIMIT, ODDS_LIMIT)
    around = [before(entropy) / 2, before(top) / 4, reach / 4, after(entropy) / 2, after(top) / 4]
    rows = torch.stack([entropy / 2, top / 4, log_missing / 4, *around], -1)
    rank = torch.arange(token_ids.shape[2], device=token_ids.device, dtype=logs.dtype)
    rank = rank.expand_as(logs)
    first = (rank == 0).to(logs.dtype)
    depth = token_ids.shape[1]
    above = [_listed(torch, token_ids[:, d], token_ids[:, d - 1], logs[:, d - 1]) for d in range(1, depth)]
    below = [_listed(torch, token_ids[:, d], token_ids[:, d + 1], logs[:, d + 1]) for d in range(depth - 1)]
    absent = torch.full_like(logs[:, 0], LOG_FLOOR)
    above, below = torch.stack([absent, *above], 1), torch.stack([*below, absent], 1)
    gap = logs - top[..., None]
    order = torch.log1p(rank) / 2
    children = torch.stack([logs / 4, odds / 4, order, first, gap / 4, above / 4, below / 4], -1)
    parents = torch.stack([logs / 4, order, first, gap / 4, below / 4, torch.zeros_like(logs)], -1)
    zero_row, one_row = torch.zeros_like(logs[:, 0]), torch.ones_like(logs[:, 0])
    at_once = (_listed(torch, roots[:, None], token_ids[:, 0], logs[:, 0]) / 4).expand_as(zero_row)
    root = torch.stack([zero_row, zero_row, one_row, zero_row, at_once, one_row], -1)
    return rows, torch.cat([root[:, None], parents[:, :-1]], 1), children, log_missing


def _listed(torch: Any, tokens: Any, others: Any, logs: Any) -> Any:
    """(B, n) log-probability that `tokens` (B, n) have in the row of `others` (B, k), the floor where not listed."""
    same = (tokens[:, :, None] == others[:, None, :]) & (tokens >= 0)[:, :, None]
    return torch.where(same, logs[:, None, :], torch.full_like(logs, LOG_FLOOR)[:, None, :]).amax(-1)


def group_residuals(
    torch: Any,
    weights: Mapping[str, Any],
    depth: Any,
    parent_vectors: Any,
    child_vectors: Any,
    features: tuple[Any, Any, Any],
    same: Any,
) -> Any:
    """What the network adds to the draft's logits, (G, P, k + 1) of G groups: P parents, k children and none of these.

    Args:
        weights: by the names of SHAPES. depth: (G,) int64. parent_vectors: (G, P, d). child_vectors: (G, k, d).
        features: (G, 8), (G, P, 6), (G, k, 7). same: (G, P, k) parent is child.
    """
    rows, parents, children = features
    row_part = rows @ weights["row_features"] + weights["depth_bias"][depth]
    parent_part = parent_vectors @ weights["parent_in"] + parents @ weights["parent_features"] + row_part[:, None]
    child_part = child_vectors @ weights["child_in"] + children @ weights["child_features"]
    hidden = torch.relu(parent_part[:, :, None, :] + child_part[:, None, :, :])
    products = parent_vectors @ child_vectors.transpose(1, 2)
    scores = hidden @ weights["out"] + weights["scale"][depth][:, None, None] * products
    scores = scores + weights["same"][depth][:, None, None] * same
    none = torch.relu(parent_part + weights["none_hidden"][depth][:, None]) @ weights["none_out"]
    none = none + weights["none_bias"][depth][:, None]
    return torch.cat([scores, none[:, :, None]], -1)


def edge_tensor(torch: Any, weights: Mapping[str, Any], token_ids: Any, log_probs: Any, roots: Any) -> Any:
    """(B, D, k, k) float32 calibrated log edges of rounds (B, D, k), as `Scorer.edges` has them; fixed shapes throughout."""
    logs = torch.where((token_ids < 0) | log_probs.isnan(), torch.full_like(log_probs, -torch.inf), log_probs)
    batch, depth, k = token_ids.shape
    at = torch.arange(depth, device=logs.device).clamp(max=weights["depth_bias"].shape[0] - 1).repeat(batch)
    rows, parents, children, missing = round_features(torch, token_ids, logs, roots)
    first = (torch.arange(k, device=logs.device) == 0).expand(batch, 1, k)  # the root stands in column 0
    root_row = torch.where(first, roots[:, None, None], -1)
    above, below = torch.cat([root_row, token_ids[:, :-1]], 1).reshape(-1, k), token_ids.reshape(-1, k)
    real = torch.cat([first, logs[:, :-1] > -torch.inf], 1).reshape(-1, k)
    vocab = weights["parent_table"].shape[0]
    inside = [(tokens >= 0) & (tokens < vocab) for tokens in (above, below)]
    vectors = [
        weights[name][tokens.clamp(0, vocab - 1)] * known[..., None]
        for name, tokens, known in zip(("parent_table", "child_table"), (above, below), inside, strict=True)
    ]
    same = ((above[:, :, None] == below[:, None, :]) & inside[1][:, None, :]).float()
    features = (rows.flatten(0, 1), parents.flatten(0, 1), children.flatten(0, 1))
    residuals = group_residuals(torch, weights, at, vectors[0], vectors[1], features, same)
    drafted = torch.cat([logs.reshape(-1, k), missing.reshape(-1, 1)], -1)[:, None, :]
    logits = weights["slopes"][at][:, None, None] * drafted + weights["gains"][at][:, None, None] * residuals
    logits[..., k] += weights["none_offsets"][at][:, None]
    edges = torch.log_softmax(logits, -1)[..., :k]
    return torch.where(real[:, :, None], edges, torch.full_like(edges, -torch.inf)).reshape(batch, depth, k, k)
