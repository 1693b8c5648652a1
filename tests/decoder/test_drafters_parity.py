"""Our DFlash network against the authors' package: same random weights, same inputs, same hidden states and logits."""

from __future__ import annotations

import pytest
import torch

from decoder.drafters.dflash import DFlashDrafter, blocks_forward
from decoder.drafters.dflash_config import DFlashConfig
from decoder.drafters.dflash_model import DFlashModel

reference = pytest.importorskip("dflash.model", reason="the dflash package (a test dependency) is not installed")
from transformers import DynamicCache, Qwen3Config  # noqa: E402

VOCAB, HIDDEN, FEATURES = 97, 32, 3


def raw_config(**changes: object) -> dict:
    raw = {
        "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 256, "vocab_size": VOCAB,
        "attention_bias": False, "num_target_layers": 9, "block_size": 6,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 7},
    }
    return {**raw, **changes}


def build(raw: dict, seed: int) -> tuple[torch.nn.Module, DFlashDrafter, torch.nn.Linear]:
    torch.manual_seed(seed)
    theirs = reference.DFlashDraftModel(Qwen3Config(**raw)).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.3)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    ours = DFlashModel(DFlashConfig.from_dict(raw))
    ours.load_state_dict(theirs.state_dict(), strict=True)  # same names, same shapes: public checkpoints load unchanged
    return theirs, DFlashDrafter(ours, torch.randn(VOCAB, HIDDEN), head), head


VARIANTS = {
    "plain": {},
    "bias": {"attention_bias": True},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_three_rounds_with_cache_equal_the_authors_code(variant: str) -> None:
    theirs, ours, head = build(raw_config(**VARIANTS[variant]), seed=3)
    cache = reference._make_cache(theirs.config) if hasattr(reference, "_make_cache") else DynamicCache(config=theirs.config)
    context = 0
    for committed, root in ((11, 4), (3, 90), (1, 7)):  # the third root is the mask token itself
        features = torch.randn(committed, FEATURES * HIDDEN)
        ours.extend(features)
        block = torch.full((1, 6), 7)
        block[0, 0] = root
        positions = torch.arange(context, context + committed + 6)[None]
        hidden = theirs(position_ids=positions, noise_embedding=ours.embedding[block], target_hidden=features[None],
                        past_key_values=cache, use_cache=True)
        context += committed
        reference._crop_to(cache, context)
        expected = theirs.compute_logits(hidden[:, 1:], head)[0]
        torch.testing.assert_close(ours.draft(root, context), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["plain", "bias"])
@torch.inference_mode()
def test_without_cache_equals_the_authors_code(variant: str) -> None:
    theirs, ours, _ = build(raw_config(**VARIANTS[variant]), seed=5)
    features, tokens = torch.randn(20, FEATURES * HIDDEN), torch.randint(VOCAB, (20,))
    anchors = torch.tensor([4, 9, 19])
    batched = blocks_forward(ours.model, features[None], ours.embedding[tokens[anchors]][None], anchors[None], ours._mask_row)[0]
    for row, anchor in enumerate(anchors.tolist()):
        block = torch.full((1, 6), 7)
        block[0, 0] = tokens[anchor]
        expected = theirs(position_ids=torch.arange(anchor + 6)[None], noise_embedding=ours.embedding[block],
                          target_hidden=features[None, :anchor])
        torch.testing.assert_close(batched[row], expected[0], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_multiplier_and_soft_cap_equal_the_authors_code() -> None:
    raw = raw_config(dflash_config={"target_layer_ids": [1, 3, 5], "mask_token_id": 7, "output_multiplier": 0.7,
                                    "final_logit_softcapping": 5.0, "input_embedding_scale": 1.0})
    raw.pop("num_target_layers")
    raw["num_target_layers"] = 9
    theirs, ours, head = build(raw, seed=6)
    hidden = torch.randn(4, HIDDEN)
    torch.testing.assert_close(ours.model.logits(hidden, head), theirs.compute_logits(hidden, head), atol=1e-5, rtol=1e-5)
