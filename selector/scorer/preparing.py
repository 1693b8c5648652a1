"""What training starts from: texts split so that every kind is on both sides, their groups, and the embedding reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.scorer.groups import Groups, make_groups
from selector.scorer.samples import Samples, collect
from selector.scorer.settings import ScorerSettings
from selector.trace import Trace

PCA_ROWS = 20_000  # tokens of the vocabulary that the components are found from


def principal_components(embedding: NDArray[np.floating], count: int, seed: int = 0) -> tuple[NDArray, NDArray]:
    """Mean (H,) and components (H, r) of the embedding, scaled to variance lambda^(1/2) per component, total r."""
    vocab = len(embedding)
    chosen = np.random.default_rng(seed).choice(vocab, PCA_ROWS, replace=False) if vocab > PCA_ROWS else np.arange(vocab)
    rows = np.asarray(embedding[np.sort(chosen)], np.float32)
    mean = rows.mean(axis=0)
    values, vectors = np.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    values, vectors = np.maximum(values[::-1][:count], 1e-12), vectors[:, ::-1][:, :count]
    scale = values**-0.25
    return mean, (vectors * (scale / np.sqrt(np.mean(values**0.5)))).astype(np.float32)


def split_texts(trace: Trace, settings: ScorerSettings) -> tuple[list[int], list[int]]:
    """Indices of texts to train on and to keep aside, every data set in both where it has enough texts."""
    order = _by_dataset(trace, settings.seed)
    aside = max(1, round(settings.validation_share * len(order)))
    picked = {order[int((j + 0.5) * len(order) / aside)] for j in range(aside)}
    return [i for i in range(len(order)) if i not in picked], sorted(picked)


def deal_texts(trace: Trace, num_folds: int, seed: int) -> list[list[int]]:
    """Indices of texts dealt out to folds, every data set to each where it has enough texts; no empty folds."""
    order = _by_dataset(trace, seed)
    return [sorted(order[i::num_folds]) for i in range(min(num_folds, len(order)))]


def _by_dataset(trace: Trace, seed: int) -> list[int]:
    order = np.random.default_rng(seed).permutation(len(trace.texts)).tolist()
    return sorted(order, key=lambda i: trace.texts[i].dataset or "")


@dataclass(frozen=True, eq=False)
class ReducedEmbedding:
    """A (vocab, hidden) table and the components that its rows are reduced to."""

    table: NDArray[np.floating]
    mean: NDArray[np.floating]
    basis: NDArray[np.float32]

    @classmethod
    def of(cls, table: NDArray[np.floating], settings: ScorerSettings) -> ReducedEmbedding:
        """The settings' number of principal components, at most all."""
        components = min(settings.embedding_components, table.shape[1])
        return cls(table, *principal_components(table, components, settings.seed))

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, components) rows of some tokens."""
        return ((self.table[tokens].astype(np.float32) - self.mean) @ self.basis).astype(np.float32)  # type: ignore[no-any-return]

    def project(self, projection: NDArray[np.floating]) -> NDArray[np.float32]:
        """(V, d) token table under a learned (components, d) projection, rounded to float16 as a scorer's file holds it."""
        matrix, chunks = self.basis @ projection, range(0, len(self.table), 8192)
        rows = [(self.table[i : i + 8192].astype(np.float32) - self.mean) @ matrix for i in chunks]
        return np.concatenate(rows).astype(np.float16).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Groups to train on and groups kept aside, on the settings' device, and the reduced rows of their tokens."""

    train: Groups
    held: Groups
    reduced: Any
    samples: tuple[Samples, Samples]


def prepare(
    torch: Any, trace: Trace, train: list[int], held: list[int], embedding: ReducedEmbedding, settings: ScorerSettings
) -> Prepared:
    """Collect both sides of a split of a trace's texts."""
    parts = trace.select(train), trace.select(held)
    samples = [collect(part, settings.top_k, settings.sharpening) for part in parts]
    tokens = np.unique(np.concatenate([np.append(s.token_ids[s.token_ids >= 0], s.roots) for s in samples]))
    reduced = torch.from_numpy(embedding.rows(tokens)).to(settings.device)
    groups = [make_groups(torch, s, part, tokens, settings) for s, part in zip(samples, parts, strict=True)]
    return Prepared(groups[0], groups[1], reduced, (samples[0], samples[1]))
