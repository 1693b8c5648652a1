"""The default target itself: loads offline, and trees keep its text."""

from __future__ import annotations

import pytest
import torch

from decoder.drafters.registry import find_drafter, load_drafter
from decoder.loop import Decoder
from decoder.prompts import encode_prompt, load_prompts
from decoder.pull import is_pulled
from decoder.target import Target
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_TARGET
from tests.decoder.helpers import RandomTreeSelector, TextDrafter

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target() -> Target:
    if not is_pulled(DEFAULT_TARGET):
        pytest.skip(f"{DEFAULT_TARGET} is not in the cache; fetch it with: decoder pull {DEFAULT_TARGET}")
    return Target.load(DEFAULT_TARGET, dtype="float32")


def test_what_was_converted(target: Target) -> None:
    assert target.shape == {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64,
                            "vocab": 49152}
    assert target.stop_ids == frozenset({2}) and target.max_context_tokens == 8192
    assert getattr(target.model.config, "quantization_config", None) is None
    ids = encode_prompt(target.tokenizer, "Say hello.")
    assert target.tokenizer.decode(ids).endswith("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")


def test_trees_keep_the_text(target: Target) -> None:
    """Trees over half-right drafts, float32: token for token plain decoding's text, in far fewer rounds."""
    ids = encode_prompt(target.tokenizer, load_prompts()[0].text)
    plain = Decoder(target).generate(ids, 40)
    assert "muffins" in target.tokenizer.decode(plain.token_ids)
    drafter = TextDrafter(target, ids + plain.token_ids, noise=2.0, block_size=8, feature_layers=(1, 15), check=False)
    selector = RandomTreeSelector(0, max_nodes=24, plain_share=0.1)
    result = Decoder(target, drafter, selector).generate(ids, 40)
    assert result.token_ids == plain.token_ids
    assert len(result.rounds) < 0.7 * len(plain.rounds)


def test_the_shipped_drafter(target: Target) -> None:
    """Its drafts are accepted, and the text stays plain decoding's."""
    if not (find_drafter(DEFAULT_DRAFTER) / "model.safetensors").exists():
        pytest.skip("the package carries no drafter weights yet")
    from decoder.check import made_up_cost
    from selector import TreeSelector

    drafter = load_drafter(DEFAULT_DRAFTER, target)
    ids = encode_prompt(target.tokenizer, load_prompts()[9].text)
    plain = Decoder(target).generate(ids, 48).token_ids
    selector = TreeSelector(made_up_cost(0.05), policy="fixed:16", pause=None)
    result = Decoder(target, drafter, selector).generate(ids, 48)
    assert result.token_ids == plain
    assert result.tokens_per_round > 1.5 and result.mean_nodes > 12


def test_bfloat16_loads_and_speaks(target: Target) -> None:
    small = Target.load(DEFAULT_TARGET, dtype="bfloat16")
    assert small.dtype == torch.bfloat16 and small.identity().dtype == "bfloat16"
    ids = encode_prompt(small.tokenizer, "What is the capital of France?")
    ids += small.tokenizer.encode("The capital of France is", add_special_tokens=False)  # the first word alone is a near-tie
    assert "Paris" in small.tokenizer.decode(Decoder(small).generate(ids, 16).token_ids)


def test_the_shipped_drafter_drafts_in_float16(target: Target) -> None:
    """Hidden states of this target are large enough to overflow a float16 drafter, which then would never draft."""
    from decoder.check import made_up_cost
    from selector import TreeSelector

    half = Target.load(DEFAULT_TARGET, dtype="float16")
    selector = TreeSelector(made_up_cost(0.05), policy="chain", pause=None)
    ids = encode_prompt(half.tokenizer, load_prompts()[9].text)
    result = Decoder(half, load_drafter(DEFAULT_DRAFTER, half), selector).generate(ids, 24)
    assert selector.stats.nan_rows == 0 and result.tokens_per_round > 1.3
