"""The block-diffusion drafter in the live loop, and replay's prediction of a bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel import CostModel
from decoder.bench import BenchSettings, run_bench
from decoder.check import made_up_cost, step_seconds
from decoder.drafters.dflash import DFlashDrafter, save_dflash_model
from decoder.errors import DrafterError
from decoder.loop import Decoder
from decoder.predict import trace_of_text
from decoder.prompts import Prompt, encode_prompt
from decoder.speed import SpeedReference
from decoder.target import Target
from selector import Trace, TreeSelector
from tests.decoder.helpers import RandomTreeSelector, tiny_dflash, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer(), name="tiny")


def test_a_prompt_full_of_mask_tokens(target: Target) -> None:
    """Case 17: the mask token's id in prompt and text is a token like any other."""
    drafter = tiny_dflash(target, mask_token_id=7)
    for prompt in ([7, 7, 3, 7], [3, 9, 7]):
        plain = Decoder(target).generate(prompt, 30).token_ids
        result = Decoder(target, drafter, RandomTreeSelector(5)).generate(prompt, 30)
        assert result.token_ids == plain and result.num_prompt_tokens == len(prompt)


def test_live_drafts_equal_teacher_forced_drafts(target: Target) -> None:
    """What the drafter says in the loop, after lazy take-over of features, is what a trace records at that place."""
    drafter = tiny_dflash(target)
    prompt = Prompt("hello", None, "p")
    ids = encode_prompt(target.tokenizer, prompt.text)
    plain = Decoder(target).generate(ids, 20).token_ids
    trace = Trace({}, [trace_of_text(target, drafter, prompt, ids, plain, 4, "p")])
    seen: dict[int, torch.Tensor] = {}
    draft = drafter.draft

    def keep(root_token: int, context_tokens: int) -> torch.Tensor:
        logits = draft(root_token, context_tokens)
        seen[context_tokens - len(ids)] = logits
        return logits

    drafter.draft = keep
    Decoder(target, drafter, RandomTreeSelector(2)).generate(ids, 20)
    assert len(seen) > 5
    for anchor, logits in seen.items():
        expected = torch.log_softmax(logits.float(), dim=-1).topk(4).values.numpy()
        np.testing.assert_allclose(trace.texts[0].draft_logprobs[anchor][: len(expected)], expected, rtol=1e-3, atol=1e-3)


def test_nan_drafts_become_plain_steps(target: Target) -> None:
    """Case 6, drafter side: a NaN row gives a root-only tree and a counter."""
    drafter = tiny_dflash(target)
    drafter.head = lambda hidden: torch.full((hidden.shape[0], 61), float("nan"))
    selector = TreeSelector(made_up_cost(1e-3), policy="fixed:16", pause=None)
    plain = Decoder(target).generate([5, 6], 10).token_ids
    result = Decoder(target, drafter, selector).generate([5, 6], 10)
    assert result.token_ids == plain and result.mean_nodes == 0 and selector.stats.nan_rows > 0


def test_predictions_by_policy(target: Target) -> None:
    prompts = [Prompt("hello there", "a", "p1"), Prompt("what is this?", "b", "p2")]
    settings = BenchSettings(("chain", "fixed:6", "priced"), max_new_tokens=16, max_nodes=20, top_k=8)
    result = run_bench(target, tiny_dflash(target), made_up_cost(step_seconds(target)), prompts, settings)
    assert set(result.prediction.rates) >= {"plain", "chain", "fixed:6", "priced"}
    assert all(rate > 0 for rate in result.prediction.rates.values()) and result.prediction.note is None
    assert [row["num_nodes"] for row in result.prediction.selection] == [8, 16, 64]


def test_prediction_counts_the_rounds_that_were_decoded(target: Target) -> None:
    """By a curve that only counts rounds, the predicted rate is the tokens per round of the live run, exactly."""
    prompts = [Prompt("hello there", "a", "p1"), Prompt("what is this?", "b", "p2")]
    cost = CostModel.from_points([1, 8, 64], [1.0, 1.0, 1.0001], draft_seconds=0.0)
    settings = BenchSettings(("chain", "fixed:6"), max_new_tokens=20, max_nodes=20, top_k=8, pause=False)
    result = run_bench(target, tiny_dflash(target), cost, prompts, settings)
    for name in ("plain", "chain", "fixed:6"):
        rounds = [entry for run in result.of(name) for entry in run.result.rounds]
        live = sum(entry.num_emitted for entry in rounds) / len(rounds)
        assert result.prediction.rates[name] == pytest.approx(live, rel=1e-3)


