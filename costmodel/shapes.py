"""The numbers of a transformers configuration that decide what a forward costs, and where to find them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from costmodel.errors import UsageError

UNSUPPORTED = {
    "kv_lora_rank": "latent attention (MLA)",
    "ssm_cfg": "state-space layers",
    "linear_num_key_heads": "linear attention",
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with ordinary attention, dense or a mixture of experts; sizes in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of a dense layer
    vocab: int
    dense_layers: int  # layers whose feed-forward is dense; the others are mixtures of experts
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of the experts that every token takes, together

    @property
    def expert_layers(self) -> int:
        """Layers that are mixtures of experts."""
        return self.layers - self.dense_layers

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Bytes of keys and values of one token in one layer, at 2 bytes an element."""
        return 2 * 2 * self.kv_heads * self.head_dim

    @property
    def linear_products(self) -> list[tuple[int, int, int]]:
        """(how many per forward, output size, input size) of every dense product but the head, gate and up fused."""
        attention = self.heads * self.head_dim
        found = [
            (self.layers, attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.layers, self.hidden, attention),
        ]
        if self.dense_layers:
            found.append((self.dense_layers, 2 * self.intermediate, self.hidden))
            found.append((self.dense_layers, self.hidden, self.intermediate))
        if self.expert_layers:
            found.append((self.expert_layers, self.experts, self.hidden))
        if self.expert_layers and self.shared_intermediate:
            wide = self.shared_intermediate
            found += [(self.expert_layers, 2 * wide, self.hidden), (self.expert_layers, self.hidden, wide)]
        return found

    def weight_bytes(self, distinct_experts: float | None = None) -> float:
        """Bytes of weights one forward reads at 2 bytes an element, the embedding not counted, the head counted.

        `distinct_experts` per expert layer (all of them where None).
        """
        dense = sum(number * outputs * inputs for number, outputs, inputs in self.linear_products)
        expert = 3 * self.hidden * self.expert_intermediate
        woken = self.experts if distinct_experts is None else distinct_experts
        return 2.0 * (dense + self.expert_layers * woken * expert + self.vocab * self.hidden)

    def flops_per_token(self) -> float:
        """Multiply-adds times two per token, attention scores not counted."""
        dense = sum(number * outputs * inputs for number, outputs, inputs in self.linear_products)
        expert = self.expert_layers * self.experts_per_token * 3 * self.hidden * self.expert_intermediate
        return 2.0 * (dense + expert + self.vocab * self.hidden)

    def identity_shape(self) -> dict[str, int]:
        """The `model_shape` of an Identity."""
        keys = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")
        found = {key: getattr(self, key) for key in keys}
        if self.experts:
            found |= {"experts": self.experts, "experts_per_token": self.experts_per_token}
            found |= {"expert_intermediate": self.expert_intermediate}
        return found

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "model") -> ModelShape:
        """From a transformers configuration (the content of config.json). Raises UsageError for what cannot be priced."""
        nested = config.get("text_config")
        config = {**config, **nested} if isinstance(nested, Mapping) else config
        for key, what in UNSUPPORTED.items():
            if config.get(key):
                raise UsageError(f"{name}: {what} cannot be composed yet", hint="profile it with `costmodel profile`")
        hint = "expected the config.json of a decoder"
        try:
            made = cls._from_fields(config, name)
        except KeyError as error:
            raise UsageError(f"{name}: the configuration has no {error}", hint=hint) from error
        except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
            raise UsageError(f"{name}: the configuration holds what is no number: {error}", hint=hint) from error
        for field, least in {**dict.fromkeys(_POSITIVE, 1), "experts": 0}.items():
            if not least <= getattr(made, field) <= 10**8:
                raise UsageError(f"{name}: {field} is {getattr(made, field)}, expected at least {least}", hint=hint)
        if made.experts_per_token > made.experts or not 0 <= made.dense_layers <= made.layers:
            raise UsageError(f"{name}: {made.experts_per_token} experts per token of {made.experts}", hint=hint)
        return made

    @classmethod
    def _from_fields(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, vocab = int(config["num_attention_heads"]), int(config["vocab_size"])
        intermediate = int(config.get("intermediate_size") or 4 * hidden)
        experts = int(_first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0)
        wide = int(config.get("moe_intermediate_size") or intermediate) if experts else 0
        shared = int(config.get("shared_expert_intermediate_size") or wide * int(config.get("n_shared_experts") or 0))
        return cls(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads), intermediate=intermediate, vocab=vocab,
            dense_layers=_dense_layers(config, layers) if experts else layers, experts=experts,
            experts_per_token=int(_first(config, "num_experts_per_tok", "top_k_experts") or 1) if experts else 0,
            expert_intermediate=wide, shared_intermediate=shared if experts else 0,
        )  # fmt: skip


_POSITIVE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers of a mixture of experts are dense after all."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ()) | set(range(min(int(config.get("first_k_dense_replace") or 0), layers)))
    return len(dense | {layer for layer in range(layers) if (layer + 1) % step})


@lru_cache(maxsize=1)
def _models_file() -> dict[str, Any]:
    return json.loads((files("profiles") / "models.json").read_text(encoding="utf-8"))


def shipped_models() -> dict[str, dict[str, Any]]:
    """Configurations that come with the library (profiles/models.json), by hub name."""
    return {name: dict(config) for name, config in _models_file()["models"].items()}


@dataclass(frozen=True)
class ModelSource:
    """Public copies of a configuration that its numbers were compared with, and the fields that nothing confirms."""

    sources: tuple[str, ...]
    unverified: tuple[str, ...]


def model_sources() -> dict[str, ModelSource]:
    """Where the numbers of every shipped configuration come from, by hub name; an entry without sources is all unverified."""
    checked = _models_file().get("checked", {})
    found = {}
    for name, config in shipped_models().items():
        entry = checked.get(name, {})
        sources = tuple(entry.get("sources", ()))
        found[name] = ModelSource(sources, tuple(entry.get("unverified", ())) if sources else tuple(config))
    return found


def find_shape(model: str) -> ModelShape:
    """The shape of a shipped name (any case, with or without its owner), a config.json or a folder with one.

    Raises UsageError that lists the shipped names; nothing is downloaded.
    """
    known = shipped_models()
    for name, config in known.items():
        if model.lower() in (name.lower(), name.split("/")[-1].lower()):
            return ModelShape.from_config(config, name)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")), str(model))
        except (ValueError, RecursionError, AttributeError, TypeError) as error:  # not UTF-8, not JSON, no object
            raise UsageError(f"{path} is not a transformers configuration: {error}") from error
    raise UsageError(
        f"no shipped shape and no configuration file: {model}", hint=f"give a config.json, or one of {', '.join(known)}"
    )
