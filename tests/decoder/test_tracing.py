"""A trace holds what live drafting would have proposed at every place, and recording goes on after a cut."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decoder.batched import Continuation
from decoder.cli import main
from decoder.commands.options import ModelChoice
from decoder.commands.taking import SHARE
from decoder.drafters.dflash import DFlashDrafter, save_dflash_model
from decoder.drafters.dflash_model import DFlashModel
from decoder.prompts import EncodedPrompt, encode_prompt
from decoder.seen import PromptsSeen, prompt_sha256, prompts_seen_by
from decoder.target import Target
from decoder.tracing import record_trace, target_rows
from decoder.training.start import config_for_target
from profiles.errors import FileFormatError
from selector import Trace, Trellis
from selector.errors import TraceMismatch
from tests.decoder.helpers import save_tiny_target, text_logits, tiny_dflash, tiny_target

PROMPTS = [SimpleNamespace(key=f"p{i}", dataset="odd" if i % 2 else "even", token_ids=[3 + i, 9, 27, 5 * i % 60])
           for i in range(7)]


def random_drafter(target: Target) -> DFlashDrafter:
    config = config_for_target(target.model.config, num_layers=2, block_size=5, mask_token_id=60, num_features=2)
    torch.manual_seed(1)
    model = DFlashModel(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return DFlashDrafter(model, target.embed, target.head, name="random")


def test_drafts_equal_those_of_the_live_loop_at_every_root(tmp_path: Path) -> None:
    target = tiny_target(layers=8, scale=0.2)
    drafter = random_drafter(target)
    trace = record_trace(target, drafter, PROMPTS, tmp_path / "t.safetensors", max_new_tokens=12, top_k=6, num_rows=3)
    assert [text.key for text in trace.texts] == [prompt.key for prompt in PROMPTS]
    text = trace.texts[3]
    target.set_feature_layers(drafter.feature_layers)
    whole = target.forward(text.token_ids, range(len(text.token_ids)), target.new_cache())
    assert whole.features is not None
    drafter.start()
    drafter.extend(whole.features[: text.num_prompt_tokens])
    for anchor in range(len(text.token_ids) - text.num_prompt_tokens):
        place = text.num_prompt_tokens + anchor
        live = Trellis.from_logits(drafter.draft(int(text.token_ids[place]), place), 6)
        np.testing.assert_allclose(text.draft_logprobs[anchor], live.log_edges, atol=2e-3)
        assert (text.draft_token_ids[anchor][:, 0] == live.token_ids[:, 0]).all()
        drafter.extend(whole.features[place:place + 1])


def test_recording_goes_on_where_it_was_cut_and_refuses_other_settings(tmp_path: Path) -> None:
    target = tiny_target(layers=8, scale=0.2)
    drafter = random_drafter(target)
    whole = record_trace(target, drafter, PROMPTS, tmp_path / "whole.safetensors", max_new_tokens=10, top_k=4, num_rows=2)
    out = tmp_path / "cut.safetensors"

    def cut(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_trace(target, drafter, PROMPTS, out, max_new_tokens=10, top_k=4, num_rows=2, progress=cut)
    assert not out.exists()
    with pytest.raises(TraceMismatch, match="top_k"):
        record_trace(target, drafter, PROMPTS, out, max_new_tokens=10, top_k=5, num_rows=2)
    with pytest.raises(TraceMismatch, match="max_new_tokens is 10 in the trace, expected 11"):  # and not what follows from it
        record_trace(target, drafter, PROMPTS, out, max_new_tokens=11, top_k=4, num_rows=2)
    with pytest.raises(TraceMismatch, match="target_sha256"):  # of the same name and shape
        record_trace(tiny_target(layers=8, scale=0.2, seed=1), drafter, PROMPTS, out, max_new_tokens=10, top_k=4, num_rows=2)
    counts: list[int] = []
    record_trace(target, drafter, PROMPTS, out, max_new_tokens=10, top_k=4, num_rows=2, progress=counts.append)
    assert counts[0] == 4  # four texts were not decoded again
    for ours, theirs in zip(Trace.load(out).texts, whole.texts, strict=True):
        assert (ours.token_ids == theirs.token_ids).all() and (ours.draft_token_ids == theirs.draft_token_ids).all()


def test_target_rows_are_the_targets_own_distributions_behind_every_root(tmp_path: Path) -> None:
    """Row a is about the token after root a; the oracle is one causal forward over the finished text."""
    target = tiny_target(layers=8, scale=0.2)
    out = tmp_path / "t.safetensors"
    trace = record_trace(target, random_drafter(target), PROMPTS, out, max_new_tokens=9, top_k=4, num_rows=3)
    for text in Trace.load(out).texts:
        assert text.target_token_ids is not None and text.target_logprobs is not None
        assert text.target_token_ids.shape == text.target_logprobs.shape == (9, 16)
        logprobs = text_logits(target, text.token_ids.tolist()).log_softmax(-1).numpy()
        for anchor in range(text.num_anchors - 1):
            place = text.num_prompt_tokens + anchor
            expected = logprobs[place, text.target_token_ids[anchor]]
            np.testing.assert_allclose(text.target_logprobs[anchor], expected, atol=4e-3)  # labels are kept in half precision
            assert (np.diff(text.target_logprobs[anchor]) <= 0).all()
            assert text.target_token_ids[anchor, 0] == text.token_ids[place + 1]  # greedy: what it then said
            for depth, token in enumerate(text.next_tokens()[anchor]):
                if token >= 0:
                    assert text.target_token_ids[anchor + depth, 0] == token  # row a + d on the true path
        assert (text.target_token_ids[-1] == -1).all() and np.isneginf(text.target_logprobs[-1]).all()
    assert trace.has_targets


def test_a_text_without_labels_has_no_target_rows() -> None:
    assert target_rows(Continuation("k", 2, 0, [1, 2, 3])) == (None, None)


def test_a_trace_says_how_many_prompts_the_drafter_saw(tmp_path: Path) -> None:
    target = tiny_target(layers=8, scale=0.2)
    drafter, options = random_drafter(target), {"max_new_tokens": 4, "top_k": 3}
    seen = PromptsSeen.of([PROMPTS[1].token_ids, PROMPTS[4].token_ids, [1, 2, 3]])
    trace = record_trace(target, drafter, PROMPTS, tmp_path / "a.safetensors", seen=seen, **options)
    assert trace.identity["drafter_saw"] == 2 and len(trace.identity["prompt_sha256s"]) == 7
    assert trace.identity["prompt_sha256s"][1] == prompt_sha256(PROMPTS[1].token_ids)
    assert Trace.load(tmp_path / "a.safetensors").identity == trace.identity
    unseen = record_trace(target, drafter, PROMPTS, tmp_path / "b.safetensors", seen=PromptsSeen.of([[1, 2, 3]]), **options)
    unknown = record_trace(target, drafter, PROMPTS, tmp_path / "c.safetensors", **options)
    assert unseen.identity["drafter_saw"] == 0 and unknown.identity["drafter_saw"] is None


def test_what_was_begun_without_knowing_the_prompts_seen_goes_on_with_it(tmp_path: Path) -> None:
    target, out = tiny_target(layers=8, scale=0.2), tmp_path / "t.safetensors"
    drafter = random_drafter(target)

    def cut(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_trace(target, drafter, PROMPTS, out, max_new_tokens=4, top_k=3, progress=cut)
    counts: list[int] = []
    seen = PromptsSeen.of([PROMPTS[0].token_ids])
    trace = record_trace(target, drafter, PROMPTS, out, max_new_tokens=4, top_k=3, seen=seen, progress=counts.append)
    assert counts[0] == 3 and trace.identity["drafter_saw"] == 1 and len(trace.texts) == 7


def test_prompts_seen_worked_example(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"[5, 6, 7]").hexdigest()[:16]
    seen = PromptsSeen.of([[5, 6, 7], np.array([5, 6, 7]), [8]])
    assert prompt_sha256([5, 6, 7]) == digest and digest in seen.digests and len(seen.digests) == 2
    seen.save(tmp_path)
    assert PromptsSeen.load(tmp_path) == seen and PromptsSeen.load(tmp_path / "none") is None
    assert seen.count([digest, "0" * 16]) == 1 and seen.count(["0" * 16]) == 0
    more = PromptsSeen.of([[9]])
    assert more.after(seen).count([digest]) == 1
    partly = more.after(None)  # from a drafter that does not say
    assert partly.count([prompt_sha256([9])]) == 1 and partly.count([digest]) is None
    assert not PromptsSeen.of([[1]]).after(partly).is_complete
    (tmp_path / "prompts_seen.json").write_text('{"schema": "other"}')
    with pytest.raises(FileFormatError, match="schema"):
        PromptsSeen.load(tmp_path)


def test_the_shipped_drafter_says_what_it_was_trained_on() -> None:
    seen = prompts_seen_by("smollm2-135m-dflash")
    assert seen is not None and seen.is_complete and len(seen.digests) == 1258
    assert all(len(digest) == 16 for digest in seen.digests)


@pytest.mark.parametrize(("given", "expected"), [("6:5", [5, 11]), ("4:0", [0, 4, 8, 12]), ("13:12", [12]), ("1:0", None)])
def test_take_chooses_by_number(given: str, expected: list[int] | None) -> None:
    share = SHARE.convert(given, None, None)
    assert share.of(list(range(13))) == (list(range(13)) if expected is None else expected) and str(share) == given


@pytest.mark.parametrize("given", ["6", "6:6", "0:0", "a:1", "6:-1", ":", "6:5:4", ""])
def test_take_refuses_what_is_no_share(given: str) -> None:
    with pytest.raises(click.BadParameter, match="REST below EVERY"):
        SHARE.convert(given, None, None)


def test_trace_command_takes_a_share_and_warns_of_prompts_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_target(tmp_path / "tiny")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {letter}"}}\n' for letter in "abcdefgh"))
    monkeypatch.setattr(ModelChoice, "load_drafter", lambda _models, target: tiny_dflash(target))
    ids = encode_prompt(Target.load(folder, dtype="float32").tokenizer, "say d")
    monkeypatch.setattr("decoder.seen.prompts_seen_by", lambda name: PromptsSeen.of([ids]))
    arguments = ["trace", "--target", folder, "--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "6",
                 "--top-k", "4", "--out", str(tmp_path / "t.safetensors")]
    result = CliRunner().invoke(main, [*arguments, "--take", "3:0", "--limit", "2", "--json"])
    assert result.exit_code == 0, result.output
    identity = json.loads(result.stdout)["identity"]
    assert identity["drafter_saw"] == 1 and "prompt_sha256s" not in identity
    assert "trained on 1 of these 2 prompts" in result.stderr
    assert [text.key for text in Trace.load(tmp_path / "t.safetensors").texts] == ["1", "4"]
    clean = CliRunner().invoke(main, [*arguments, "--take", "3:1"])
    assert clean.exit_code == 0 and "trained on" not in clean.stderr
    assert CliRunner().invoke(main, [*arguments, "--take", "30:29"]).exit_code == 2
    assert CliRunner().invoke(main, [*arguments, "--take", "3:3"]).exit_code == 2


def test_more_candidates_than_the_vocabulary_has_are_all_of_it(tmp_path: Path) -> None:
    target = tiny_target(layers=8, scale=0.2, vocab=12)
    prompts = [EncodedPrompt("a", None, [1, 2, 3])]
    trace = record_trace(target, tiny_dflash(target), prompts, tmp_path / "t.safetensors", max_new_tokens=4, top_k=500)
    assert trace.top_k == trace.identity["top_k"] == 12 and trace.texts[0].target_token_ids.shape[1] == 12


def test_a_trace_names_the_weights_that_drafted(tmp_path: Path) -> None:
    """Two drafters of one name are told apart by their weights; one that was made in memory has none to name."""
    target = tiny_target(layers=8, scale=0.2)
    shas = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = DFlashModel(random_drafter(target).config)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
        save_dflash_model(model, model.config, tmp_path / "drafter")
        drafter = DFlashDrafter.load(tmp_path / "drafter", target.embed, target.head)
        trace = record_trace(target, drafter, PROMPTS[:2], tmp_path / "t.safetensors", max_new_tokens=4, top_k=4)
        shas.append(trace.identity["drafter_sha256"])
    assert shas[0] == shas[1] != shas[2] and len(shas[0]) == 64
    with pytest.raises(TraceMismatch, match="drafter_sha256"):
        Trace.load(tmp_path / "t.safetensors").check({"drafter_sha256": shas[0]})
    unnamed = record_trace(target, random_drafter(target), PROMPTS[:2], tmp_path / "u.safetensors", max_new_tokens=4, top_k=4)
    assert "drafter_sha256" not in unnamed.identity
