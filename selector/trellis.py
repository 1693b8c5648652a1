"""The drafter's proposals for one round: K candidates per depth and the probabilities of the edges between them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.errors import TrellisError
from selector.search.topk import ROW_NAN, ROW_OK, top_k_log_softmax

MASS_TOLERANCE = 1e-4  # edge probabilities out of one parent may exceed 1 by this much (float32 sums)


@dataclass(frozen=True)
class Trellis:
    """Candidates and edge log-probabilities of one round (design: a trellis).

    Attributes:
        token_ids: (depth, K) int64; distinct within a depth; -1 pads, with a log edge of -inf.
        log_edges: (depth, K) float64 where positions are independent: log Pr(accept candidate | its parent reached);
            or (depth, K, K) float64 where entry [d, p, c] is the edge from candidate p of depth d (0-based: of the row
            before) to candidate c of row d. Row 0 has one parent only, the root: its parent index is 0.
            Probability 0 is -inf: such a candidate never enters a tree.
        num_nan_rows: rows of logits that held NaN; the trellis ends before the first of them.
    """

    token_ids: NDArray[np.int64]
    log_edges: NDArray[np.float64]
    num_nan_rows: int = 0

    def __post_init__(self) -> None:
        """Check shapes; raises TrellisError."""
        ids, edges = self.token_ids, self.log_edges
        if ids.ndim != 2 or edges.ndim not in (2, 3):
            shapes = f"{ids.shape}, {edges.shape}"
            raise TrellisError(f"token_ids must be (depth, K), log_edges (depth, K) or (depth, K, K); got {shapes}")
        if edges.shape[0] != ids.shape[0] or any(size != ids.shape[1] for size in edges.shape[1:]):
            raise TrellisError(f"log_edges {edges.shape} do not fit token_ids {ids.shape}")
        if ids.shape[0] > 0 and ids.shape[1] == 0:
            raise TrellisError(f"a trellis needs at least one candidate per depth, got token_ids of shape {ids.shape}")

    @property
    def depth(self) -> int:
        """Number of drafted positions."""
        return int(self.token_ids.shape[0])

    @property
    def top_k(self) -> int:
        """Candidates per depth, K."""
        return int(self.token_ids.shape[1])

    @property
    def edges_by_parent(self) -> NDArray[np.float64]:
        """Edges as (depth, P, K) with P = 1 where every parent has the same children, else P = K."""
        return self.log_edges[:, None, :] if self.log_edges.ndim == 2 else self.log_edges

    @classmethod
    def from_logits(cls, logits: Any, top_k: int = 16) -> Trellis:
        """Top-k of every row, normalised over the full vocabulary.

        Args:
            logits: (depth, vocab), numpy (read as float32) or torch of any float type and device.
            top_k: candidates per depth; capped at vocab.

        A row with NaN, or without any logit above -inf, ends the trellis before it. Logits of -inf never become
        candidates. Rows holding +inf give those ids equal shares of the whole mass. Ties go to the lower id.
        Raises TrellisError for a wrong shape or top_k < 1.
        """
        if top_k < 1:
            raise TrellisError(f"top_k must be at least 1, got {top_k}")
        if not hasattr(logits, "shape"):
            raise TrellisError(f"logits must be an array or tensor of shape (depth, vocab), got {type(logits).__name__}")
        if len(logits.shape) != 2:
            raise TrellisError(f"logits must be (depth, vocab), got shape {tuple(logits.shape)}")
        if logits.shape[0] == 0 or logits.shape[1] == 0:
            return cls(np.zeros((0, 1), np.int64), np.zeros((0, 1)))
        if hasattr(logits, "detach") and logits.device.type != "cpu":
            token_ids, logprobs, status = _top_k_on_device(logits.detach().float(), top_k)
        else:
            token_ids, logprobs, status = top_k_log_softmax(_as_float32(logits), top_k)
        bad = np.flatnonzero(status != ROW_OK)
        depth = int(bad[0]) if bad.size else len(status)
        return cls(token_ids[:depth], logprobs[:depth], int(np.count_nonzero(status == ROW_NAN)))

    @classmethod
    def from_probabilities(cls, token_ids: ArrayLike, probabilities: ArrayLike) -> Trellis:
        """A trellis from edge probabilities, (depth, K) or (depth, K, K) (see `log_edges`); what stands at a pad is not read.

        Raises TrellisError for NaN, values outside [0, 1], siblings whose sum exceeds 1, or repeated ids in a row.
        """
        ids = np.asarray(token_ids, np.int64)
        p = np.asarray(probabilities, np.float64)
        if ids.ndim == 1:
            ids, p = ids[:, None], p[:, None] if p.ndim == 1 else p
        cls(ids, p)  # shapes
        p = np.where((ids if p.ndim == 2 else ids[:, None, :]) >= 0, p, 0.0)
        if not np.all((p >= 0) & (p <= 1)):
            raise TrellisError("edge probabilities must lie in [0, 1] (no NaN)")
        with np.errstate(divide="ignore"):
            trellis = cls(ids, np.log(p))
        if p.size and p.sum(axis=-1).max() > 1 + MASS_TOLERANCE:
            raise TrellisError(f"edge probabilities out of one parent sum to {p.sum(axis=-1).max():.6g}, more than 1")
        for d, row in enumerate(ids):
            real = row[row >= 0]
            if np.unique(real).size != real.size:
                raise TrellisError(f"depth {d + 1} names a token twice")
        return trellis


def _as_float32(logits: Any) -> NDArray[np.float32]:
    """Logits on the processor as a C-contiguous float32 array; bfloat16 is widened here, without torch's thread pool."""
    if not hasattr(logits, "detach"):
        rows = np.ascontiguousarray(logits, np.float32)
        return rows if rows.flags.writeable else rows.copy()  # compiled code has one version, for writable arrays
    tensor = logits.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        bits = tensor.contiguous().view(sys.modules["torch"].int16).numpy()
        return (bits.astype(np.int32) << 16).view(np.float32)
    return np.ascontiguousarray(tensor.float().numpy(), np.float32)


def _top_k_on_device(logits: Any, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The same as `top_k_log_softmax` for a float32 torch tensor on an accelerator: only k values per row travel."""
    k = min(top_k, int(logits.shape[1]))
    normaliser = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(k, dim=-1)
    finite = normaliser.isfinite()
    if not bool(finite.all()):  # rare: NaN or infinities; let the exact CPU path decide
        return top_k_log_softmax(np.ascontiguousarray(logits.cpu().numpy()), top_k)
    logprobs = (values.double() - normaliser.double()).cpu().numpy()
    token_ids = ids.cpu().numpy().astype(np.int64)
    order = np.lexsort((token_ids, -logprobs), axis=-1)
    logprobs, token_ids = np.take_along_axis(logprobs, order, -1), np.take_along_axis(token_ids, order, -1)
    token_ids[np.isneginf(logprobs)] = -1
    return token_ids, logprobs, np.zeros(len(token_ids), np.int64)
