"""Where training starts from: the drafter's shape for a target, and weights copied from the target's last layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoder.drafters.dflash_config import DFlashConfig, spread_layers
from decoder.drafters.dflash_model import DFlashModel


def config_for_target(target_config: Any, *, num_layers: int, block_size: int, mask_token_id: int,
                      num_features: int = 5) -> DFlashConfig:
    """A drafter as wide as the target, so that its embedding, output head and rotary base fit."""
    heads = target_config.num_attention_heads
    rope = getattr(target_config, "rope_parameters", None) or {}
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target_config.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        "intermediate_size": target_config.intermediate_size,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": rope.get("rope_theta") or getattr(target_config, "rope_theta", 10000.0),
        "max_position_embeddings": target_config.max_position_embeddings,
        "vocab_size": target_config.vocab_size,
        "attention_bias": False,
        "num_target_layers": target_config.num_hidden_layers,
        "block_size": block_size,
        "dflash_config": {
            "target_layer_ids": list(spread_layers(target_config.num_hidden_layers, num_features)),
            "mask_token_id": mask_token_id,
        },
    }
    return DFlashConfig.from_dict(raw)


def start_from_target(model: DFlashModel, target: nn.Module) -> None:
    """Copy the target's last layers into the drafter's, where names and shapes fit; pass the last feature through.

    Weights that the target has no counterpart for keep their random start.
    """
    source = target.get_decoder().layers  # type: ignore[operator]
    with torch.no_grad():
        layers: list[Any] = list(model.layers)
        for ours, theirs in zip(layers, source[-len(layers):], strict=True):
            state = {name: tensor.float() for name, tensor in theirs.state_dict().items()}
            fitting = {name: state[name] for name, tensor in ours.state_dict().items()
                       if name in state and state[name].shape == tensor.shape}
            ours.load_state_dict(fitting, strict=False)
            if "self_attn.q_norm.weight" not in fitting:
                # A target without query and key norms has larger logits than unit-norm rows would give.
                ours.self_attn.q_norm.weight.fill_(2.0)
                ours.self_attn.k_norm.weight.fill_(2.0)
        hidden = model.fc.out_features
        model.fc.weight.normal_(std=0.02)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
        model.hidden_norm.weight.copy_(layers[-1].input_layernorm.weight)
        model.norm.weight.copy_(target.get_decoder().norm.weight.float())  # type: ignore[operator]
