"""Composing a profile for a GPU nobody has at hand: products, attention and experts measured one by one, added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.cells import StageCell, VerifyCell
from costmodel.identity import Identity
from costmodel.operators import OperatorTables
from costmodel.profile import Profile
from costmodel.shapes import ModelShape

Array = NDArray[np.float64]
RELEASED = "2026-09-01T00:00:00Z"  # of the tables; fixed, so that composing twice gives the same file
CONTEXTS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REQUESTS = (1, 4, 16, 64)
SIZES = (1, 2, 4, 8, 12, 16, 17, 32, 33, 48, 49, 64, 65, 80, 96, 97, 112, 128, 129, 160, 161, 192, 193, 224, 256, 257, 384, 512)
BATCH_SIZES = (513, 768, 1024, 1025, 1536, 2048)  # further sizes for batches
ROUTING = "power_law_1.2"
DRAFTER_LAYERS = 5  # of the published DFlash drafters
BLOCK_SIZE = 16
NOTES = (
    "attention is priced twice: seconds and low_seconds read the cache once per request, high_seconds once per token",
    "norms and activations are priced as memory operations; rotary embedding, sampling, and what the host does between "
    "kernels are not included; neither are selecting and committing, which cost 0 here",
    "no error bar comes with the tables (one sample a point); intervals of composed profiles are widened by 7 %",
)


@dataclass(frozen=True)
class Operators:
    """Where the seconds of one layer's parts come from: functions of rows, or of batch and cached tokens per request."""

    products: Callable[[Array, int, int], Array]
    attention: Callable[[Array, Array], Array]
    experts: Callable[[Array], Array] | None
    memory: tuple[float, float, float]  # bytes per second, share reached, seconds to start
    flops_per_second: float | None = None  # scoring is never faster than this; None leaves that bound out


def operators_of(tables: OperatorTables, shape: ModelShape, routing: str = ROUTING) -> Operators:
    """The operators of one model in measured tables. Raises UsageError where its attention or experts are missing."""
    experts = None
    if shape.expert_layers:
        key = (shape.hidden, shape.expert_intermediate, shape.experts_per_token, shape.experts, routing)

        def experts(rows: Array) -> Array:
            return tables.experts_seconds(rows, *key)

    return Operators(
        products=tables.product_seconds,
        attention=lambda batch, cached: tables.attention_seconds(batch, cached, shape.heads, shape.kv_heads, shape.head_dim),
        experts=experts,
        memory=tables.memory_facts()[:3],
        flops_per_second=tables.memory_facts()[3],
    )


def elementwise_seconds(shape: ModelShape, rows: Array, memory: tuple[float, float, float]) -> Array:
    """Two additions with norm and one gated activation of a layer: bytes over the bandwidth reached, and a start each.

    The convention of AIConfigurator; 2 bytes an element.
    """
    bandwidth, share, start = memory
    wide = shape.intermediate if shape.dense_layers else shape.experts_per_token * shape.expert_intermediate
    moved = 2.0 * rows * (2 * 4 * shape.hidden + 3 * wide)
    return moved / (share * bandwidth) + 3 * start


def forward_without_attention(shape: ModelShape, operators: Operators, rows: Array) -> Array:
    """Seconds of everything but attention, for rows of any shape."""
    seconds = operators.products(rows, shape.vocab, shape.hidden)
    seconds = seconds + shape.layers * elementwise_seconds(shape, rows, operators.memory)
    for number, outputs, inputs in shape.linear_products:
        seconds = seconds + number * operators.products(rows, outputs, inputs)
    if operators.experts is not None:
        seconds = seconds + shape.expert_layers * operators.experts(rows)
    return seconds


def attention_bounds(shape: ModelShape, operators: Operators, rows: Array, context: float, requests: int) -> tuple[Array, Array]:
    """Seconds of attention in all layers, with the cache read once per request and once per token.

    Neither is less than the arithmetic takes at the peak rate.
    """
    cached = context + rows / requests
    once = shape.layers * operators.attention(np.full(rows.shape, float(requests)), cached)
    if operators.flops_per_second is not None:  # one read hides no arithmetic: two products of rows by cached tokens
        scoring = shape.layers * 4.0 * rows * cached * shape.heads * shape.head_dim
        once = np.maximum(once, scoring / operators.flops_per_second)
    each = shape.layers * operators.attention(rows, cached)
    return once, np.maximum(each, once)


def compose_cells(
    shape: ModelShape, operators: Operators, sizes: Sequence[int], contexts: Sequence[int], requests: Sequence[int]
) -> list[VerifyCell]:
    """Verify cells of every place; sizes below a batch are left out."""
    cells = []
    for number in requests:
        rows = np.array([size for size in sizes if size >= number], float)
        base = forward_without_attention(shape, operators, rows)
        for context in contexts:
            once, each = attention_bounds(shape, operators, rows, context, number)
            for size, low, high in zip(rows, base + once, base + each, strict=True):
                seconds = round(float(low), 8)
                cells.append(VerifyCell(int(size), int(context), number, seconds, seconds, round(float(high), 8)))
    return cells


def draft_cells(shape: ModelShape, operators: Operators, contexts: Sequence[int], requests: Sequence[int]) -> list[StageCell]:
    """A DFlash drafter of five of the target's layers (dense), a block of 16 per request and the target's head."""
    wide = shape.intermediate if shape.dense_layers else shape.experts_per_token * shape.expert_intermediate
    drafter = replace(
        shape, layers=DRAFTER_LAYERS, dense_layers=DRAFTER_LAYERS, intermediate=wide, experts=0, experts_per_token=0,
        expert_intermediate=0, shared_intermediate=0,
    )  # fmt: skip
    cells = []
    for number in requests:
        rows = np.array([float(BLOCK_SIZE * number)])
        plain = replace(operators, experts=None)
        base = forward_without_attention(drafter, plain, rows)
        for context in contexts:
            once, each = attention_bounds(drafter, plain, rows, context, number)
            low, high = (round(float(x[0]), 8) for x in (base + once, base + each))
            cells.append(StageCell("draft", BLOCK_SIZE, int(context), number, low, low, high))
    return cells


def compose_profile(
    shape: ModelShape,
    tables: OperatorTables,
    *,
    sizes: Sequence[int] = (*SIZES, *BATCH_SIZES),
    contexts: Sequence[int] = CONTEXTS,
    requests: Sequence[int] = REQUESTS,
    routing: str = ROUTING,
) -> Profile:
    """A profile of provenance `composed`. Raises UsageError where the tables lack a part of the model."""
    operators = operators_of(tables, shape, routing)
    identity = Identity(
        device=tables.device, target=shape.name, model_shape=shape.identity_shape(), dtype="bfloat16", quantization="none",
        attention="flash", engine=f"{tables.engine}-kernels", engine_version=tables.version, mode="captured", tensor_parallel=1,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    drafter = f"a DFlash drafter of {DRAFTER_LAYERS} dense layers and a block of {BLOCK_SIZE}"
    notes = [*NOTES, f"drafting is that of {drafter}, composed alike"]
    if shape.expert_layers:
        notes.append(f"experts are routed as {routing}; tokens of one tree are more alike, so small sizes are an upper bound")
    return Profile(
        identity=identity,
        provenance="composed",
        source=f"{tables.label}, Apache-2.0",
        created=RELEASED,
        verify=tuple(compose_cells(shape, operators, sizes, contexts, requests)),
        stages=tuple(draft_cells(shape, operators, contexts, requests)),
        notes=tuple(notes),
        executable_verify_tokens=tuple(range(1, max(sizes) + 1)),
    )
