"""DFlash as a drafter: its own cache of injected target features, one pass per round, and a batched form for traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from decoder.drafters.dflash_config import DFlashConfig
from decoder.drafters.dflash_model import DFlashModel, KeysValues
from decoder.errors import DrafterError
from decoder.linear import apply_linear_form
from profiles.files import file_sha256, write_atomic


class ContextCache:
    """Preallocated keys and values of committed tokens, with room for one block behind them; of several requests of one length.

    Keys and values of one row are every request's.
    """

    def __init__(self, num_layers: int, num_requests: int = 1) -> None:
        self.length, self.num_requests = 0, num_requests
        self.buffers: list[KeysValues | None] = [None] * num_layers

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Write behind the committed rows and return everything visible; committing is up to `length`."""
        end = self.length + keys.shape[2]
        buffer = self.buffers[layer]
        if buffer is None or buffer[0].shape[2] < end:
            buffer = self._grow(layer, keys, end)
        buffer[0][:, :, self.length:end] = keys
        buffer[1][:, :, self.length:end] = values
        return buffer[0][:, :, :end], buffer[1][:, :, :end]

    def _grow(self, layer: int, keys: torch.Tensor, end: int) -> KeysValues:
        shape = (self.num_requests, keys.shape[1], max(512, 2 * end), keys.shape[3])
        grown = (keys.new_zeros(shape), keys.new_zeros(shape))
        old = self.buffers[layer]
        if old is not None:
            grown[0][:, :, : self.length] = old[0][:, :, : self.length]
            grown[1][:, :, : self.length] = old[1][:, :, : self.length]
        self.buffers[layer] = grown
        return grown


