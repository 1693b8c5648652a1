"""A trace holds what live drafting would have proposed at every place, and recording goes on after a cut."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_model import DFlashModel
from decoder.target import Target
from decoder.tracing import record_trace
from decoder.training.start import config_for_target
from selector import Trace, Trellis
from selector.errors import TraceMismatch
from tests.decoder.helpers import tiny_target

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
    counts: list[int] = []
    record_trace(target, drafter, PROMPTS, out, max_new_tokens=10, top_k=4, num_rows=2, progress=counts.append)
    assert counts[0] == 4  # four texts were not decoded again
    for ours, theirs in zip(Trace.load(out).texts, whole.texts, strict=True):
        assert (ours.token_ids == theirs.token_ids).all() and (ours.draft_token_ids == theirs.draft_token_ids).all()
