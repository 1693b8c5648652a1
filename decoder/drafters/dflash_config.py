"""Configuration of a DFlash drafter, read once from the keys that the public checkpoints use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder.errors import DrafterError

SCHEMA_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a DFlash drafter (arXiv 2602.06036): Qwen3-style layers over injected target features.

    `target_layer_ids` are layers of the target whose outputs are injected; `mask_token_id` fills the block behind the
    root; `raw` is the checkpoint's whole configuration, kept for the rotary embedding and for saving.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    is_causal: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]
    output_multiplier: float
    logit_softcap: float | None
    embedding_scale: float
    raw: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DFlashConfig:
        """Adapt a checkpoint's config.json; a missing or impossible field is named."""
        for key in SCHEMA_KEYS:
            if key not in raw:
                raise DrafterError(f"drafter config: field {key!r} is missing")
        try:
            values = {**raw, **(raw.get("dflash_config") or {})}
            if "attention_conv" in raw or "conv_kernel_size" in values:
                raise DrafterError("drafter config: DFlash 2 checkpoints (conv_kernel_size) are not supported, only DFlash")
            return cls._from_values(raw, values)
        except (TypeError, ValueError, KeyError) as error:
            raise DrafterError(f"drafter config: a field is missing or no number ({type(error).__name__}: {error})") from error

    @classmethod
    def _from_values(cls, raw: dict[str, Any], values: dict[str, Any]) -> DFlashConfig:
        """The configuration from `raw` and, over it, its "dflash_config"; raises DrafterError for impossible fields."""
        layers = int(raw["num_hidden_layers"])
        ids = values.get("target_layer_ids")
        if ids is None:
            ids = spread_layers(_required(raw, "num_target_layers"), layers)
        types = raw.get("layer_types") or ["full_attention"] * layers
        causal = raw.get("is_causal")
        block_size = int(values.get("block_size", 16))
        if block_size < 2 or layers < 1 or len(types) != layers or not ids or min(map(int, ids)) < 0:
            raise DrafterError(f"drafter config: block_size {block_size} (at least 2), num_hidden_layers {layers} (at least 1) "
                               f"with {len(types)} layer_types, target_layer_ids {list(ids)} (at least one, none negative)")
        return cls(
            block_size=block_size,
            mask_token_id=int(_required(values, "mask_token_id")),
            target_layer_ids=tuple(int(i) for i in ids),
            is_causal=tuple((t == "sliding_attention") if causal is None else bool(causal) for t in types),
            sliding_windows=tuple(int(raw["sliding_window"]) if t == "sliding_attention" else None for t in types),
            output_multiplier=float(values.get("output_multiplier", 1.0)),
            logit_softcap=float(values.get("final_logit_softcapping") or 0.0) or None,
            embedding_scale=float(values.get("input_embedding_scale", 1.0)),
            raw=dict(raw),
        )

    @classmethod
    def load(cls, folder: Path) -> DFlashConfig:
        """Read `folder`/config.json."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise DrafterError(f"no drafter at {folder}: config.json is missing") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DrafterError(f"{path}: not JSON ({error})") from None
        if not isinstance(raw, dict):
            raise DrafterError(f"{path}: expected a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw)


def spread_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The default choice of target layers: evenly spaced from the second to the third last (as DFlash does)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    chosen = (round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))
    return tuple(min(max(layer, 0), num_target_layers - 1) for layer in chosen)  # targets of fewer layers than are asked for


def _required(raw: dict[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise DrafterError(f"drafter config: field {name!r} is missing")
    return raw[name]