class DFlashDrafter:
    """A block-diffusion drafter (arXiv 2602.06036) over a target's embedding and output head.

    `target_embedding` is the target's (vocab, hidden) matrix; `head` maps (n, hidden) to (n, vocab) logits.
    """

    def __init__(self, model: DFlashModel, target_embedding: torch.Tensor, head: Any, *, name: str = "dflash") -> None:
        self.model, self.name = model.eval(), name
        self.config = model.config
        self.block_size = model.config.block_size
        self.feature_layers = model.config.target_layer_ids
        self.embedding, self.head = target_embedding, head
        self.weights_sha256: str | None = None
        if not 0 <= model.config.mask_token_id < len(target_embedding):
            raise DrafterError(f"drafter {name}: mask_token_id {model.config.mask_token_id} is outside the target's "
                               f"vocabulary of {len(target_embedding)}")
        self._mask_row = target_embedding[model.config.mask_token_id]
        self.start()

    @classmethod
    def load(cls, folder: str | Path, target_embedding: torch.Tensor, head: Any, *, name: str | None = None,
             linear: str = "default") -> DFlashDrafter:
        """Read config.json and model.safetensors, in the dtype and on the device of the target's embedding.

        `linear` names the form of its linear layers (`decoder.linear`).
        """
        folder = Path(folder)
        model = load_dflash_model(folder).to(target_embedding)
        apply_linear_form(model, linear)
        if model.fc.out_features != target_embedding.shape[1]:
            raise DrafterError(f"drafter {folder.name}: hidden size {model.fc.out_features} does not fit "
                               f"the target's {target_embedding.shape[1]}")
        drafter = cls(model, target_embedding, head, name=name or folder.name)
        drafter.weights_sha256 = file_sha256(folder / "model.safetensors")
        return drafter

    def start(self) -> None:
        """Forget the last request."""
        self.cache = ContextCache(len(self.model.layers))

    @torch.inference_mode()
    def extend(self, features: torch.Tensor) -> None:
        """Inject committed tokens' target features, of shape (n, layers * hidden)."""
        start = self.cache.length
        positions = torch.arange(start, start + features.shape[0], device=features.device)[None]
        for layer, (keys, values) in enumerate(self.model.context(features[None], positions)):
            self.cache.append(layer, keys, values)
        self.cache.length += features.shape[0]

    @torch.inference_mode()
    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        """Logits of shape (block_size - 1, vocab), float32, of the tokens after the root."""
        if context_tokens != self.cache.length:
            raise DrafterError(f"drafter has features of {self.cache.length} tokens, the root stands at {context_tokens}")
        return self.draft_rows([root_token], self.cache)[0]

    @torch.inference_mode()
    def draft_rows(self, root_tokens: list[int], cache: ContextCache) -> torch.Tensor:
        """As `draft`, for requests that share one pass behind `cache`: (requests, block_size - 1, vocab)."""
        requests, size = len(root_tokens), self.block_size
        block = self._mask_row.expand(requests, size, -1).clone()
        block[:, 0] = self.embedding[torch.tensor(root_tokens, device=block.device)]
        positions = torch.arange(cache.length, cache.length + size, device=block.device).expand(requests, -1)
        hidden = self.model(block * self.config.embedding_scale, positions, cache.append, self._block_masks(cache.length))
        return self.model.logits(hidden[:, 1:].flatten(0, 1), self.head).unflatten(0, (requests, size - 1))

    def _block_masks(self, context_tokens: int) -> list[torch.Tensor | None]:
        """Per layer: None where every row sees everything, else the causal or windowed mask (1, 1, block, keys)."""
        config = self.config
        masks: list[torch.Tensor | None] = []
        for causal, window in zip(config.is_causal, config.sliding_windows, strict=True):
            if not causal and window is None:
                masks.append(None)
                continue
            device = self._mask_row.device
            query = context_tokens + torch.arange(self.block_size, device=device)[:, None]
            key = torch.arange(context_tokens + self.block_size, device=device)[None]
            masks.append(within_reach(query - key, causal, window)[None, None])
        return masks

    @torch.inference_mode()
    def draft_hidden_at(self, features: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Teacher-forced drafts at many roots of one text: hidden states (A, block_size - 1, hidden).

        `features` (L, layers * hidden), `token_ids` (L,), `anchors` (A,) positions of the roots; the block of a root at
        position s sees features of positions before s, exactly as in the live loop.
        """
        roots = self.embedding[token_ids[anchors]]
        hidden = blocks_forward(self.model, features[None], roots[None], anchors[None], self._mask_row)
        return hidden[0, :, 1:]

    def identity(self) -> dict[str, Any]:
        """Name, shape and weights of this drafter, for traces and profiles; `drafter_sha256` is None for weights of no file."""
        return {
            "drafter": self.name,
            "drafter_sha256": self.weights_sha256,
            "block_size": self.block_size,
            "feature_layers": list(self.feature_layers),
            "num_layers": len(self.model.layers),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def within_reach(distance: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """Which keys a layer lets a query see, by `distance` (query position less key position): boolean, of its shape."""
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)


def blocks_forward(model: DFlashModel, features: torch.Tensor, roots: torch.Tensor, anchors: torch.Tensor,
                   mask_row: torch.Tensor) -> torch.Tensor:
    """All blocks of a batch of texts in one pass: hidden states (S, A, block_size, hidden).

    `features` (S, L, layers * hidden), `roots` (S, A, hidden) embedded root tokens, `anchors` (S, A) their positions.
    A block sees the context before its root and itself, never another block.
    """
    config = model.config
    texts, num_anchors = anchors.shape
    size, length = config.block_size, features.shape[1]
    block = mask_row.expand(texts, num_anchors, size, -1).clone()
    block[:, :, 0] = roots
    positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)  # (S, A * size)
    context = model.context(features, torch.arange(length, device=features.device).expand(texts, length))

    def join(layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        return torch.cat([context[layer][0], keys], dim=2), torch.cat([context[layer][1], values], dim=2)

    key_positions = torch.arange(length, device=features.device)
    owner = torch.arange(num_anchors, device=features.device).repeat_interleave(size)
    sees_context = key_positions[None, None] < anchors.repeat_interleave(size, dim=1)[:, :, None]
    sees_block = (owner[:, None] == owner[None]).expand(texts, -1, -1)
    allowed = torch.cat([sees_context, sees_block], dim=2)
    distance = positions[:, :, None] - torch.cat([key_positions.expand(texts, length), positions], 1)[:, None]
    masks: list[torch.Tensor | None] = []
    for causal, window in zip(config.is_causal, config.sliding_windows, strict=True):
        masks.append((allowed & within_reach(distance, causal, window))[:, None])
    hidden = model(block.flatten(1, 2) * config.embedding_scale, positions, join, masks)
    return hidden.view(texts, num_anchors, size, -1)


def load_dflash_model(folder: Path) -> DFlashModel:
    """Build the network of `folder` and load its weights; a missing or unexpected tensor is named."""
    config = DFlashConfig.load(folder)
    try:
        model = DFlashModel(config)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:  # whatever the numbers do
        raise DrafterError(f"{folder}/config.json makes no drafter ({type(error).__name__}: {error})") from error
    path = folder / "model.safetensors"
    if not path.exists():
        raise DrafterError(f"no drafter weights at {path}")
    try:
        missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    except (SafetensorError, RuntimeError) as error:  # damaged, or tensors of other shapes than config.json says
        reason = " ".join(str(error).split())
        raise DrafterError(f"{path} cannot be used: {reason}", hint="fetch or train the drafter again") from error
    if missing or unexpected:
        raise DrafterError(f"{path}: missing tensors {missing or 'none'}, unexpected tensors {unexpected or 'none'}")
    return model


def save_dflash_model(model: nn.Module, config: DFlashConfig, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors as the public checkpoints have them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.tmp"
    save_file(state, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    write_atomic(folder / "config.json", json.dumps(config.raw, indent=2) + "\n")
