"""The model being served: loading, one forward over the slots of a tree, and what drafters need of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from decoder.attention import register_attention
from decoder.cache import TreeCache
from decoder.digest import weights_sha256
from decoder.errors import ContextError, TargetError, UsageError
from decoder.linear import apply_linear_form
from decoder.shape import context_limit, feature_hooks, find_layers, model_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TargetOutput:
    """One forward: `logits` (rows asked for, vocab) and `features` (t, F), the chosen layers' hidden states side by side."""

    logits: torch.Tensor
    features: torch.Tensor | None


class Target:
    """A causal language model with tree attention over a `TreeCache`; use `load`, or wrap a model that is already there."""

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str = "target", feature_layers: Sequence[int] = (),
                 linear: str = "default", tensor_parallel: int = 1) -> None:
        model.set_attn_implementation(register_attention())
        self.model, self.name, self.tensor_parallel = model.eval(), name, tensor_parallel
        self.num_forwards = self.num_rows = 0  # what has really run: forwards of the layers, and rows in them
        self._tokenizer = tokenizer
        self.weights_sha256 = weights_sha256(model) if tensor_parallel == 1 else None  # before a linear form hides them
        self.linear = apply_linear_form(model, linear)
        self.decoder, self.layers = find_layers(model)
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._head = model.get_output_embeddings()
        self.embed: torch.Tensor = whole_tensor(model.get_input_embeddings().weight)
        self.device, self.dtype = self.embed.device, self.embed.dtype
        self.shape = model_shape(model.config)
        self.max_context_tokens = context_limit(model.config)
        self.stop_ids = find_stop_ids(model, tokenizer)
        self._outputs: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.set_feature_layers(feature_layers)
        self._check_head()

    @classmethod
    def load(cls, name_or_path: str, *, dtype: str = "bfloat16", device: str = "cpu", linear: str = "auto",
             feature_layers: Sequence[int] = (), random_weights: bool = False, tensor_parallel: int = 1) -> Target:
        """Load by registered name ("smollm2-135m"), local folder or hub id.

        `random_weights` builds the model from its configuration alone (a folder or config.json, or a hub id): what a
        forward costs does not depend on the weights, so any architecture can be profiled without its checkpoint.
        `tensor_parallel` shards it over that many processes (`decoder.parallel`), each of which calls this.
        Raises TargetMissingError where a registered target was not pulled yet, TargetError where the model cannot be
        loaded or is of a form the tree attention does not support, UsageError for an unknown dtype or a device that is not here.
        """
        from decoder.pull import resolve_target

        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
        check_device(device)
        options: dict[str, Any] = {"linear": linear, "feature_layers": feature_layers}
        if tensor_parallel > 1:
            from decoder.parallel import check_linear

            options |= {"linear": check_linear(linear), "tensor_parallel": tensor_parallel}
        if random_weights:
            from decoder.randomweights import config_name, random_model

            model = random_model(name_or_path, DTYPES[dtype], device, tensor_parallel)
            return cls(model, name=config_name(name_or_path), **options)
        place = resolve_target(name_or_path)
        model = _load_model(place.location, DTYPES[dtype], local_only=place.local, tensor_parallel=tensor_parallel)
        tokenizer = _load_tokenizer(place.location, local_only=place.local)
        return cls(model if tensor_parallel > 1 else model.to(device), tokenizer, name=place.name, **options)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; TargetError where the model's folder has none."""
        if self._tokenizer is None:
            raise TargetError(f"target {self.name} has no tokenizer in its folder")
        return self._tokenizer

    def set_feature_layers(self, feature_layers: Sequence[int]) -> None:
        """Choose the layers whose outputs a forward returns as features (output index i = output of layer i)."""
        wrong = [layer for layer in feature_layers if not 0 <= layer < len(self.layers)]
        if wrong:
            raise TargetError(f"feature layers {wrong} are not among the target's {len(self.layers)} layers")
        for hook in self._hooks:
            hook.remove()
        self.feature_layers = tuple(feature_layers)
        self._outputs.clear()
        self._hooks = feature_hooks(self.layers, self.feature_layers, self._outputs)

    def check_context(self, num_prompt_tokens: int, max_new_tokens: int, what: str = "") -> None:
        """Raise ContextError where a prompt and its new tokens do not fit; `what` begins the message."""
        total, limit = num_prompt_tokens + max_new_tokens, self.max_context_tokens
        if total > limit:
            raise ContextError(f"{what}{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones are {total}; "
                               f"the target's context holds {limit}")

    def new_cache(self, capacity: int = 1024, num_requests: int = 1) -> TreeCache:
        """An empty cache for one request, or for a batch of them."""
        return TreeCache(len(self.layers), capacity, num_requests)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) of final hidden states (n, hidden)."""
        return self._head(hidden)

    @torch.inference_mode()
    def forward(self, token_ids: Any, position_ids: Any, cache: TreeCache, mask: Any = None,
                logits_rows: Any = None) -> TargetOutput:
        """Run t tokens behind the cache's committed ones; their keys and values stay uncommitted.

        `token_ids` and `position_ids` are (t,) sequences, arrays or tensors. `mask` is boolean, (t, t) among the new slots
        or (t, context + t), True = visible; None means causal. `logits_rows` (slice or indices) limits the output head to
        some rows, None gives all.
        """
        ids, positions = self._tensor(token_ids)[None], self._tensor(position_ids)[None]
        hidden, features = self.run_decoder(ids, positions, self._mask(mask, ids.shape[1], cache), cache)
        rows = hidden[0] if logits_rows is None else hidden[0, logits_rows]
        return TargetOutput(self.head(rows), features[0] if self.feature_layers else None)

    def run_decoder(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None,
                    cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers without the output head, for any batch and any transformers cache.

        `ids` and `positions` (batch, t), `mask` boolean (batch, 1, t, keys) or None. Returns final hidden states
        (batch, t, hidden) and features (batch, t, F); F is 0 where no feature layers are set.
        """
        options = {self._cache_argument: cache}
        hidden = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **options)[0]
        self.num_forwards += 1
        self.num_rows += hidden.shape[0] * hidden.shape[1]
        if not self.feature_layers:
            return hidden, hidden.new_empty((*hidden.shape[:2], 0))
        return hidden, torch.cat([self._outputs[layer] for layer in self.feature_layers], dim=-1)

    @torch.inference_mode()
    def forward_batch(self, ids: torch.Tensor, positions: torch.Tensor, cache: TreeCache,
                      mask: torch.Tensor | None) -> TargetOutput:
        """One forward of r requests behind a cache of r, for tensors that are on the device already.

        `ids` and `positions` (r, t), `mask` boolean (r, 1, t, context + t) or None for t = 1. Logits come as (r * t, vocab)
        and features as (r * t, F), request after request.
        """
        hidden, features = self.run_decoder(ids, positions, mask, cache)
        return TargetOutput(self.head(hidden.flatten(0, 1)), features.flatten(0, 1) if self.feature_layers else None)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)

    def _mask(self, mask: Any, num_tokens: int, cache: TreeCache) -> torch.Tensor | None:
        """The mask as attention takes it: (1, 1, t, context + t), or None where everything or a plain prompt is seen."""
        if num_tokens == 1 or (mask is None and cache.length == 0):
            return None
        if mask is None:
            mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        mask = torch.as_tensor(mask, dtype=torch.bool).to(self.device)  # the small part alone, before it is widened there
        if mask.shape[1] == num_tokens and cache.length > 0:
            mask = torch.cat([mask.new_ones(num_tokens, cache.length), mask], dim=1)
        if tuple(mask.shape) != (num_tokens, cache.length + num_tokens):
            raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit {num_tokens} tokens behind {cache.length}")
        return mask[None, None]

    def synchronize(self) -> None:
        """Wait for the device, so that wall-clock timings mean something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def identity(self) -> Any:
        """The `costmodel.Identity` of this target as it runs here."""
        from decoder.identity import target_identity

        return target_identity(self)

    @torch.inference_mode()
    def _check_head(self) -> None:
        """The split forward must give the model's own logits (some models scale or cap them after the output head)."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        ids[0, 1] = min(5, self.embed.shape[0] - 1)
        try:
            whole = self.model(input_ids=ids, use_cache=False).logits[0]
            split = self.forward(ids[0], [0, 1], self.new_cache(8)).logits
        except RuntimeError as error:
            if self.tensor_parallel == 1:
                raise
            raise TargetError(f"torch {torch.__version__} cannot run this model as transformers shards it: "
                              f"{str(error).strip().splitlines()[0]}",
                              hint="use a newer torch: 2.13 with transformers 5.24 was seen to work, 2.6 not") from error
        if not bool(whole.isfinite().all()):
            raise TargetError(f"target {self.name}: its logits are not finite in {self.dtype}: its weights hold NaN or overflow",
                              hint="fetch it again, or try another --dtype")
        if not torch.allclose(whole.float(), split.float(), rtol=0.05, atol=0.05 * float(whole.float().abs().max())):
            raise TargetError(f"target {self.name}: its logits are not its output head applied to its last hidden states, "
                              "which tree decoding relies on")


