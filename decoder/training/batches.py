"""Training batches: a few texts, many roots in each, with soft labels for every position of every block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decoder.training.corpus import Corpus, Text, TextArrays


@dataclass
class Batch:
    """Padded arrays of S texts with A roots each, blocks of B positions, K labels a position.

    `features` (S, L, F), `roots` (S, A) root token ids, `anchors` (S, A) their positions,
    `hard` (S, A, B-1) the target's tokens, `soft_ids`, `soft_probs` (S, A, B-1, K), `valid` (S, A, B-1).
    """

    features: torch.Tensor
    roots: torch.Tensor
    anchors: torch.Tensor
    hard: torch.Tensor
    soft_ids: torch.Tensor
    soft_probs: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def root_weights(arrays: TextArrays, hardness: float) -> np.ndarray:
    """Sampling weight of every possible root of a text.

    Decoding restarts after a rejection, at tokens the target itself found hard to foresee; uniform roots would train on
    easier places than decoding meets. A root's weight is 1 - hardness x (probability that the target gave to it).
    """
    text = arrays.text
    index = np.arange(text.first_root, text.first_root + text.num_roots) - text.num_prompt_tokens
    top = torch.exp(arrays.label_logprobs[index, 0].float()).numpy()
    return 1.0 - hardness * np.clip(top, 0.0, 1.0)


def make_batch(corpus: Corpus, texts: list[Text], num_roots: int, block_size: int, hardness: float,
               random: np.random.Generator) -> Batch:
    """Draw `num_roots` roots in every text and gather what the loss needs."""
    rows = [corpus.load(text) for text in texts]
    length = max(row.text.num_tokens for row in rows)
    steps = torch.arange(1, block_size)
    features = torch.zeros(len(rows), length, rows[0].hidden.shape[1], dtype=rows[0].hidden.dtype)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("roots", "anchors", "hard", "soft_ids", "soft_probs", "valid")}
    for i, row in enumerate(rows):
        # The last token of a text was never forwarded, so it has no hidden state; no block may look at it either.
        features[i, : row.hidden.shape[0]] = row.hidden
        weights = root_weights(row, hardness)
        drawn = random.choice(len(weights), num_roots, replace=len(weights) < num_roots, p=weights / weights.sum())
        anchors = torch.from_numpy(drawn) + row.text.first_root
        places = anchors[:, None] + steps  # (A, B-1)
        valid = places < row.text.num_tokens
        places = places.clamp(max=row.text.num_tokens - 1)
        labels = places - row.text.num_prompt_tokens
        parts["roots"].append(row.token_ids[anchors].long())
        parts["anchors"].append(anchors)
        parts["hard"].append(row.token_ids[places].long())
        parts["soft_ids"].append(row.label_ids[labels].long())
        parts["soft_probs"].append(torch.softmax(row.label_logprobs[labels].float(), -1))
        parts["valid"].append(valid)
    return Batch(features, **{name: torch.stack(values) for name, values in parts.items()})


def draw_texts(texts: list[Text], count: int, random: np.random.Generator) -> list[Text]:
    """Draw texts in proportion to the roots they offer."""
    sizes = np.array([text.num_roots for text in texts], dtype=np.float64)
    return [texts[i] for i in random.choice(len(texts), count, p=sizes / sizes.sum())]
