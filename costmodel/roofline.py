"""The roofline: what a forward costs where nothing was measured, from datasheet rates and the shares of them reached.

Every product takes the longer of moving its weights and multiplying; attention that of reading the cache and scoring. Two
shares (of bandwidth and of arithmetic), a floor per forward and a factor on attention are taken from what operator tables
show, or fitted to whatever points are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from costmodel.cells import VerifyCell
from costmodel.compose import (
    BATCH_SIZES,
    CONTEXTS,
    RELEASED,
    REQUESTS,
    SIZES,
    Operators,
    compose_cells,
    draft_cells,
    forward_without_attention,
)
from costmodel.errors import UsageError
from costmodel.experts import expected_experts
from costmodel.gpus import Gpu, find_gpu
from costmodel.identity import Identity
from costmodel.profile import Profile
from costmodel.shapes import ModelShape, find_shape

Array = NDArray[np.float64]
KERNEL_SECONDS = 3e-6  # to start a kernel under captured graphs
ATTENTION_SECONDS = 1.2e-5  # a short decode attention on every GPU with tables
PARAMETERS = 4  # of a calibration: two shares, a floor, a factor on attention
LEAST_SPREAD = 0.05  # log error of a calibration at other points than its own (docs/accuracy.md: 2 to 11 %)
CARRIED_OVER = 0.3  # log error of shares fitted to another model on the same GPU (docs/accuracy.md: 10 and 28 % on average)


@dataclass(frozen=True)
class Roofline:
    """Shares of the datasheet rates that are reached, and what no rate explains.

    `floor_seconds` is what the host needs to launch a forward (the longer of host and device counts); `attention_factor`
    is how many times the cache is moved and scored as often as needed (eager engines copy keys and values per group).
    """

    bandwidth_share: float = 0.72
    flops_share: float = 0.72
    floor_seconds: float = 0.0
    attention_factor: float = 1.0

    def operators(self, gpu: Gpu, shape: ModelShape) -> Operators:
        """The parts of a layer on this roofline."""
        bandwidth, flops = gpu.bytes_per_second * self.bandwidth_share, gpu.flops_per_second * self.flops_share

        def products(rows: Array, outputs: int, inputs: int) -> Array:
            moved = 2.0 * (outputs * inputs + rows * (outputs + inputs))
            return np.maximum(moved / bandwidth, 2.0 * rows * outputs * inputs / flops) + KERNEL_SECONDS

        def attention(batch: Array, cached: Array) -> Array:
            moved = batch * cached * shape.kv_bytes_per_token_per_layer * self.attention_factor
            return moved / bandwidth + ATTENTION_SECONDS

        def experts(rows: Array) -> Array:
            weights = 3 * shape.hidden * shape.expert_intermediate
            moved = 2.0 * expected_experts(rows, shape.experts, shape.experts_per_token) * weights
            return np.maximum(moved / bandwidth, 2.0 * rows * shape.experts_per_token * weights / flops) + 4 * KERNEL_SECONDS

        memory = (gpu.bytes_per_second, self.bandwidth_share, KERNEL_SECONDS)
        scoring = flops / self.attention_factor
        return Operators(products, attention, experts if shape.expert_layers else None, memory, scoring)

    def verify_seconds(self, gpu: Gpu, shape: ModelShape, tokens: Array, contexts: Array, requests: Array) -> Array:
        """Seconds of forwards at places of equal shape (n,), the cache read once per request."""
        operators = self.operators(gpu, shape)
        base = forward_without_attention(shape, operators, tokens)
        cached = contexts + tokens / requests
        once = shape.layers * operators.attention(requests, cached)
        scoring = shape.layers * 4.0 * tokens * cached * shape.heads * shape.head_dim
        assert operators.flops_per_second is not None
        return np.maximum(base + np.maximum(once, scoring / operators.flops_per_second), self.floor_seconds)


OPTIMISTIC, PESSIMISTIC = Roofline(0.9, 0.95), Roofline(0.52, 0.45)  # the range seen over 17 stacks with tables


def calibrate(gpu: Gpu, shape: ModelShape, cells: Sequence[VerifyCell]) -> tuple[Roofline, float]:
    """The roofline that fits known points best (least squares of log ratios), and its root mean square log error."""
    if not cells:
        raise UsageError("a calibration needs at least one known point")
    tokens, contexts, requests = (
        np.array([getattr(cell, name) for cell in cells], float) for name in ("verify_tokens", "context_tokens", "num_requests")
    )
    seconds = np.array([cell.seconds for cell in cells])

    def line_of(values: Array) -> Roofline:
        bandwidth, flops, floor, attention = map(float, values)
        return Roofline(bandwidth, flops, floor * float(seconds.min()), attention)

    def errors(values: Array) -> Array:
        wrong = np.log(line_of(values).verify_seconds(gpu, shape, tokens, contexts, requests) / seconds)
        return np.concatenate([wrong, 0.02 * (values - usual)])  # the usual values decide where the points do not

    usual, bounds = np.array([0.72, 0.72, 0.0, 1.0]), ([0.05, 0.05, 0.0, 0.3], [1.0, 1.0, 1.3, 60.0])
    starts = ([0.72, 0.72, 0.5, 1.1], [0.5, 0.5, 1.0, 4.0], [0.8, 0.4, 1.0, 12.0])
    fits = [least_squares(errors, np.array(start), bounds=bounds, diff_step=1e-3) for start in starts]
    best = min(fits, key=lambda fit: fit.cost)
    return line_of(best.x), float(np.sqrt(np.mean(errors(best.x)[: seconds.size] ** 2)))


def _shape_of(known: Profile, otherwise: ModelShape) -> ModelShape:
    """The shape of the model whose points are known: shares of the rates carry over to another model on the same GPU."""
    try:
        return otherwise if known.identity.target is None else find_shape(known.identity.target)
    except UsageError:
        return otherwise


def check_device(known: Profile, gpu: Gpu) -> str | None:
    """Raise UsageError where known points are of another GPU; a note where their device has no facts to tell by."""
    device = known.identity.device
    if device is None:
        return None
    try:
        found = find_gpu(device)
    except UsageError:
        return f"the known points are of {device!r}, which may be another device than {gpu.name}: the interval is widened"
    if found.name != gpu.name:
        raise UsageError(
            f"the known points are of {device} ({found.name}), not of {gpu.name}", hint="calibrate with points of the same GPU"
        )
    return None


def _carried_over(known: Profile, gpu: Gpu, shape: ModelShape) -> str | None:
    """A note where shares are carried over from what may be another device, or from another model; None otherwise."""
    doubtful = check_device(known, gpu)
    if doubtful is not None or _shape_of(known, shape) == shape:
        return doubtful
    return f"the known points are of {known.identity.target}: the interval is widened for carrying shares over"


def _doubt(known: Profile) -> float:
    """How much of the range of uncalibrated rooflines a calibration leaves: none with more points than parameters."""
    sizes = {(cell.verify_tokens, cell.context_tokens) for cell in known.verify}
    contexts = {context for _, context in sizes}
    return max(0.0, 1.0 - len(sizes) / (PARAMETERS + 1), 0.5 if len(contexts) < 2 else 0.0)


def _left_open(doubt: float, seconds_of: Callable[[Roofline], Array]) -> tuple[Array, Array] | tuple[float, float]:
    """Factors (n,) on the ends of an interval: the range of uncalibrated rooflines to the power of `doubt`."""
    if doubt == 0.0:
        return 1.0, 1.0
    usual, best, worst = (seconds_of(line)[0] for line in (Roofline(), OPTIMISTIC, PESSIMISTIC))
    return (best / usual) ** doubt, (worst / usual) ** doubt


def estimate_profile(
    gpu: Gpu,
    shape: ModelShape,
    known: Profile | None = None,
    *,
    sizes: Sequence[int] = (*SIZES, *BATCH_SIZES),
    contexts: Sequence[int] = CONTEXTS,
    requests: Sequence[int] = REQUESTS,
) -> Profile:
    """A profile of provenance `estimated`; with `known`, calibrated to the verify cells of that profile.

    The interval reaches from the shares and the cache reads of the best stack seen to those of the worst; a calibrated one
    from two errors of the calibration (5 % at least) below to two above, and one read of the cache per token; where the
    known points are of another model, the error of carrying shares over is added, and where they are few or of one context,
    so much of the uncalibrated range as they leave open. Raises UsageError for points of another GPU.
    """

    def cells_of(line: Roofline) -> list[VerifyCell]:
        return compose_cells(shape, line.operators(gpu, shape), sizes, contexts, requests)

    def seconds_of(line: Roofline) -> Array:  # (2, n): the cache read once per request, and once per token
        return np.array([(cell.seconds, cell.high_seconds) for cell in cells_of(line)]).T

    if known is None:
        middle, spread, carried = Roofline(), None, None
        low, high = seconds_of(OPTIMISTIC)[0], seconds_of(PESSIMISTIC)[1]
    else:
        carried = _carried_over(known, gpu, shape)
        middle, spread = calibrate(gpu, _shape_of(known, shape), known.verify)
        factor = float(np.exp(2 * np.hypot(max(spread, LEAST_SPREAD), CARRIED_OVER if carried else 0.0)))
        lower, higher = _left_open(_doubt(known), seconds_of)
        once, each = np.maximum(seconds_of(middle), middle.floor_seconds)
        low, high = once / factor * lower, each * factor * higher
    cells = tuple(
        replace(
            cell, seconds=round(max(cell.seconds, middle.floor_seconds), 8), low_seconds=round(least, 8),
            high_seconds=round(most, 8),
        )
        for cell, least, most in zip(cells_of(middle), low.tolist(), high.tolist(), strict=True)
    )  # fmt: skip
    how = "uncalibrated" if known is None else f"calibrated to {len(known.verify)} points of: {known.source}"
    identity = Identity(
        device=gpu.name, target=shape.name, model_shape=shape.identity_shape(), dtype="bfloat16", quantization="none",
        engine="roofline", tensor_parallel=1, block_size=16,
    )  # fmt: skip
    stages = draft_cells(shape, middle.operators(gpu, shape), contexts, requests)
    source = f"roofline from datasheet rates ({'; '.join(gpu.sources)}), {how}"
    return Profile(identity, "estimated", source, RELEASED, cells, tuple(stages), _notes(middle, spread, carried))


def _notes(line: Roofline, spread: float | None, carried: str | None) -> tuple[str, ...]:
    rms = "" if spread is None else f"; error at the known points {spread:.1%} (rms)"
    shares = (
        f"shares reached: bandwidth {line.bandwidth_share:.2f}, arithmetic {line.flops_share:.2f}; floor "
        f"{line.floor_seconds * 1e3:.2f} ms a forward; cache moved and scored {line.attention_factor:.1f} times{rms}"
    )
    return (shares, *([carried] if carried else []), "an estimate, not a measurement: read the interval, not the number")