def check_device(device: str) -> None:
    """UsageError for a device that torch does not know or that this machine does not have."""
    try:
        if torch.empty(1, device=device).device.type == "meta":
            raise NotImplementedError("it computes nothing")
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # which of them depends on how torch was built
        raise UsageError(f"device {device!r} cannot be used here: {str(error).strip().splitlines()[0]}",
                         hint="use --device cpu, or --device cuda on a machine with a GPU and a torch built for it") from error


def find_stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text: from the generation configuration, the configuration and the tokenizer."""
    stop_ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        stop_ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    return frozenset(int(token) for token in stop_ids)


def dtype_argument(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype as an argument of `from_pretrained`, under the name this transformers release gives it."""
    import transformers
    from packaging.version import Version

    return {"dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype": dtype}


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' own progress bars off stderr while a model loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def whole_tensor(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, gathered from all ranks where it is sharded over them."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _load_model(location: str, dtype: torch.dtype, *, local_only: bool, tensor_parallel: int = 1) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options = dtype_argument(dtype)
    if tensor_parallel > 1:
        from transformers import AutoConfig

        from decoder.parallel import check_shares, sharding_options

        options |= sharding_options(tensor_parallel)
    try:
        if tensor_parallel > 1:
            check_shares(AutoConfig.from_pretrained(location, local_files_only=local_only), tensor_parallel)
        with quiet_loading():
            return AutoModelForCausalLM.from_pretrained(location, local_files_only=local_only, **options)
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:  # missing, no model, damaged, or of another shape
        hint = None if local_only else "give a local folder, a hub id that can be reached, or: decoder pull smollm2-135m"
        raise TargetError(f"cannot load target {location}: {str(error).strip().splitlines()[0]}", hint=hint) from error


def _load_tokenizer(location: str, *, local_only: bool) -> Any:
    """The tokenizer, or None where the folder has none (models made for tests)."""
    from transformers import AutoTokenizer

    folder = Path(location)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(location, local_files_only=local_only)
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot load the tokenizer of {location}: {str(error).strip().splitlines()[0]}") from error
