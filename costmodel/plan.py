"""What to time: the grid of shapes, the number of rounds and the time allowed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from costmodel.errors import UsageError
from costmodel.identity import Identity


class Shape(NamedTuple):
    """One thing to time: a stage at a size, context and batch."""

    stage: str  # verify, draft, select or commit
    size: int
    context_tokens: int
    num_requests: int = 1


@dataclass(frozen=True)
class MeasurePlan:
    """A grid and how long to spend on it. Measuring ends after `max_rounds`, or at the first context reached after
    `max_seconds` (warm-up included), but never before `min_rounds`."""

    verify_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
    context_tokens: tuple[int, ...] = (1, 128, 256, 512)
    num_requests: tuple[int, ...] = (1,)
    select_nodes: tuple[int, ...] = (1, 8, 32, 64)
    commit_tokens: tuple[int, ...] = (1, 4, 8)
    max_rounds: int = 12
    min_rounds: int = 3
    max_seconds: float = 100.0
    seed: int = 0

    def __post_init__(self) -> None:
        minimums = {"verify_tokens": 1, "context_tokens": 0, "num_requests": 1, "select_nodes": 0, "commit_tokens": 1}
        for name, least in minimums.items():
            values = getattr(self, name)
            if not values or min(values) < least or len(set(values)) != len(values):
                raise UsageError(f"{name} must be distinct whole numbers of at least {least}, got {list(values)}")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise UsageError(f"rounds must be at least {self.min_rounds}, got {self.max_rounds}")

    def places(self) -> list[tuple[int, int]]:
        """Pairs of context and batch; a backend is prepared once per place and round."""
        return [(context, requests) for requests in self.num_requests for context in self.context_tokens]

    def shapes(self, context_tokens: int, num_requests: int, has_drafter: bool = True) -> list[Shape]:
        """The shapes of one place. A batch verifies at least one token per request."""
        sizes = [("verify", size) for size in self.verify_tokens if size >= num_requests]
        sizes += [("commit", size) for size in self.commit_tokens]
        if has_drafter:
            sizes += [("draft", 0)] + [("select", size) for size in self.select_nodes]
        return [Shape(stage, size, context_tokens, num_requests) for stage, size in sizes]

    def key(self, identity: Identity) -> str:
        """A digest of the identity and the grid: samples of another one are never mixed in."""
        grid = {name: value for name, value in asdict(self).items() if name not in ("max_rounds", "min_rounds", "max_seconds")}
        document: dict[str, Any] = {"identity": identity.to_dict(), "grid": grid}
        return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def declared_sizes(backend: object) -> list[int] | None:
    """The sizes a captured or padded engine says it executes (its optional attribute `executable_verify_tokens`)."""
    sizes = getattr(backend, "executable_verify_tokens", None)
    return None if sizes is None else sorted({int(size) for size in sizes})