def test_references_are_timed_in_between_what_is_decoded(target: Target) -> None:
    """The drafter that they time is the one that decodes: neither may stumble over where the other left it."""
    prompts = [Prompt("a b c"), Prompt("d e f g h")]
    cost = CostModel.from_points([1, 8, 64], [1.0, 1.0, 1.1], draft_seconds=0.1)
    settings = BenchSettings(("chain", "fixed:6"), max_new_tokens=20, max_nodes=20, top_k=8, pause=False)
    result = run_bench(target, tiny_dflash(target), cost, prompts, settings)
    alone = run_bench(target, tiny_dflash(target), cost, prompts, replace(settings, predict=False))
    assert {row["num_samples"] for row in result.machine_speed["references"].values()} == {len(result.runs)}
    assert set(result.machine_speed["references"]) == {"plain", "tree", "draft"} and alone.machine_speed is None
    assert [run.result.token_ids for run in result.runs] == [run.result.token_ids for run in alone.runs]
    assert [run.result.rounds[0].num_emitted for run in result.runs] == [run.result.rounds[0].num_emitted for run in alone.runs]


def test_a_machine_twice_as_slow_as_its_profile_is_noticed(target: Target) -> None:
    """The record scales the profile's rates by what the references say of now."""
    cost = CostModel.from_points([1, 64], [1.0, 2.0], draft_seconds=0.5)
    reference = SpeedReference.of(target, tiny_dflash(target), cost, 24)
    assert set(reference.samples) == {"plain", "tree", "draft"}
    reference.measure()
    assert all(len(values) == 1 and values[0] > 0 for values in reference.samples.values())
    reference.samples = {"plain": [2.0, 2.0], "tree": [2 * reference.expected["tree"]], "draft": [1.0]}
    assert reference.speed == pytest.approx(0.5)
    assert reference.record()["references"]["plain"]["mean_milliseconds"] == pytest.approx(2000)


def test_large_features_do_not_overflow_in_float16(target: Target) -> None:
    """Sums beyond 65,504 in `fc`: the context rows are those of float32."""
    model = tiny_dflash(target).model
    features = torch.randn(1, 7, model.fc.in_features, generator=torch.Generator().manual_seed(0)) * 6000
    with torch.inference_mode():
        model.fc.weight.normal_(generator=torch.Generator().manual_seed(1)).mul_(3)
        expected = model.project(features)
        assert model.fc(features).abs().max() > 2 * 65504
        found = model.half().project(features.half())
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
        small = model.project(features.half() * 1e-6)
        torch.testing.assert_close(small.float(), model.float().project(features * 1e-6), rtol=0.02, atol=0.02)


def test_a_drafters_damaged_or_unfitting_weights_are_named(target: Target, tmp_path: Path) -> None:
    drafter = tiny_dflash(target)
    save_dflash_model(drafter.model, drafter.model.config, tmp_path)
    assert DFlashDrafter.load(tmp_path, target.embed, target.head).block_size == 5
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps(document | {"intermediate_size": 40}))
    with pytest.raises(DrafterError, match="cannot be used: .*size mismatch"):
        DFlashDrafter.load(tmp_path, target.embed, target.head)
    for change, said in [
        ({"block_size": 1}, "block_size 1 .at least 2"), ({"num_hidden_layers": "two"}, "a field is missing or no number"),
        ({"block_size": None}, "no number"), ({"layer_types": ["full_attention"]}, "with 1 layer_types"),
        ({"dflash_config": {"target_layer_ids": [-1], "mask_token_id": 7}}, "none negative"),
        ({"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 61}}, "outside the target's vocabulary of 61"),
        ({"num_attention_heads": -4}, "makes no drafter"), ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ]:
        config.write_text(json.dumps(document | change))
        with pytest.raises(DrafterError, match=said):
            DFlashDrafter.load(tmp_path, target.embed, target.head)
    for text, said in [("[1]", "expected a JSON object"), ("{", "not JSON"), ("\udcff", "not JSON")]:
        config.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DrafterError, match=said):
            DFlashDrafter.load(tmp_path, target.embed, target.head)
    config.write_text(json.dumps(document))
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(DrafterError, match="model.safetensors cannot be used"):
        DFlashDrafter.load(tmp_path, target.embed, target.head)
    weights.unlink()
    with pytest.raises(DrafterError, match="no drafter weights"):
        DFlashDrafter.load(tmp_path, target.embed, target.head)
