"""How good a drafter is on texts it has not seen: by position from random roots, and replayed as decoding would go."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from decoder.drafters.dflash import DFlashDrafter
from decoder.training.corpus import Corpus, Text


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures. Lists have one entry per drafted position, None where no text was long enough to tell.

    `accuracy`, `recall_at_8` over all roots; `chain_tokens_per_round` in replay, the bonus token counted, where every
    round starts behind the last rejection; `random_root_tokens_per_round` from all roots alike, always the more
    flattering figure.
    """

    accuracy: list[float | None]
    recall_at_8: list[float | None]
    chain_tokens_per_round: float
    random_root_tokens_per_round: float
    num_texts: int
    num_roots: int

    def as_dict(self) -> dict[str, object]:
        """Plain types for JSON."""
        return asdict(self)


def chain_replay(right: np.ndarray) -> tuple[int, int]:
    """Rounds and committed tokens of greedy chain decoding over one text.

    `right` (A, D) says whether the drafter's first choice for the j-th token after root a is the target's; tokens past
    the end of the text count as wrong.
    """
    root, rounds, tokens = 0, 0, 0
    while root < right.shape[0] - 1:
        accepted = int(np.cumprod(right[root]).sum())
        step = min(accepted + 1, right.shape[0] - 1 - root)
        root, rounds, tokens = root + step, rounds + 1, tokens + step
    return rounds, tokens


@torch.inference_mode()
def evaluate(drafter: DFlashDrafter, corpus: Corpus, texts: list[Text]) -> Evaluation:
    """Draft at every root of every text and compare with what the target then said."""
    depth, count = drafter.block_size - 1, min(8, len(drafter.embedding))
    hits, recalls, totals = np.zeros(depth), np.zeros(depth), np.zeros(depth)
    rounds = tokens = roots = 0
    run_lengths = 0.0
    for text in texts:
        row = corpus.load(text)
        anchors = torch.arange(text.num_prompt_tokens, text.num_tokens)
        features = row.hidden.to(drafter.embedding)
        hidden = drafter.draft_hidden_at(features, row.token_ids.long().to(features.device), anchors.to(features.device))
        top = torch.stack([drafter.model.logits(h, drafter.head).topk(count, dim=-1).indices for h in hidden]).cpu()  # (A, D, 8)
        places = anchors[:, None] + torch.arange(1, depth + 1)
        valid = places < text.num_tokens
        truth = row.token_ids.long()[places.clamp(max=text.num_tokens - 1)]
        right = ((top[..., 0] == truth) & valid).numpy()
        recall = ((top == truth[..., None]).any(-1) & valid).numpy()
        hits, recalls, totals = hits + right.sum(0), recalls + recall.sum(0), totals + valid.numpy().sum(0)
        text_rounds, text_tokens = chain_replay(right)
        rounds, tokens, roots = rounds + text_rounds, tokens + text_tokens, roots + len(anchors) - 1
        run_lengths += float(np.cumprod(right[:-1], axis=1).sum()) + len(anchors) - 1
    return Evaluation(_shares(hits, totals), _shares(recalls, totals), round(tokens / max(rounds, 1), 4),
                      round(run_lengths / max(roots, 1), 4), len(texts), roots)


def _shares(counts: np.ndarray, totals: np.ndarray) -> list[float | None]:
    return [round(float(count / total), 4) if total else None for count, total in zip(counts, totals, strict=True)]
