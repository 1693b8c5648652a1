"""Targets: loading, agreement with transformers' own forward, other architectures, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from decoder.attention import _folded, fold_query_groups
from decoder.errors import TargetError, TargetMissingError, UsageError
from decoder.loop import Decoder
from decoder.shape import context_limit
from decoder.target import Target, check_device
from tests.decoder.helpers import RandomTreeSelector, TextDrafter, save_tiny_target, text_logits, tiny_model, tiny_target

SMALL: dict[str, Any] = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                             num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None,
                             bos_token_id=None, pad_token_id=None)
FAMILIES = {
    "Llama": SMALL,
    "Qwen2": SMALL,
    "Qwen3": {**SMALL, "head_dim": 16},
    "Mistral": {**SMALL, "sliding_window": 64},
    "GPTNeoX": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "GPT2": dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3, eos_token_id=None,
                 bos_token_id=None),
}


def family_model(name: str) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_causal_models(name: str, tmp_path: Path) -> None:
    """Any causal language model from a local folder: same logits as its own forward, same text with and without trees."""
    model = family_model(name).eval()
    model.save_pretrained(tmp_path / "other")
    target = Target.load(str(tmp_path / "other"), dtype="float32")
    assert target.name == "other" and target.dtype == torch.float32
    prompt = [5, 9, 33, 2, 8]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(text_logits(target, prompt), expected, rtol=1e-4, atol=1e-5)
    plain = Decoder(target).generate(prompt, 20, stop_ids=set()).token_ids
    drafter = TextDrafter(target, prompt + plain, noise=1.0)
    assert Decoder(target, drafter, RandomTreeSelector(4)).generate(prompt, 20, stop_ids=set()).token_ids == plain


def test_agrees_with_generate() -> None:
    model = tiny_model()
    prompt = torch.tensor([[3, 17, 5, 40]])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, 4:].tolist()
    assert Decoder(Target(model)).generate(prompt[0].tolist(), 20).token_ids == expected


def test_features_are_layer_outputs() -> None:
    """Feature layer i is transformers' hidden_states[i + 1]."""
    model = tiny_model().eval()
    ids = torch.tensor([[3, 17, 5, 40]])
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
    target = Target(model, feature_layers=[0, 1])
    output = target.forward(ids[0], range(4), target.new_cache(), logits_rows=slice(-1, None))
    assert output.features is not None
    torch.testing.assert_close(output.features, torch.cat([states[1][0], states[2][0]], dim=1))
    assert output.logits.shape == (1, 61)
    target.set_feature_layers([])
    assert target.forward(ids[0], range(4), target.new_cache()).features is None
    with pytest.raises(TargetError, match="feature layers"):
        target.set_feature_layers([3])


def test_positions_matter() -> None:
    """A wrong position changes the logits, so that a position fault cannot hide."""
    target = tiny_target()
    right = target.forward([3, 4, 5], [0, 1, 2], target.new_cache()).logits
    wrong = target.forward([3, 4, 5], [0, 1, 3], target.new_cache()).logits
    torch.testing.assert_close(right[:2], wrong[:2])
    assert (right[2] - wrong[2]).abs().max() > 1e-3


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_against_the_formula(num_tokens: int, heads: tuple[int, int], masked: bool) -> None:
    """Softmax attention written out, with every key head copied for its group."""
    torch.manual_seed(num_tokens)
    num_keys = num_tokens + 5 if masked or num_tokens == 1 else num_tokens
    query = torch.randn(1, heads[0], num_tokens, 8)
    key, value = torch.randn(2, 1, heads[1], num_keys, 8)
    mask = torch.rand(1, 1, num_tokens, num_keys) < 0.5
    mask[..., 0] = True
    allowed = mask if masked else torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(num_keys - num_tokens)
    copies = heads[0] // heads[1]
    scores = query @ key.repeat_interleave(copies, 1).transpose(2, 3) * 0.3
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    expected = (weights @ value.repeat_interleave(copies, 1)).transpose(1, 2)
    module = torch.nn.Module()
    found, _ = fold_query_groups(module, query, key, value, mask if masked else None, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if masked:  # the form used on CUDA
        folded = _folded(query, key, value, mask, copies, 0.3)
        torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-5)


