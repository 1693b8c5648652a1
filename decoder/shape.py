"""What the decoder reads off a transformers model: its layers, its shape, how far it can look back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from decoder.errors import TargetError


def find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder stack below the output head and its list of layers; TargetError where there is no such list."""
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        decoder = getattr(model, model.base_model_prefix)
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return decoder, layers
    raise TargetError(f"{type(model).__name__} has no list of decoder layers")


def feature_hooks(layers: nn.ModuleList, wanted: Sequence[int], outputs: dict[int, torch.Tensor]) -> list[Any]:
    """Hooks that leave the output (1, t, hidden) of every wanted layer in `outputs` at each forward."""
    def hook_for(layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output
        return keep
    return [layers[layer].register_forward_hook(hook_for(layer)) for layer in dict.fromkeys(wanted)]


def model_shape(config: Any) -> dict[str, int]:
    """The numbers of a configuration that decide what a forward costs."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(config.num_attention_heads)
    shape = {
        "layers": int(config.num_hidden_layers),
        "hidden": int(config.hidden_size),
        "intermediate": int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "vocab": int(config.vocab_size),
    }
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:  # a mixture of experts: what a forward reads depends on how many of them its tokens wake
        wide = int(getattr(config, "moe_intermediate_size", None) or shape["intermediate"])
        shape |= {"experts": int(experts), "experts_per_token": int(config.num_experts_per_tok), "expert_intermediate": wide}
    return shape


def context_limit(config: Any) -> int:
    """Most tokens a request may span: the position limit, and the window where a layer looks back only so far.

    Raises TargetError for layers without an ordinary key/value cache (linear attention, state spaces).
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    kinds = set(getattr(config, "layer_types", None) or ())
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if other:
        raise TargetError(f"{config.model_type}: layers of kind {', '.join(sorted(other))} have no key/value rows to commit")
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    windowed = bool(kinds - {"full_attention"}) if kinds else getattr(config, "use_sliding_window", True)
    return min(limit, int(window)) if window and windowed else limit
