"""From draft logits on an accelerator to trellises: an exact top-k, ties by token id, normalised over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.device.tables import DeviceTrellis
from selector.errors import PolicyError

MAX_CHUNK_BYTES = 2**28  # of float32 made at a time by `top_k_by_id`
MAX_VOCAB = 2**24  # ids up to here are exact in float32


def top_k_by_id(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row of (rows, vocab) float32 and their ids; of equal values the lower ids, in that order.

    `torch.topk` leaves ties open, so a second one finds the lowest ids that hold the k-th value. Rows with NaN give some
    values and ids. (64-bit keys of value and id would do it in one pass, over three times as many bytes.)
    """
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise PolicyError(f"a search on a device takes vocabularies of at most {MAX_VOCAB} tokens, got {vocab}")
    step = max(1, MAX_CHUNK_BYTES // (4 * vocab))
    parts = [_top_k_of_chunk(logits[start : start + step], k) for start in range(0, max(rows, 1), step)]
    values, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    by_id = ids.sort(dim=1)
    order = values.gather(1, by_id.indices).sort(dim=1, descending=True, stable=True)
    return order.values, by_id.values.gather(1, order.indices)


def _top_k_of_chunk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of `top_k_by_id`, in no order of ids."""
    vocab = logits.shape[1]
    values, ids = logits.topk(k, dim=1)
    last = values[:, -1:]
    falling = torch.arange(vocab - 1, -1, -1, device=logits.device, dtype=torch.float32)
    tied = vocab - 1 - torch.where(logits == last, falling, -1.0).topk(k, dim=1).values.long()  # lowest ids first
    above = values > last
    place = torch.arange(k, device=logits.device) - above.sum(1, keepdim=True)
    # Of two zeros + 0.0 makes one: a sort by bits would tell them apart.
    return values + 0.0, torch.where(above, ids, tied.gather(1, place.clamp(min=0)).clamp(max=vocab - 1))


def trellis_from_logits(logits: Tensor, top_k: int) -> DeviceTrellis:
    """Best candidates of every row, normalised over the vocabulary; rules as `Trellis.from_logits`.

    Args:
        logits: (R, depth, vocab) of any float type. top_k: candidates per depth; capped at vocab.
    """
    requests, depth, vocab = logits.shape
    k = min(top_k, vocab)
    rows = logits.reshape(-1, vocab).float()
    values, ids = top_k_by_id(rows, k)
    normaliser = rows.logsumexp(1, keepdim=True).double()  # NaN where a row holds one
    logprobs = values.double() - normaliser
    num_infinite = (rows == torch.inf).sum(1, keepdim=True)  # such a row says nothing but that these ids share all the mass
    shares = torch.where(values == torch.inf, -num_infinite.clamp(min=1).double().log(), -torch.inf)
    logprobs = torch.where(num_infinite > 0, shares, logprobs)
    usable = ~normaliser.isnan() & (values[:, :1] > -torch.inf)
    goes_on = usable.reshape(requests, depth, 1).to(torch.int64).cumprod(1) > 0  # a bad row ends the trellis before it
    listed = goes_on & (values > -torch.inf).reshape(requests, depth, k)
    listed = listed & (logprobs > -torch.inf).reshape(requests, depth, k)
    return DeviceTrellis(
        torch.where(listed, ids.reshape(requests, depth, k), -1),
        torch.where(listed, logprobs.reshape(requests, depth, k), -torch.inf),
    )