def test_attention_refuses_what_it_would_leave_out() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(TargetError, match="softcap"):
        fold_query_groups(torch.nn.Module(), query, query, query, None, softcap=30.0)
    with pytest.raises(TargetError, match="mask"):
        fold_query_groups(torch.nn.Module(), query, query.repeat(1, 1, 2, 1), query.repeat(1, 1, 2, 1), None)


def test_a_scaled_output_head_is_refused() -> None:
    """A model whose logits are not its output head's would be decoded wrongly, so loading stops."""
    config = transformers.CohereConfig(**{**SMALL, "logit_scale": 0.06})
    with pytest.raises(TargetError, match="output head"):
        Target(AutoModelForCausalLM.from_config(config))


def test_context_limits() -> None:
    assert tiny_target().max_context_tokens == 512
    mistral = transformers.MistralConfig(**{**SMALL, "sliding_window": 64})
    assert context_limit(mistral) == 64
    assert context_limit(transformers.Qwen2Config(**SMALL)) == 128
    with pytest.raises(TargetError, match="linear_attention"):
        context_limit(_Linear())


class _Linear:
    model_type, max_position_embeddings = "x", 128
    layer_types = ["full_attention", "linear_attention"]


def test_loading_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    with pytest.raises(TargetMissingError) as caught:
        Target.load("smollm2-135m")
    assert caught.value.hint is not None and "decoder pull" in caught.value.hint
    with pytest.raises(UsageError, match="int4"):
        Target.load("smollm2-135m", dtype="int4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="empty"):
        Target.load(str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="prepicked"):
        Target(tiny_model(), linear="prepicked")
    with pytest.raises(TargetError, match="tokenizer"):
        _ = tiny_target().tokenizer


def test_broken_weights_and_devices_that_compute_nothing_are_named(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(TargetError, match="not finite in torch.float32: its weights hold NaN"):
        Target(model)
    folder = Path(save_tiny_target(tmp_path / "cut"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(TargetError, match="cannot load target"):
        Target.load(str(folder))
    with pytest.raises(UsageError, match="computes nothing"):
        check_device("meta")


def test_the_digest_of_the_weights_tells_targets_apart_and_not_dtypes() -> None:
    ours = tiny_target().weights_sha256
    assert ours == tiny_target(seed=0).weights_sha256 == Target(tiny_model().to(torch.bfloat16)).weights_sha256
    assert ours == Target(tiny_model(), linear="prepacked").weights_sha256
    assert len({ours, tiny_target(seed=1).weights_sha256, tiny_target(layers=2).weights_sha256}) == 3


def test_identity_names_what_runs() -> None:
    identity = tiny_target().identity()
    assert identity.target == "tiny" and identity.dtype == "float32" and identity.mode == "eager"
    assert identity.model_shape["kv_heads"] == 2 and identity.num_threads == torch.get_num_threads()


def test_masks_of_another_size_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="does not fit"):
        target.forward([1, 2], [0, 1], target.new_cache(), mask=torch.ones(3, 3, dtype=torch.bool))


def test_refused_feature_layers_leave_the_chosen_ones_at_work() -> None:
    target = tiny_target()
    target.set_feature_layers((0, 2))
    expected = target.forward([3, 1, 4], range(3), target.new_cache()).features
    with pytest.raises(TargetError, match="feature layers"):
        target.set_feature_layers((0, 40))
    torch.testing.assert_close(target.forward([3, 1, 4], range(3), target.new_cache()).features, expected)
    other = target.forward([5, 9, 2], range(3), target.new_cache()).features
    assert expected is not None and other is not None and not torch.equal(other, expected)
