"""The drafter's loss: the target's own distribution as soft label, early positions weighing more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from decoder.drafters.dflash import blocks_forward
from decoder.drafters.dflash_model import DFlashModel
from decoder.training.batches import Batch


def output_vocabulary(batch: Batch, frequent: torch.Tensor, vocab_size: int, num_random: int,
                      random: torch.Generator) -> torch.Tensor:
    """Token ids the loss is taken over: frequent ones, the batch's labels and some at random, sorted.

    The full vocabulary would cost more than the drafter itself; a softmax over a part of it is biased towards the tokens
    left out, which the random ones keep in check.
    """
    drawn = torch.randint(vocab_size, (num_random,), generator=random)
    return torch.unique(torch.cat([frequent, batch.hard.flatten(), batch.soft_ids[..., :8].flatten(), drawn]))


def position_weights(block_size: int, decay: float) -> torch.Tensor:
    """Weights exp(-(j - 1) / decay) of block positions j = 1..block_size - 1: a late token counts only behind early ones."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / decay)


class BlocksNetwork(nn.Module):
    """The drafter over a batch: hidden states (S, A, block_size - 1, hidden) of the drafted positions."""

    def __init__(self, model: DFlashModel, embedding: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.embedding = embedding

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run every block of `batch` in one pass."""
        mask_row = self.embedding[self.model.config.mask_token_id]
        features = batch.features.to(self.embedding.dtype)  # a corpus keeps them in the target's
        return blocks_forward(self.model, features, self.embedding[batch.roots], batch.anchors, mask_row)[:, :, 1:]


def drafter_loss(network: Callable[[Batch], torch.Tensor], batch: Batch, head: torch.Tensor, vocabulary: torch.Tensor,
                 weights: torch.Tensor, hard_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy and, per position, the share of drafts that name the target's token.

    `head` is the target's output matrix (vocab, hidden). The label is `hard_share` of the target's greedy token and the
    rest its distribution over its top K.
    """
    valid = batch.valid
    rows = network(batch)[valid]  # (N, hidden)
    column = torch.full((head.shape[0],), -1, dtype=torch.long, device=rows.device)
    column[vocabulary] = torch.arange(vocabulary.numel(), device=rows.device)
    logits = nn.functional.linear(rows, head[vocabulary]).float()
    logprobs = torch.log_softmax(logits, dim=-1)
    hard = column[batch.hard[valid]]
    soft_columns = column[batch.soft_ids[valid]]
    inside = soft_columns >= 0
    soft = batch.soft_probs[valid] * inside
    soft = soft / soft.sum(-1, keepdim=True)
    picked = logprobs.gather(1, soft_columns.clamp(min=0))
    each = -(1 - hard_share) * (soft * picked).sum(-1) - hard_share * logprobs.gather(1, hard[:, None])[:, 0]
    weight = weights.expand_as(valid)[valid]
    loss = (each * weight).sum() / weight.sum()
    with torch.no_grad():
        right = torch.zeros_like(valid, dtype=torch.float32)
        right[valid] = (logprobs.argmax(-1) == hard).float()
        accuracy = right.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    return loss, accuracy
