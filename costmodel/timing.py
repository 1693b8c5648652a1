"""Timing one call of a backend, and refusing a backend that does something else than it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from costmodel.backend import Backend
from costmodel.errors import ConstantTokens, MeasurementError, NoVerifyCalls, RowsMismatch
from costmodel.plan import Shape

Clock = Callable[[], float]
UNITS = {"verify": "rows", "draft": "block size", "select": "nodes", "commit": "tokens"}
MIN_TOKENS_TO_JUDGE = 4  # so few token ids may be equal by chance


class Timer:
    """Times calls of one backend, from an idle device to an idle device.

    The backend's `make_ready`, where it has one, runs before the clock starts. Beside what a call returns the timer reads
    two optional attributes: `num_target_forwards`, a counter that must rise with every verify, and `verify_token_ids`, the
    ids last verified, which must not all be equal on a mixture of experts.
    """

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self.backend = backend
        self.clock = clock

    def time(self, shape: Shape) -> tuple[int, float]:
        """What one call executed, and its seconds. Raises MeasurementError or one of its kinds."""
        backend = self.backend
        call = self._call(shape)
        make_ready = getattr(backend, "make_ready", None)
        if make_ready is not None:
            make_ready(shape.stage, shape.size)
        forwards = getattr(backend, "num_target_forwards", None)
        backend.synchronize()
        started = self.clock()
        executed = call()
        backend.synchronize()
        seconds = self.clock() - started
        if shape.stage == "verify":
            self._check_verify(shape, int(executed), forwards)
        self._check_rows(shape, int(executed))
        if seconds < 0 or (shape.stage == "verify" and not seconds > 0):
            raise MeasurementError(f"the clock says that {shape} took {seconds} s")
        return int(executed), seconds

    def _call(self, shape: Shape) -> Callable[[], int]:
        backend: Any = self.backend
        if shape.stage == "draft":
            return partial(backend.draft, shape.size) if shape.size else backend.draft
        calls = {"verify": backend.verify, "select": backend.select, "commit": backend.commit}
        return partial(calls[shape.stage], shape.size)

    def _check_verify(self, shape: Shape, executed: int, forwards_before: int | None) -> None:
        forwards = getattr(self.backend, "num_target_forwards", None)
        if executed == 0 or (forwards_before is not None and forwards == forwards_before):
            raise NoVerifyCalls(
                f"verify was asked for {shape.size} rows at context {shape.context_tokens} and executed none: "
                "no target forward ran",
                hint="a cached or skipped forward has no cost to learn from; switch result caching off",
            )
        token_ids = getattr(self.backend, "verify_token_ids", None)
        if token_ids is None or not num_experts(self.backend.identity.model_shape) or executed < MIN_TOKENS_TO_JUDGE:
            return
        if np.unique(np.asarray(token_ids)).size == 1 and np.asarray(token_ids).size >= MIN_TOKENS_TO_JUDGE:
            raise ConstantTokens(
                f"verify ran {executed} copies of one token id through a mixture of experts",
                hint="random token ids wake as many experts as real ones do; constant ids make it look cheap",
            )

    def _check_rows(self, shape: Shape, executed: int) -> None:
        pads = shape.stage == "verify" and self.backend.identity.mode in ("captured", "padded")
        fits = {
            "verify": executed == shape.size or (pads and executed > shape.size),
            "draft": executed > 0 and shape.size in (0, executed),
            "select": 0 <= executed <= shape.size,
            "commit": executed == shape.size,
        }[shape.stage]
        if not fits:
            raise RowsMismatch(
                f"{shape.stage} was asked for {shape.size} {UNITS[shape.stage]} at context {shape.context_tokens} "
                f"and executed {executed}",
                hint="the backend must execute what it is asked for, or declare identity.mode captured or padded",
            )


def num_experts(model_shape: dict[str, object] | None) -> int:
    """The number of experts of a model's shape, 0 where it has none or is unknown."""
    return int((model_shape or {}).get("experts") or 0)  # type: ignore[call-overload]
