"""What anything that scores the edges of a trellis looks like from outside, and how it is asked: once, or over many anchors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selector.trellis import Trellis

CHUNK_BYTES = 64 * 2**20  # of edges held at once while a trace is scored


class EdgeScorer(Protocol):
    """Path-conditioned chances of acceptance; `selector.scorer.Scorer` is one."""

    @property
    def top_k(self) -> int:
        """Candidates per depth that are scored; the others never enter a tree."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What it was trained for: target, drafter, block_size, ..."""

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise an error that names the first field known on both sides that differs."""

    def edges(
        self, token_ids: NDArray[np.int64], log_probs: NDArray[np.float64], root_token_ids: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Log Pr(accept candidate | parent reached) for a batch of trellises.

        Args:
            token_ids: (B, depth, K), -1 pads. log_probs: (B, depth, K) as drafted, -inf pads. root_token_ids: (B,).

        Returns (B, depth, k, k) float64, k = min(K, top_k): entry [b, d, p, c] is the edge from candidate p of the row
        before to candidate c of row d; row 0 has parent 0 only, the root. -inf pads.
        """

    def save(self, path: Any) -> Any:
        """Write it as one file."""


def scored(scorer: EdgeScorer, trellis: Trellis, root_token: int) -> Trellis:
    """The path-conditioned trellis of one round, from a marginal one."""
    edges = scorer.edges(trellis.token_ids[None], trellis.log_edges[None], np.array([root_token], np.int64))[0]
    return Trellis(np.ascontiguousarray(trellis.token_ids[:, : edges.shape[2]]), edges, trellis.num_nan_rows)


def score_chunks(
    scorer: EdgeScorer, token_ids: NDArray[np.int64], log_probs: NDArray[np.float64], root_token_ids: NDArray[np.int64]
) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Edges of many anchors, (B, depth, k, k) a chunk, so that a long trace fits in memory; slices are in order."""
    anchors, depth, top_k = token_ids.shape
    k = min(top_k, scorer.top_k)
    size = max(1, CHUNK_BYTES // max(8 * depth * k * k, 1))
    for start in range(0, anchors, size):
        part = slice(start, min(start + size, anchors))
        yield part, scorer.edges(token_ids[part], log_probs[part], root_token_ids[part])


def measure_scoring_seconds(
    scorer: EdgeScorer,
    token_ids: NDArray[np.int64],
    log_probs: NDArray[np.float64],
    root_token_ids: NDArray[np.int64],
    repeats: int = 50,
) -> float:
    """Median seconds of scoring one round here, over anchors (A, depth, K) taken evenly; 0 without any."""
    chosen = np.linspace(0, len(token_ids) - 1, repeats).astype(int).tolist() if len(token_ids) else []
    seconds: list[float] = []
    for place, anchor in enumerate([*chosen[:3], *chosen]):  # the first few load code and weights, and are dropped
        begun = time.perf_counter()
        scorer.edges(token_ids[anchor][None], log_probs[anchor][None], root_token_ids[anchor : anchor + 1])
        if place >= 3:
            seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds)) if seconds else 0.0
