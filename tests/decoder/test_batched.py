"""Many prompts at once give what one at a time gives."""

from __future__ import annotations

import pytest
import torch

from decoder.batched import BatchedGenerator, Continuation, Job
from decoder.errors import ContextError
from decoder.loop import Decoder
from tests.decoder.helpers import tiny_target

PROMPTS = [[3, 5, 7], [11, 2, 9, 4, 8, 1], [60], [5, 5, 5, 5], [17, 23, 42, 6, 31, 12, 40]]


def generate(num_rows: int, **options: object) -> dict[str, Continuation]:
    target = tiny_target(scale=0.2)
    generator = BatchedGenerator(target, (0, 2), max_new_tokens=20, num_rows=num_rows, num_labels=4, **options)  # type: ignore[arg-type]
    free = {f"p{i}": 0 for i in range(len(PROMPTS))}
    return {text.key: text for text in generator.run([Job(key, PROMPTS[int(key[1:])], n) for key, n in free.items()])}


def test_greedy_texts_equal_plain_decoding_for_any_number_of_rows() -> None:
    target = tiny_target(scale=0.2)
    plain = {f"p{i}": prompt + Decoder(target).generate(prompt, 20).token_ids for i, prompt in enumerate(PROMPTS)}
    for num_rows in (1, 2, 5, 9):  # fewer rows than prompts: rows are handed on
        assert {key: text.token_ids for key, text in generate(num_rows).items()} == plain


def test_features_and_labels_are_those_of_the_whole_text() -> None:
    target = tiny_target(scale=0.2)
    target.set_feature_layers((0, 2))
    for text in generate(3).values():
        whole = target.forward(text.token_ids, range(len(text.token_ids)), target.new_cache())
        features = torch.cat(text.hidden)
        assert whole.features is not None and features.shape[0] == len(text.token_ids) - 1  # the last token was never forwarded
        torch.testing.assert_close(features, whole.features[:-1], rtol=1e-3, atol=1e-4)
        expected = torch.log_softmax(whole.logits[text.num_prompt_tokens - 1:-1], -1).topk(4)
        torch.testing.assert_close(torch.stack(text.label_logprobs).float(), expected.values, rtol=1e-2, atol=1e-2)
        assert (torch.stack(text.label_ids)[:, 0] == expected.indices[:, 0]).all()


def test_a_stop_token_ends_a_text_and_is_kept() -> None:
    texts = generate(5)
    stop = texts["p0"].token_ids[len(PROMPTS[0]) + 4]
    target = tiny_target(scale=0.2)
    target.stop_ids = frozenset({stop})
    generator = BatchedGenerator(target, (), max_new_tokens=20, num_rows=2, num_labels=2)
    for text in generator.run([Job(f"p{i}", prompt) for i, prompt in enumerate(PROMPTS)]):
        new = text.token_ids[text.num_prompt_tokens:]
        assert stop not in new[:-1]
        assert new[-1] == stop or len(new) == 20


def test_sampled_beginnings_vary_and_the_rest_is_greedy() -> None:
    target = tiny_target(scale=0.2)
    jobs = [Job(f"{i}", PROMPTS[1], 6) for i in range(8)]
    generator = BatchedGenerator(target, (), max_new_tokens=16, num_rows=4, num_labels=4, temperature=2.0)
    texts = list(generator.run(jobs))
    prompt = len(PROMPTS[1])
    assert len({tuple(text.token_ids[prompt:prompt + 6]) for text in texts}) > 1  # all equal by chance: below 4**-30
    for text in texts:
        start = text.token_ids[:prompt + 6]
        assert start + Decoder(target).generate(start, 10).token_ids == text.token_ids


def test_a_prompt_beyond_the_context_is_refused_before_anything_runs() -> None:
    target = tiny_target(scale=0.2)
    before = target.num_forwards
    generator = BatchedGenerator(target, (), max_new_tokens=20, num_rows=2, num_labels=2)
    with pytest.raises(ContextError, match="prompt long: 493 prompt tokens and 20 new ones are 513; .* context holds 512"):
        list(generator.run([Job("short", PROMPTS[0]), Job("long", [3] * 493)]))
    assert target.num_forwards == before
