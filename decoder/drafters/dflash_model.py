"""The DFlash network: layers whose block queries see injected target features and the whole block.

Parameter names are those of the public z-lab checkpoints, so that these load unchanged (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from decoder.drafters.dflash_config import DFlashConfig

FLOAT16_SCALE = 2.0**-6
KeysValues = tuple[torch.Tensor, torch.Tensor]
Join = Callable[[int, torch.Tensor, torch.Tensor], KeysValues]


def rotate(states: torch.Tensor, rope: KeysValues) -> torch.Tensor:
    """Rotary position embedding; `states` (batch, heads, rows, width), rope (batch, rows, width) each."""
    cos, sin = rope[0].unsqueeze(1), rope[1].unsqueeze(1)
    return states * cos + rotate_half(states) * sin


class Attention(nn.Module):
    """Grouped-query attention of block rows over context features and block rows."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, rows: torch.Tensor, rope: KeysValues) -> KeysValues:
        """Keys and values (batch, kv_heads, rows, width) of context features or block rows."""
        split = (*rows.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(rows).view(split)).transpose(1, 2), rope)
        return keys, self.v_proj(rows).view(split).transpose(1, 2)

    def forward(self, rows: torch.Tensor, rope: KeysValues, join: Join, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from (batch, rows, hidden); `join` puts the context's keys and values in front of the block's."""
        batch, num_rows = rows.shape[:2]
        query = rotate(self.q_norm(self.q_proj(rows).view(batch, num_rows, -1, self.head_dim)).transpose(1, 2), rope)
        keys, values = join(self.layer, *self.keys_values(rows, rope))
        groups = self.heads // self.kv_heads
        # Heads of one group share keys: folded into rows, nothing needs to be repeated.
        folded = query.reshape(batch, self.kv_heads, groups * num_rows, self.head_dim)
        if mask is not None:
            mask = mask.repeat(1, 1, groups, 1)
        out = nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        out = out.reshape(batch, self.heads, num_rows, self.head_dim).transpose(1, 2)
        return self.o_proj(out.reshape(batch, num_rows, -1))


class MLP(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (..., hidden) to (..., hidden)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, rows: torch.Tensor, rope: KeysValues, join: Join, mask: torch.Tensor | None) -> torch.Tensor:
        """Map block rows (batch, rows, hidden) to the same shape."""
        rows = rows + self.self_attn(self.input_layernorm(rows), rope, join, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlashModel(nn.Module):
    """Block rows in, hidden states out; the target's own embedding and output head sit around it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = Qwen3Config(**{k: v for k, v in config.raw.items() if k not in ("dflash_config", "architectures", "model_type")})
        self.config = config
        self.layers = nn.ModuleList([Layer(shape, i) for i in range(shape.num_hidden_layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(shape)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Target features (batch, n, layers * hidden) to context rows (batch, n, hidden).

        In float16 the sums of `fc` overflow where a target's hidden states are large (5e4 with SmolLM2), so it sees them
        scaled down; the norm takes that back exactly, its epsilon scaled along.
        """
        if features.dtype != torch.float16:
            return self.hidden_norm(self.fc(features))  # type: ignore[no-any-return]
        rows, norm = self.fc(features * FLOAT16_SCALE), self.hidden_norm
        return nn.functional.rms_norm(rows, norm.normalized_shape, norm.weight, norm.eps * FLOAT16_SCALE**2)  # type: ignore[operator]

    def rope(self, rows: torch.Tensor, positions: torch.Tensor) -> KeysValues:
        """Cosines and sines (batch, rows, width) for `positions` (batch, rows), in the dtype of `rows`."""
        return self.rotary_emb(rows, positions)

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """Every layer's keys and values for committed tokens."""
        rows = self.project(features)
        rope = self.rope(rows, positions)
        return [layer.self_attn.keys_values(rows, rope) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(self, block: torch.Tensor, positions: torch.Tensor, join: Join,
                masks: list[torch.Tensor | None]) -> torch.Tensor:
        """Embedded block rows (batch, rows, hidden) to normalised hidden states of the same shape."""
        rope = self.rope(block, positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            block = layer(block, rope, join, mask)
        return self.norm(block)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The target's output head with the checkpoint's multiplier and soft cap, in float32."""
        logits = head(hidden).float() * self.config.output_multiplier
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
