"""The loop gives plain decoding's text, exactly, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoder.errors import ContextError, LogitsError, UsageError
from decoder.loop import Decoder
from decoder.target import Target
from tests.decoder.helpers import (
    ChainSelector,
    PlainTree,
    RandomDrafter,
    RandomTreeSelector,
    TextDrafter,
    text_logits,
    tiny_target,
)

PROMPT = [3, 17, 5, 40, 2, 11]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def naive_greedy(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    """The text by definition: a whole forward per token, nothing cached."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(text_logits(target, token_ids)[-1].argmax()))
    return token_ids[len(prompt):]


def test_plain_equals_a_forward_per_token(target: Target) -> None:
    result = Decoder(target).generate(PROMPT, 24)
    assert result.token_ids == naive_greedy(target, PROMPT, 24)
    assert len(result.rounds) == 23 and result.tokens_per_round == 1.0 and result.mean_nodes == 0.0
    assert result.finish_reason == "length"


@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees_keep_the_text(target: Target, noise: float, seed: int) -> None:
    plain = Decoder(target).generate(PROMPT, 40).token_ids
    drafter = TextDrafter(target, PROMPT + plain, noise=noise, seed=seed)
    selector = RandomTreeSelector(seed)
    result = Decoder(target, drafter, selector).generate(PROMPT, 40)
    assert result.token_ids == plain
    assert sum(accepted for _, accepted in selector.observed) > 0
    assert len(selector.observed) + selector.num_plain == len(result.rounds)
    assert sum(entry.num_emitted for entry in result.rounds) == 39


def test_the_selector_is_told_what_every_drafting_round_committed(target: Target) -> None:
    class Listening(ChainSelector):
        heard: list[int] = []

        def observe(self, tree: PlainTree, num_accepted: int, round_seconds: float, token_ids: object = None) -> None:
            assert isinstance(token_ids, list) and len(token_ids) == num_accepted + 1
            self.heard.extend(token_ids)

    plain = Decoder(target).generate(PROMPT, 30).token_ids
    selector = Listening()
    Decoder(target, TextDrafter(target, PROMPT + plain, noise=2.0), selector).generate(PROMPT, 30)
    told = len(selector.heard)  # the last token or so comes from a plain step
    assert 20 < told and selector.heard[:29] == plain[1 : 1 + told]


def test_random_drafts_keep_the_text(target: Target) -> None:
    plain = Decoder(target).generate(PROMPT, 30).token_ids
    assert Decoder(target, RandomDrafter(61), RandomTreeSelector(1)).generate(PROMPT, 30).token_ids == plain


def test_a_copy_of_the_target_is_always_accepted(target: Target) -> None:
    """Case 19: equality with plain decoding cannot see a broken mask or position, full acceptance can."""
    plain = Decoder(target).generate(PROMPT, 41).token_ids
    result = Decoder(target, TextDrafter(target, PROMPT + plain), ChainSelector()).generate(PROMPT, 41)
    assert result.token_ids == plain
    assert all(entry.num_accepted == entry.num_nodes for entry in result.rounds)
    assert [entry.num_emitted for entry in result.rounds] == [6] * 6 + [4]  # the last round drafts no deeper than needed
    assert result.rounds[-1].num_nodes == 3


@pytest.mark.parametrize("fault", ["positions", "mask"])
def test_a_broken_forward_is_seen(target: Target, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The check above has teeth: wrong positions or an open mask cost acceptance."""
    plain = Decoder(target).generate(PROMPT, 41).token_ids
    drafter = TextDrafter(target, PROMPT + plain, check=False)
    if fault == "positions":
        monkeypatch.setattr(PlainTree, "position_ids", lambda tree, context: context + tree.depths * 2)
    else:
        monkeypatch.setattr(PlainTree, "attention_mask", lambda tree: np.ones((len(tree.parents),) * 2, dtype=bool))
    result = Decoder(target, drafter, ChainSelector()).generate(PROMPT, 41)
    assert any(entry.num_accepted < entry.num_nodes for entry in result.rounds)


def test_two_requests_one_decoder(target: Target) -> None:
    """Case 20: a long prompt, then a short one; nothing of the first is left."""
    long_prompt = [int(token) for token in torch.randint(61, (90,), generator=torch.Generator().manual_seed(5))]
    shared_cache = target.new_cache(16)
    for prompt in (long_prompt, [7, 9]):
        plain = Decoder(target).generate(prompt, 30).token_ids
        decoder = Decoder(target, TextDrafter(target, prompt + plain, noise=1.0), RandomTreeSelector(3), cache=shared_cache)
        assert decoder.generate(prompt, 30).token_ids == plain
        assert decoder.generate(prompt, 30).token_ids == plain


def test_streaming_is_exact_and_stops(target: Target) -> None:
    plain = Decoder(target).generate(PROMPT, 40).token_ids
    stop = plain[25]
    first = plain.index(stop)
    streamed: list[int] = []
    decoder = Decoder(target, TextDrafter(target, PROMPT + plain), ChainSelector())
    result = decoder.generate(PROMPT, 40, stop_ids={stop}, on_tokens=streamed.extend)
    assert result.token_ids == streamed == plain[: first + 1]
    assert result.finish_reason == "stop"
    assert decoder.generate(PROMPT, 1, on_tokens=streamed.extend).token_ids == plain[:1]


@pytest.mark.parametrize("limit", range(1, 16))
def test_limits_are_exact(target: Target, limit: int) -> None:
    plain = Decoder(target).generate(PROMPT, 20).token_ids
    drafter = TextDrafter(target, PROMPT + plain)
    result = Decoder(target, drafter, ChainSelector()).generate(PROMPT, limit)
    assert result.token_ids == plain[:limit]
    assert all(entry.num_accepted + 1 == entry.num_emitted for entry in result.rounds)  # nothing verified in vain


def test_nan_target_logits_raise_and_emit_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 6, target side."""
    head, calls = target.head, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        calls.append(1)
        if len(calls) == 3:
            logits[-1, 7] = float("nan")
        return logits

    monkeypatch.setattr(target, "head", broken)
    for temperature in (0.0, 1.0):
        calls.clear()
        streamed: list[int] = []
        with pytest.raises(LogitsError):
            Decoder(target).generate(PROMPT, 10, temperature=temperature, on_tokens=streamed.extend)
        assert len(streamed) == 2


def test_usage(target: Target) -> None:
    decoder = Decoder(target)
    with pytest.raises(UsageError):
        decoder.generate([], 5)
    with pytest.raises(UsageError):
        decoder.generate(PROMPT, 0)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        decoder.generate([61], 5)
    with pytest.raises(ContextError, match="512"):
        decoder.generate(PROMPT, 510)
    with pytest.raises(UsageError):
        decoder.generate(PROMPT, 5, temperature=-1)
    with pytest.raises(UsageError):
        Decoder(target, RandomDrafter(61))


def test_stage_seconds_add_up(target: Target) -> None:
    plain = Decoder(target).generate(PROMPT, 20).token_ids
    result = Decoder(target, TextDrafter(target, PROMPT + plain), ChainSelector()).generate(PROMPT, 20)
    assert sum(result.stage_seconds().values()) == pytest.approx(result.round_seconds)
    assert all(entry.verify_seconds > 0 and entry.draft_seconds > 0 for entry in result.rounds[:-1])
    assert result.prefill_seconds > 0
