"""Tiny random targets, drafters of known quality and a selector of random trees, for the decoder's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.target import Target
from selector.tree import DraftTree


def assert_same_tree(found: DraftTree, expected: DraftTree, rtol: float = 1e-5) -> None:
    """The same nodes in the same order, with the same reach up to rounding."""
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.parents, expected.parents)
    np.testing.assert_array_equal(found.depths, expected.depths)
    np.testing.assert_allclose(found.reach, expected.reach, rtol=rtol)


def tiny_model(vocab: int = 61, layers: int = 3, hidden: int = 32, seed: int = 0, scale: float = 0.3, **overrides: Any) -> Any:
    """A random Llama with grouped heads; `scale` is the spread of its weights (larger: sharper distributions)."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=scale, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))


def tiny_qwen3() -> Any:
    """A random Qwen3 with grouped heads that are wider than hidden / heads."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512))


def tiny_target(**options: Any) -> Target:
    """A tiny random target in float32 without stop tokens."""
    return Target(tiny_model(**options), name="tiny")


@torch.inference_mode()
def text_logits(target: Target, token_ids: list[int]) -> torch.Tensor:
    """Logits (L, vocab) of a whole text in one causal forward: what any decoding must agree with."""
    return target.forward(token_ids, range(len(token_ids)), target.new_cache()).logits


class TextDrafter:
    """Drafts the target's own logits along its greedy text, spoiled by `noise`; noise 0 copies the target (case 19).

    It checks what the loop tells it: the features it was given must be those of the text, one row per committed token.
    """

    name = "text"

    def __init__(self, target: Target, token_ids: list[int], *, noise: float = 0.0, block_size: int = 6,
                 feature_layers: tuple[int, ...] = (0, 2), seed: int = 0, check: bool = True) -> None:
        self.check = check
        self.block_size, self.feature_layers, self.noise = block_size, feature_layers, noise
        target.set_feature_layers(feature_layers)
        self.token_ids = token_ids
        output = target.forward(token_ids, range(len(token_ids)), target.new_cache())
        self.logits, self.features = output.logits, output.features
        self.random = torch.Generator().manual_seed(seed)
        self.num_drafts = 0

    def start(self) -> None:
        self.given: list[torch.Tensor] = []

    def extend(self, features: torch.Tensor) -> None:
        self.given.append(features)

    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        self.num_drafts += 1
        given = torch.cat(self.given)
        assert len(given) == context_tokens
        if self.check and self.features is not None:
            assert root_token == self.token_ids[context_tokens]
            torch.testing.assert_close(given, self.features[:context_tokens], rtol=1e-3, atol=1e-4)
        rows = self.logits[context_tokens:context_tokens + self.block_size - 1].clone()
        missing = self.block_size - 1 - len(rows)
        if missing:
            rows = torch.cat([rows, torch.zeros(missing, rows.shape[1])])
        return rows + self.noise * torch.randn(rows.shape, generator=self.random)

    def identity(self) -> dict[str, Any]:
        return {"drafter": self.name, "block_size": self.block_size}


class RandomDrafter:
    """Drafts noise: nearly nothing is accepted."""

    name = "random"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, vocab: int, block_size: int = 5, seed: int = 0) -> None:
        self.vocab, self.block_size = vocab, block_size
        self.random = torch.Generator().manual_seed(seed)

    def start(self) -> None:
        pass

    def extend(self, features: torch.Tensor) -> None:
        raise AssertionError("this drafter asked for no features")

    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        return torch.randn(self.block_size - 1, self.vocab, generator=self.random)

    def identity(self) -> dict[str, Any]:
        return {"drafter": self.name, "block_size": self.block_size}


class PlainTree:
    """A tree given by its token ids and parents, with the interface the decoder uses."""

    def __init__(self, token_ids: list[int], parents: list[int]) -> None:
        self.token_ids, self.parents = np.array(token_ids), np.array(parents)
        self.depths = np.zeros(len(parents), dtype=int)
        for slot in range(1, len(parents)):
            self.depths[slot] = self.depths[parents[slot]] + 1

    @property
    def num_nodes(self) -> int:
        return len(self.parents) - 1

    def position_ids(self, context_tokens: int) -> np.ndarray:
        return context_tokens + self.depths

    def attention_mask(self) -> np.ndarray:
        mask = np.eye(len(self.parents), dtype=bool)
        for slot in range(1, len(self.parents)):
            mask[slot] |= mask[self.parents[slot]]
        return mask

    def child_with_token(self, slot: int, token: int) -> int:
        for child in range(slot + 1, len(self.parents)):
            if self.parents[child] == slot and self.token_ids[child] == token:
                return child
        return -1


class RandomTreeSelector:
    """Random prefix-closed trees over the top candidates, and now and then a round without a draft."""

    drafts = True

    def __init__(self, seed: int = 0, max_nodes: int = 12, top_k: int = 4, plain_share: float = 0.2) -> None:
        self.random = np.random.default_rng(seed)
        self.max_nodes, self.top_k, self.plain_share = max_nodes, top_k, plain_share
        self.observed: list[tuple[int, int]] = []
        self.num_plain = 0

    def drafts_next(self, context_tokens: int) -> bool:
        return bool(self.random.random() >= self.plain_share)

    def select(self, logits: torch.Tensor, context_tokens: int, root_token: int = -1) -> PlainTree:
        top = logits.topk(min(self.top_k, logits.shape[1]), dim=1).indices.tolist()
        token_ids, parents, depths, taken = [root_token], [-1], [0], set()
        for _ in range(int(self.random.integers(0, self.max_nodes + 1))):
            parent = int(self.random.integers(len(parents)))
            if depths[parent] == len(top):
                continue
            rank = min(int(self.random.geometric(0.6)) - 1, len(top[0]) - 1)
            token = top[depths[parent]][rank]
            if (parent, token) not in taken:
                taken.add((parent, token))
                token_ids.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return PlainTree(token_ids, parents)

    def observe(self, tree: PlainTree, num_accepted: int, round_seconds: float, token_ids: object = None) -> None:
        assert round_seconds > 0
        self.observed.append((tree.num_nodes, num_accepted))

    def observe_plain(self, round_seconds: float) -> None:
        self.num_plain += 1


class ChainSelector(RandomTreeSelector):
    """Always the best chain."""

    def __init__(self) -> None:
        super().__init__(plain_share=0.0)

    def select(self, logits: torch.Tensor, context_tokens: int, root_token: int = -1) -> PlainTree:
        tokens = logits.argmax(dim=1).tolist()
        return PlainTree([root_token, *tokens], list(range(-1, len(tokens))))


class LibraryDrafter:
    """Knows several texts by heart: drafts the target's logits at the place it is asked about, spoiled by `noise`."""

    name = "library"

    def __init__(self, target: Target, texts: list[list[int]], *, noise: float = 0.5, block_size: int = 5) -> None:
        self.block_size, self.noise, self.feature_layers = block_size, noise, (1,)
        self.vocab = target.shape["vocab"]
        self.known: dict[tuple[int, int], torch.Tensor] = {}
        for text in texts:
            logits = text_logits(target, text)
            for place, token in enumerate(text):
                self.known.setdefault((place, token), logits[place:place + block_size - 1])
        self.random = torch.Generator().manual_seed(0)

    def start(self) -> None:
        self.num_given = 0

    def extend(self, features: torch.Tensor) -> None:
        self.num_given += len(features)

    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        assert self.num_given == context_tokens
        rows = torch.zeros(self.block_size - 1, self.vocab)
        known = self.known.get((context_tokens, root_token), rows)
        rows[: len(known)] = known
        return rows + self.noise * torch.randn(rows.shape, generator=self.random)

    def identity(self) -> dict[str, Any]:
        return {"drafter": self.name, "block_size": self.block_size}


TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ <>.,!?"


def tiny_tokenizer(chat: bool = True) -> Any:
    """One token per character of a small alphabet, token 0 for all others, with a chat template that adds < and >."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"?unk": 0, **{letter: place for place, letter in enumerate(ALPHABET, start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?unk")
    fast.chat_template = TEMPLATE if chat else None
    return fast


def save_tiny_target(folder: Any) -> str:
    """A tiny target with tokenizer, on disk; returns the folder."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_dflash(target: Target, block_size: int = 5, mask_token_id: int = 7, seed: int = 0) -> Any:
    """A random DFlash drafter for a tiny target, over the target's own embedding and output head."""
    from decoder.drafters.dflash import DFlashDrafter
    from decoder.drafters.dflash_config import DFlashConfig
    from decoder.drafters.dflash_model import DFlashModel

    torch.manual_seed(seed)
    shape = target.shape
    config = DFlashConfig.from_dict({
        "hidden_size": shape["hidden"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "vocab_size": shape["vocab"], "attention_bias": False, "num_target_layers": shape["layers"], "block_size": block_size,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": mask_token_id},
    })
    return DFlashDrafter(DFlashModel(config).to(target.device), target.embed, target.head, name="tiny-dflash")
