"""From draft logits on an accelerator to trellises: an exact top-k, ties by token id, normalised over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.device.tables import DeviceTrellis

MAX_CHUNK_BYTES = 2**28  # of 64-bit sort keys made at a time by `top_k_by_id`
_LOW_BITS = 0xFFFFFFFF


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
