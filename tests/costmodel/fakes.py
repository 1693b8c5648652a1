"""Fake engines on a virtual clock: nothing here takes real time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodel.identity import Identity

IDENTITY = Identity(
    device="fake", target="toy", model_shape={"layers": 2, "hidden": 8}, dtype="float32", quantization="none",
    attention="sdpa", engine="fake", mode="eager", tensor_parallel=1, num_threads=1, drafter="toy-drafter", block_size=8,
)  # fmt: skip


class VirtualClock:
    """Seconds that pass only when told so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeBackend:
    """Verification costs `curve(t, context)` seconds, times normal noise, times `disturb(call number)`."""

    def __init__(
        self,
        clock: VirtualClock,
        curve: Callable[[int, int], float] = lambda t, c: 0.01 + 0.0001 * t + 1e-6 * c,
        noise: float = 0.0,
        disturb: Callable[[int], float] = lambda call: 1.0,
        block_size: int = 8,
        rows: Callable[[int], int] = lambda t: t,
        identity: Identity = IDENTITY,
    ) -> None:
        self.identity = identity
        self.clock = clock
        self.curve = curve
        self.noise = noise
        self.disturb = disturb
        self.block_size = block_size
        self.rows = rows
        self.random = np.random.default_rng(0)
        self.context = -1
        self.pending = 0.0
        self.calls: list[tuple[str, int, int]] = []

    def _spend(self, name: str, size: int, seconds: float) -> None:
        self.calls.append((name, size, self.context))
        scatter = 1 + self.noise * self.random.standard_normal()
        self.pending += seconds * scatter * self.disturb(len(self.calls))  # asynchronous: the time passes in synchronize

    def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
        self.context = context_tokens
        self.pending += 0.5

    def verify(self, num_verify_tokens: int) -> int:
        rows = self.rows(num_verify_tokens)
        self._spend("verify", num_verify_tokens, self.curve(rows, self.context))
        return rows

    def draft(self) -> int:
        self._spend("draft", 0, 0.003)
        return self.block_size

    def select(self, num_nodes: int) -> int:
        self._spend("select", num_nodes, 0.0001)
        return num_nodes

    def commit(self, num_tokens: int) -> int:
        self._spend("commit", num_tokens, 0.0002)
        return num_tokens

    def synchronize(self) -> None:
        self.clock.now += self.pending
        self.pending = 0.0
