from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from selector.errors import TraceError, TraceMismatch
from selector.trace import Trace, TraceWriter
from tests.selector.helpers import markov_trace


def assert_same(one: Trace, other: Trace) -> None:
    assert one.identity == other.identity
    assert [text.key for text in one.texts] == [text.key for text in other.texts]
    for a, b in zip(one.texts, other.texts, strict=True):
        assert (a.dataset, a.num_prompt_tokens) == (b.dataset, b.num_prompt_tokens)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.draft_token_ids, b.draft_token_ids)
        np.testing.assert_array_equal(a.draft_logprobs, b.draft_logprobs)


def test_a_trace_survives_the_disk(tmp_path):
    trace = markov_trace(num_texts=5, length=9)
    assert_same(Trace.load(trace.save(tmp_path / "t.safetensors")), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_an_empty_trace_survives_the_disk(tmp_path):
    loaded = Trace.load(Trace({"target": "toy"}, []).save(tmp_path / "t.safetensors"))
    assert (len(loaded.texts), loaded.depth, loaded.identity) == (0, 0, {"target": "toy"})


def test_what_is_no_trace_is_refused(tmp_path):
    pickled = tmp_path / "p.safetensors"
    pickled.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(TraceError, match="is no trace"):
        Trace.load(pickled)
    save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(TraceError, match="schema"):
        Trace.load(tmp_path / "other.safetensors")
    with pytest.raises(TraceError, match="no trace at"):
        Trace.load(tmp_path / "missing.safetensors")
    whole = markov_trace(num_texts=2, length=9).save(tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(TraceError, match="is no trace"):
        Trace.load(tmp_path / "cut.safetensors")


def test_the_identity_is_checked_by_field():
    trace = markov_trace(num_texts=1, length=5)
    trace.check({"target": "toy", "device": "unknown here", "dtype": None})
    with pytest.raises(TraceMismatch, match="block_size is 5 in the trace, expected 16") as caught:
        trace.check({"target": "toy", "block_size": 16})
    assert caught.value.field == "block_size"


def test_next_tokens_end_with_the_text():
    text = markov_trace(num_texts=1, length=6, depth=4).texts[0]
    follows = text.next_tokens()
    generated = text.token_ids[text.num_prompt_tokens :].tolist()
    assert follows[0].tolist() == generated[1:5]
    assert follows[4].tolist() == [generated[5], -2, -2, -2]
    assert follows[5].tolist() == [-2] * 4


def test_contradicting_shapes_are_refused():
    text = markov_trace(num_texts=1, length=6).texts[0]
    with pytest.raises(TraceError, match="anchors"):
        replace(text, num_prompt_tokens=text.num_prompt_tokens + 1)
    with pytest.raises(TraceError, match="different keys"):
        Trace({}, [text, text])
    with pytest.raises(TraceError, match="share depth"):
        Trace(
            {},
            [
                text,
                replace(text, key="b", draft_token_ids=text.draft_token_ids[:, :2], draft_logprobs=text.draft_logprobs[:, :2]),
            ],
        )


def test_a_killed_trace_goes_on_where_it_was(tmp_path):
    trace, path = markov_trace(num_texts=4, length=7), tmp_path / "t.safetensors"
    first = TraceWriter(path, trace.identity)
    for text in trace.texts[:3]:
        first.add(text)
    # a temporary file of the write in flight is left behind
    (path.with_name(path.name + ".parts") / ".half.tmp").write_bytes(b"half")
    again = TraceWriter(path, trace.identity)
    assert again.done_keys == {"text-0", "text-1", "text-2"}
    again.add(trace.texts[3])
    assert_same(again.finish([text.key for text in trace.texts]), trace)
    assert_same(Trace.load(path), trace)
    assert [item.name for item in tmp_path.iterdir()] == ["t.safetensors"]


def test_parts_of_something_else_are_refused(tmp_path):
    trace = markov_trace(num_texts=1, length=7)
    TraceWriter(tmp_path / "t", trace.identity).add(trace.texts[0])
    with pytest.raises(TraceMismatch, match="dtype"):
        TraceWriter(tmp_path / "t", {**trace.identity, "dtype": "bfloat16"})


def test_merge_wants_one_identity():
    one, other = markov_trace(num_texts=2, length=5), markov_trace(num_texts=4, length=5)
    assert len(Trace.merge([one, other.select([2, 3])]).texts) == 4
    with pytest.raises(TraceMismatch, match="target"):
        Trace.merge([one, Trace({**one.identity, "target": "other"}, [])])
