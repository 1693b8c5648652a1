from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from selector.errors import TraceError, TraceMismatch
from selector.trace import Trace
from selector.tracewriter import TraceWriter
from tests.selector.helpers import markov_trace


def assert_same(one: Trace, other: Trace) -> None:
    assert one.identity == other.identity
    assert [text.key for text in one.texts] == [text.key for text in other.texts]
    for a, b in zip(one.texts, other.texts, strict=True):
        assert (a.dataset, a.num_prompt_tokens) == (b.dataset, b.num_prompt_tokens)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.draft_token_ids, b.draft_token_ids)
        np.testing.assert_array_equal(a.draft_logprobs, b.draft_logprobs)
        for mine, other_ in ((a.target_token_ids, b.target_token_ids), (a.target_logprobs, b.target_logprobs)):
            assert (mine is None) == (other_ is None)
            if mine is not None:
                np.testing.assert_array_equal(mine, other_)


def with_targets(trace: Trace, which: range | None = None, width: int = 3) -> Trace:
    """The trace with distributions of the target in some of its texts."""
    texts, rng = [], np.random.default_rng(1)
    for i, text in enumerate(trace.texts):
        if which is None or i in which:
            ids = rng.integers(0, 30, (text.num_anchors, width)).astype(np.int32)
            text = replace(text, target_token_ids=ids, target_logprobs=-rng.random(ids.shape).astype(np.float32))
        texts.append(text)
    return Trace(trace.identity, texts)


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


def rewrite(path, change_about=None, change_tensors=None):
    """A trace's file with something else in its description or its arrays."""
    with safe_open(path, "numpy") as file:
        about, tensors = json.loads(file.metadata()["treebudget"]), {name: file.get_tensor(name) for name in file.keys()}
    about, tensors = about | (change_about or {}), tensors | (change_tensors or {})
    save_file(tensors, path, metadata={"treebudget": json.dumps(about)})
    return path


@pytest.mark.parametrize(("about", "said"), [
    ({"identity": None}, "identity must be an object"), ({"identity": {"target": 7}}, "target of its identity must be text"),
    ({"identity": {"block_size": "eight"}}, "block_size of its identity must be a whole number"),
    ({"keys": [["a"], ["b"]]}, "keys must be a list of texts"), ({"keys": None}, "keys must be"),
    ({"datasets": None}, "datasets"), ({"has_target": 5}, "has_target"),
    ({"identity": {"drafter_saw": "lots"}}, "drafter_saw of its identity"),
])  # fmt: skip
def test_a_description_of_other_types_is_refused(tmp_path, about, said):
    path = rewrite(markov_trace(num_texts=2, length=5).save(tmp_path / "t.safetensors"), about)
    with pytest.raises(TraceError, match=f"contradicts itself: .*{said}"):
        Trace.load(path)


def test_arrays_that_do_not_cover_each_other_are_refused(tmp_path):
    """Lengths that leave tokens over would shift every later text's tokens against its drafts."""
    trace = with_targets(markov_trace(num_texts=3, length=8))
    lengths = np.array([len(text.token_ids) for text in trace.texts], np.int32)
    for change, said in [
        ({"text_lengths": lengths - [0, 2, 0]}, "rows of token_ids"),
        ({"text_lengths": lengths.astype(float)}, "one whole number per text"),
        ({"text_lengths": lengths[None]}, "one whole number per text"),
        ({"target_token_ids": np.zeros((99, 3), np.int32), "target_logprobs": np.zeros((99, 3), np.float32)}, "target_token_ids"),
    ]:
        path = rewrite(trace.save(tmp_path / "t.safetensors"), None, {k: np.ascontiguousarray(v) for k, v in change.items()})
        with pytest.raises(TraceError, match=said):
            Trace.load(path)


def test_values_that_are_no_tokens_and_no_probabilities_are_refused():
    text = markov_trace(num_texts=1, length=8).texts[0]
    for change, said in [
        ({"draft_logprobs": text.draft_logprobs + 2}, "at most 0"),
        ({"draft_logprobs": text.draft_logprobs + np.inf}, "at most 0"),
        ({"draft_logprobs": text.draft_token_ids}, "at most 0"), ({"token_ids": text.token_ids - 99}, "token_ids from -"),
        ({"draft_token_ids": text.draft_token_ids.astype(float)}, "whole numbers"),
        ({"draft_token_ids": text.draft_token_ids.astype(np.int64) + 2**40}, "allowed are -1 to"),
        ({"draft_token_ids": text.draft_token_ids[..., :0], "draft_logprobs": text.draft_logprobs[..., :0]}, "K is 0"),
    ]:
        with pytest.raises(TraceError, match=said):
            replace(text, **change)
    replace(text, draft_logprobs=np.full_like(text.draft_logprobs, np.nan))  # a draft of NaN is one that was made


def test_texts_that_repeat_a_prompt_are_left_out():
    trace = markov_trace(num_texts=4, length=6)
    doubled = Trace(trace.identity, [replace(text, key=f"{text.key}-{i}") for i in range(2) for text in trace.texts])
    assert trace.without_repeats() is trace
    assert [text.key for text in doubled.without_repeats().texts] == [f"{text.key}-0" for text in trace.texts]


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


@pytest.mark.parametrize("which", [None, range(0), range(1, 3), range(0, 1)])
def test_the_targets_own_distributions_survive_disk_merge_and_writer(which, tmp_path):
    trace = with_targets(markov_trace(num_texts=4, length=7), which)
    assert_same(Trace.load(trace.save(tmp_path / "t.safetensors")), trace)
    assert_same(Trace.merge([trace.select([0, 1]), trace.select([2, 3])]), trace)
    assert trace.has_targets == (which is None)
    writer = TraceWriter(tmp_path / "w.safetensors", trace.identity)
    for text in trace.texts:
        writer.add(text)
    assert_same(writer.finish([text.key for text in trace.texts]), trace)
    assert_same(Trace.load(tmp_path / "w.safetensors"), trace)


def test_a_file_of_version_1_still_loads(tmp_path):
    trace = markov_trace(num_texts=2, length=5)
    with safe_open(trace.save(tmp_path / "t.safetensors"), framework="numpy") as stream:
        about = json.loads(stream.metadata()["treebudget"])
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    assert (about["version"], "target_token_ids" in tensors) == (2, False)
    del about["has_target"]
    save_file(tensors, tmp_path / "old.safetensors", metadata={"treebudget": json.dumps({**about, "version": 1})})
    assert_same(Trace.load(tmp_path / "old.safetensors"), trace)


def test_distributions_of_another_shape_are_refused():
    text = with_targets(markov_trace(num_texts=1, length=6)).texts[0]
    with pytest.raises(TraceError, match="come together"):
        replace(text, target_logprobs=None)
    with pytest.raises(TraceError, match=r"must be \(A, M\) for 6 anchors"):
        replace(text, target_token_ids=text.target_token_ids[1:], target_logprobs=text.target_logprobs[1:])
    narrow = replace(text, key="b", target_token_ids=text.target_token_ids[:, :1], target_logprobs=text.target_logprobs[:, :1])
    with pytest.raises(TraceError, match="share M"):
        Trace({}, [text, narrow])


def test_the_context_range_is_that_of_rounds():
    """A text of P prompt and A generated tokens starts rounds at P to P + A - 2 committed ones; the last root starts none."""
    trace = markov_trace(num_texts=3, length=6)
    prompts = [text.num_prompt_tokens for text in trace.texts]
    assert trace.context_range == (min(prompts), max(prompts) + 4)
    assert markov_trace(num_texts=2, length=1).context_range is None
