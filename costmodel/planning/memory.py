"""Bytes of weights and cache, and the largest batch that fits on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.errors import UsageError
from costmodel.gpus import find_gpu
from costmodel.identity import Identity
from costmodel.shapes import ModelShape, find_shape, shipped_models

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
QUANTIZED_BYTES = {"none": None, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "nvfp4": 0.5}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU; None where a fact is unknown (then nothing is said about fitting), with the reason.

    weights = every parameter once (embedding and head both unless tied) / tensor_parallel;
    cache = requests x (context + budget + 1) x 2 x layers x kv_heads x head_dim x bytes / min(tensor_parallel, kv_heads).
    Activations, graphs and the engine share what `share` leaves; a drafter counts where `extra_bytes` gives it.
    """

    weights_bytes: float | None
    cache_bytes_per_token: float | None
    gpu_bytes: float | None
    share: float = 0.9
    extra_bytes: float = 0.0
    unknown: str | None = None

    @classmethod
    def of(
        cls,
        identity: Identity,
        gpu_bytes: float | None = None,
        share: float = 0.9,
        extra_bytes: float = 0.0,
        profile_name: str = "",
    ) -> Memory:
        """The memory of a profile's target on its GPU; `gpu_bytes` replaces the facts file.

        A device name without facts is looked up by the first part of the profile's name (h100-qwen3-8b).
        """
        parallel = identity.tensor_parallel or 1
        shape, tied = _shape(identity)
        element = DTYPE_BYTES.get(identity.dtype or "")
        quantized = QUANTIZED_BYTES.get(identity.quantization or "none", math.nan)
        if gpu_bytes is None:
            gpu_bytes = _gpu_bytes(identity.device or "") or _gpu_bytes(profile_name.split("-")[0])
        if shape is None or element is None or (quantized is not None and math.isnan(quantized)):
            return cls(None, None, gpu_bytes, share, extra_bytes, "the profile does not give the model's full shape and dtype")
        parameters = shape.weight_bytes() / 2 + (0 if tied else shape.vocab * shape.hidden)
        per_token = shape.layers * shape.kv_bytes_per_token_per_layer / 2 * element / min(parallel, shape.kv_heads)
        weights = parameters * (quantized or element) / parallel
        unknown = f"no memory size known for {identity.device or 'this device'}; --memory-gb gives it"
        return cls(weights, per_token, gpu_bytes, share, extra_bytes, unknown if gpu_bytes is None else None)

    def cache_bytes(self, context_tokens: int, budget: int, num_requests: int) -> float | None:
        """Bytes of keys and values of a batch on one GPU."""
        if self.cache_bytes_per_token is None:
            return None
        return num_requests * (context_tokens + budget + 1) * self.cache_bytes_per_token

    def largest_batch(self, context_tokens: int, budget: int) -> int | None:
        """Requests that fit beside the weights in `share` of the GPU's memory; 0 where not even one does."""
        if self.cache_bytes_per_token is None or self.weights_bytes is None or self.gpu_bytes is None:
            return None
        room = self.share * self.gpu_bytes - self.weights_bytes - self.extra_bytes
        return max(int(room // ((context_tokens + budget + 1) * self.cache_bytes_per_token)), 0)


def _gpu_bytes(name: str) -> float | None:
    try:
        return find_gpu(name).memory_bytes if name else None
    except UsageError:
        return None


def _shape(identity: Identity) -> tuple[ModelShape | None, bool]:
    """The target's shape and whether its head is tied to the embedding (unknown counts as not: the larger answer)."""
    if identity.target:
        try:
            shape = find_shape(identity.target)
            config = shipped_models().get(shape.name, {})
            return shape, bool(config.get("tie_word_embeddings", False))
        except UsageError:
            pass
    known = identity.model_shape or {}
    try:
        layers, hidden, heads = int(known["layers"]), int(known["hidden"]), int(known["heads"])
        experts = int(known.get("experts", 0))
        return ModelShape(
            name=identity.target or "model", layers=layers, hidden=hidden, heads=heads, kv_heads=int(known["kv_heads"]),
            head_dim=int(known.get("head_dim", hidden // heads)), intermediate=int(known["intermediate"]),
            vocab=int(known["vocab"]), dense_layers=0 if experts else layers, experts=experts,
            experts_per_token=int(known.get("experts_per_token", 0)),
            expert_intermediate=int(known["expert_intermediate"]) if experts else 0,
        ), False  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None, False
