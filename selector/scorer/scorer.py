"""A trained scorer: chances of acceptance of every edge of a round from parent, child and the draft's statistics.

After TAPS (arXiv 2606.00487, section 4.2): q_cond(u -> v) = Pr(accept v | reach u), here as a softmax over the siblings
and none of them, scored once per trellis edge. The file holds the projected token tables, not the embedding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiles.errors import FileFormatError
from selector.errors import ScorerError
from selector.scorer.inference import Weights, score_rounds
from selector.scorer.lazy import import_torch
from selector.scorer.network import CALIBRATION, edge_tensor, shapes
from selector.tensors import read_tensors, write_tensors

SCHEMA, VERSION = "treebudget.scorer", 1
TABLES = ("parent_table", "child_table")
IDENTITY_FIELDS = ("target", "drafter", "block_size", "target_sha256", "drafter_sha256")


@dataclass(frozen=True, eq=False)
class Scorer:
    """Edge probabilities that look at the parent.

    Attributes:
        weights: float32 arrays (`inference.Weights`), calibration included.
        top_k: candidates per depth that are scored. identity: of what it was trained on. training: record of the run.
    """

    weights: Weights
    top_k: int
    identity: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)
    _on_device: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Check shapes and values; raises ScorerError."""
        w = self.weights
        sizes = shapes(w.parent_table.shape[-1], w.out.shape[-1], w.depth_bias.shape[0])
        sizes |= {name: w.scale.shape for name in CALIBRATION}
        sizes |= {name: (w.parent_table.shape[0], w.parent_table.shape[-1]) for name in TABLES}
        for name, array in w._asdict().items():
            if array.dtype != np.float32 or array.shape != sizes[name]:
                raise ScorerError(f"scorer: {name} must be float32 {sizes[name]}, got {array.dtype} {array.shape}")
            if not np.isfinite(array).all():
                raise ScorerError(f"scorer: {name} holds values that are not finite")
        if self.top_k < 1 or not (w.slopes > 0).all():
            raise ScorerError(f"scorer: top_k and slopes must be positive, got {self.top_k} and {w.slopes.tolist()}")

    @property
    def depth(self) -> int:
        """Depths it was trained on; deeper rows use the last one's weights."""
        return int(self.weights.depth_bias.shape[0])

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise ScorerError naming the first of IDENTITY_FIELDS that is known on both sides and differs."""
        for name in IDENTITY_FIELDS:
            here, there = self.identity.get(name), identity.get(name)
            if here is not None and there is not None and here != there:
                raise ScorerError(
                    f"scorer does not fit: {name} is {here!r} in the scorer, {there!r} here",
                    hint=f"train a scorer on a trace of this {name}: selector tune",
                    field=name,
                )

    def edges(self, token_ids: ArrayLike, log_probs: ArrayLike, root_token_ids: ArrayLike) -> NDArray[np.float64]:
        """Log edge probabilities of rounds, calibrated; one compiled call, single thread.

        Args:
            token_ids: (B, depth, K) int64 by falling probability, -1 pads. log_probs: (B, depth, K) float64, -inf pads.
            root_token_ids: (B,) int64.

        Returns:
            (B, depth, k, k) float64, k = min(K, top_k): entry [b, d, p, c] is log Pr(accept candidate c of depth d |
            candidate p of depth d - 1 reached); at d = 0 the root is parent 0 and other parents are -inf. Out of one
            parent the probabilities sum to less than 1.

        Raises:
            ScorerError: shapes that do not fit.
        """
        ids = np.ascontiguousarray(np.asarray(token_ids)[..., : self.top_k], np.int64)
        logs = np.array(np.asarray(log_probs)[..., : self.top_k], np.float64, order="C")  # a copy: writable, one version
        roots = np.ascontiguousarray(root_token_ids, np.int64)
        if ids.ndim != 3 or ids.shape != logs.shape or roots.shape != ids.shape[:1]:
            found = f"{ids.shape}, {logs.shape} and {roots.shape}"
            raise ScorerError(f"scorer: tokens and log-probabilities must be (B, depth, K), roots (B,); got {found}")
        logs[(ids < 0) | np.isnan(logs)] = -np.inf
        edges = np.full((*ids.shape, ids.shape[2]), -np.inf)
        if ids.size:
            score_rounds(self.weights, ids if ids.flags.writeable else ids.copy(), logs, roots.copy(), edges)
        return edges

    def edges_torch(self, token_ids: Any, log_probs: Any, root_token_ids: Any) -> Any:
        """The same on torch tensors of one device, (B, depth, k, k) float32 there; equals `edges` within rounding."""
        torch = import_torch("scoring on an accelerator")
        weights = self._weights_on(torch, log_probs.device)
        ids, logs = token_ids[..., : self.top_k].long(), log_probs[..., : self.top_k].float()
        return edge_tensor(torch, weights, ids, logs, root_token_ids)

    def _weights_on(self, torch: Any, device: Any) -> dict[str, Any]:
        if str(device) not in self._on_device:
            made = {name: torch.from_numpy(array.copy()).to(device) for name, array in self.weights._asdict().items()}
            self._on_device[str(device)] = made
        return self._on_device[str(device)]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, whole or not at all; token tables as float16."""
        tensors = {
            name: np.ascontiguousarray(array, np.float16 if name in TABLES else np.float32)
            for name, array in self.weights._asdict().items()
        }
        about = {"identity": self.identity, "top_k": self.top_k, "training": self.training}
        return write_tensors(path, tensors, SCHEMA, VERSION, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scorer:
        """Read a scorer; raises ScorerError if the file is missing or is none."""
        try:
            about, tensors = read_tensors(path, SCHEMA, VERSION)
        except FileNotFoundError as error:
            raise ScorerError(f"no scorer at {path}", hint="train one with: selector tune") from error
        except FileFormatError as error:
            hint = error.hint or "expected a file written by selector tune"
            raise ScorerError(f"{path} is no scorer: {error}", hint) from error
        missing = [name for name in Weights._fields if name not in tensors]
        if missing or not isinstance(about.get("identity"), dict) or not isinstance(about.get("top_k"), int):
            raise ScorerError(f"{path} lacks {', '.join(missing) or 'identity or top_k'}")
        weights = Weights(**{name: np.ascontiguousarray(tensors[name], np.float32) for name in Weights._fields})
        return cls(weights, about["top_k"], about["identity"], about.get("training") or {})
