"""Grouped-query attention over the tree cache that copies no keys or values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from decoder.errors import TargetError

ATTENTION_NAME = "treebudget"


def fold_query_groups(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention of transformers' signature: `query` (batch, heads, t, width), `key` and `value` (batch, kv heads, n, width).

    The query heads that share a key head become rows of one product wherever that is the faster form: for one token, and
    on CUDA under a mask, where SDPA's grouped form has no fused kernel. Elsewhere SDPA groups by itself.
    `attention_mask` is boolean (batch, 1, t, n) or None: none for one token (it sees everything), causal for a prompt.
    """
    refuse_unsupported(kwargs)
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    if groups > 1 and (tokens == 1 or (attention_mask is not None and query.is_cuda)):
        return _folded(query, key, value, attention_mask, groups, scaling), None
    causal = attention_mask is None and tokens > 1
    if causal and key.shape[2] != tokens:
        raise TargetError(f"{tokens} tokens over {key.shape[2]} keys need a mask")
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal,
                                       enable_gqa=groups > 1)
    return out.transpose(1, 2), None


def _folded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, groups: int,
            scaling: float | None) -> torch.Tensor:
    batch, heads, tokens, width = query.shape
    rows = query.reshape(batch, key.shape[1], groups * tokens, width)  # row g * t + i: token i of the group's head g
    if mask is not None:
        mask = mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2)


def refuse_unsupported(options: dict[str, Any]) -> None:
    """Raise TargetError for attention variants (soft caps, sinks) that this attention would silently leave out."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise TargetError(f"the target's attention uses {name}, which the tree attention does not support")


def register_attention() -> str:
    """Make the attention known to transformers and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, fold_query_groups)
    return ATTENTION_NAME
