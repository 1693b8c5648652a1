from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from costmodel.errors import FileFormatError
from costmodel.planning import acceptance as forms
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.acceptfile import read_acceptance, read_trace
from costmodel.planning.errors import ImpossibleAcceptance
from costmodel.planning.reach import expected_tokens, tokens_in_case

SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12)


def test_case_24_the_same_length_is_another_rate_at_every_budget():
    """Accept length 3.2 with budgets (root included) of 4, 8, 16: rates are not comparable, lengths are."""
    rates = [forms.rate_from_length(3.2, budget - 1) for budget in (4, 8, 16)]
    assert [round(rate, 3) for rate in rates] == [0.733, 0.314, 0.147]
    for rate, budget in zip(rates, (4, 8, 16), strict=True):
        assert 1 + sum(forms.from_rate(rate, budget - 1).survival) == pytest.approx(3.2)


@given(SHARES)
def test_conditional_and_unconditional_convert_both_ways(values):
    accepted = forms.from_conditional([*values, 0.5], 20)
    again = forms.from_conditional(accepted.conditional, 20)
    assert np.allclose(again.survival, accepted.survival)
    assert all(a >= b for a, b in itertools.pairwise(accepted.survival))


@given(st.floats(0.0, 1.0), st.integers(1, 20))
def test_length_and_rate_give_back_what_they_came_from(rate, drafted):
    length = 1 + rate * drafted
    assert 1 + sum(forms.from_length(length, drafted).survival) == pytest.approx(length, abs=1e-6)
    assert forms.rate_from_length(length, drafted) == pytest.approx(rate)


def test_histogram_and_counters_agree_with_survival():
    found = forms.from_histogram([2, 3, 5])
    assert found.survival == (0.8, 0.5) and found.num_rounds == 10
    assert forms.from_counts([8, 5], 10).survival == found.survival
    mean, second = 1.3, 0.3 + 0.5 * 4
    assert found.relative_error(2) == pytest.approx(1.645 * np.sqrt((second - mean**2) / 10) / 2.3)
    assert forms.from_survival([0.8, 0.5], 15).relative_error(2) == 0.0  # nobody said how many rounds


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: forms.from_survival([0.5, 0.6], 15), "rises"),
        (lambda: forms.from_survival([1.2, 0.6], 15), "lies in 0..1"),
        (lambda: forms.from_survival([float("nan")], 15), "lies in 0..1"),
        (lambda: forms.from_conditional([0.5, -0.1], 15), "lies in 0..1"),
        (lambda: forms.from_length(5.5, 4), "between 1 and 5"),
        (lambda: forms.from_length(0.9, 4), "between 1 and 5"),
        (lambda: forms.from_rate(1.1, 4), "lies in 0..1"),
        (lambda: forms.from_counts([5, 8], 10), "rises"),
        (lambda: forms.from_histogram([0, 0]), "counts of rounds"),
        (lambda: forms.from_lengths([1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73]), "falls"),  # InferenceX, DSpark
        (lambda: Acceptance((0.5,), "x", siblings=(0.7, 0.6)), "exceed 1"),
    ],
)
def test_impossible_acceptance_is_refused_by_name(make, words):
    with pytest.raises(ImpossibleAcceptance, match=words):
        make()


def test_lengths_by_drafted_tokens_are_steps_of_survival():
    assert np.allclose(forms.from_lengths([1.84, 2.51, 3.01]).survival, [0.84, 0.67, 0.5])


def test_positions_nobody_measured_are_unknown_and_not_extrapolated():
    assert expected_tokens(forms.from_survival([0.9, 0.8], 15), 15).tolist() == pytest.approx([1, 1.9, 2.7])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3), st.floats(0.0, 0.6), st.integers(1, 7))
def test_tree_is_the_best_of_all_prefix_closed_trees(conditional, share, num_nodes):
    """Oracle: every prefix-closed subset of a binary tree of at most 3 levels."""
    accepted = Acceptance(forms.from_conditional([*conditional], 9).survival, "x", siblings=(share,))
    if len(conditional) == 1:
        accepted = Acceptance((conditional[0],), "x", siblings=(share,))
    edges = [(a, (1 - a) * share) for a in accepted.conditional]
    paths = [p for d in range(1, len(edges) + 1) for p in itertools.product((0, 1), repeat=d)]
    reach = {p: float(np.prod([edges[d][rank] for d, rank in enumerate(p)])) for p in paths}
    best = 0.0
    for size in range(min(num_nodes, len(paths)) + 1):
        for chosen in itertools.combinations(paths, size):
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
                best = max(best, sum(reach[p] for p in chosen))
    assert expected_tokens(accepted, num_nodes)[-1] == pytest.approx(1 + best)


def test_acceptance_files(tmp_path):
    path = tmp_path / "a.json"
    counters = {"vllm:spec_decode_num_drafts": 10, "vllm:spec_decode_num_accepted_tokens_per_pos": [8, 5]}
    for document in (
        {"survival": [0.8, 0.5], "num_rounds": 10},
        {"conditional": [0.8, 0.625], "num_rounds": 10},
        {"speculative_decoding": {"acceptance_histogram": [2, 3, 5]}},
        counters,
    ):
        path.write_text(json.dumps(document))
        found = read_acceptance(path)
        assert found.survival == (0.8, 0.5) and found.num_rounds == 10
    path.write_text('{"acceptance_lengths": {"1": 1.84, "2": 2.51}}')
    assert np.allclose(read_acceptance(path).survival, (0.84, 0.67))
    for text in ("[1]", "{}", "not json", '{"survival": ["x"]}'):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            read_acceptance(path)


@pytest.mark.parametrize("document", [
    {"survival": [0.5, 0.3], "num_rounds": -5}, {"survival": [0.5, 0.3], "num_rounds": 0}, {"survival": [0.5], "num_rounds": 2.5},
    {"survival": [0.5, 0.3], "num_rounds": float("inf")}, {"num_drafts": float("inf"), "num_accepted_tokens_per_pos": [5, 3]},
    {"acceptance_histogram": [1, float("inf")]}, {"acceptance_histogram": [1, 10**401]},
    {"num_drafts": 0.5, "num_accepted_tokens_per_pos": [0.4]},
])  # fmt: skip
def test_numbers_of_rounds_that_cannot_be_are_refused(tmp_path, document):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    with pytest.raises((FileFormatError, ImpossibleAcceptance)):
        read_acceptance(path)


def test_the_ends_of_few_rounds_stay_possible():
    """Two rounds say nearly nothing: a round still gives at least one token and at most one more than it has nodes."""
    accepted = Acceptance((0.5,) * 15, "two rounds", num_rounds=2)
    tokens = expected_tokens(accepted, 15)
    errors = accepted.relative_errors(15)
    assert max(errors) > 1
    for case in ("cheap", "dear"):
        ends = tokens_in_case(tokens, errors, case)
        assert (ends >= 1).all() and (ends <= np.arange(1, 17)).all() and ends[0] == 1


@pytest.mark.parametrize(("name", "value"), [
    ("draft_token_ids", np.zeros((7, 2), np.int32)), ("draft_token_ids", np.zeros((7, 2, 0), np.int32)),
    ("draft_token_ids", np.zeros((3, 2, 2), np.int32)), ("text_lengths", np.array([8, 8], np.int32)),
    ("text_lengths", np.array([8.0])), ("num_prompt_tokens", np.array([-7], np.int32)), ("token_ids", np.zeros(5, np.int32)),
])  # fmt: skip
def test_a_damaged_trace_is_refused(tmp_path, name, value):
    tensors = {"token_ids": np.arange(8, dtype=np.int32), "text_lengths": np.array([8], np.int32),
               "num_prompt_tokens": np.array([1], np.int32), "draft_token_ids": np.zeros((7, 2, 2), np.int32)}  # fmt: skip
    about = {"treebudget": json.dumps({"schema": "treebudget.trace", "version": 1})}
    save_file(tensors | {name: value}, tmp_path / "t.safetensors", metadata=about)
    with pytest.raises(FileFormatError, match="contradicts itself"):
        read_trace(tmp_path / "t.safetensors")


def test_trace_is_walked_as_a_chain_and_cut_rounds_are_left_out(tmp_path):
    """Text of 7 generated tokens 1..7, depth 2, two candidates: round 0 accepts 2, round at 3 misses with rank 2 right."""
    drafts = np.full((7, 2, 2), -1, np.int32)
    drafts[0, :, 0] = [2, 3]
    drafts[3, 0] = [99, 5]
    tensors = {
        "token_ids": np.array([50, 1, 2, 3, 4, 5, 6, 7], np.int32),
        "text_lengths": np.array([8], np.int32),
        "num_prompt_tokens": np.array([1], np.int32),
        "draft_token_ids": drafts,
        "draft_logprobs": np.zeros(drafts.shape, np.float32),
    }
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"treebudget": json.dumps({"schema": "treebudget.trace", "version": 1})})
    found = read_trace(path)
    # rounds: at 0 accepts 2 -> 3; at 3 accepts 0 -> 4; at 4 accepts 0 (all -1) -> 5 is cut by the end
    assert found.num_rounds == 3 and np.allclose(found.survival, [1 / 3, 1 / 3])
    assert np.allclose(found.siblings, [0.5])
    path.write_bytes(b"\x80\x04pickled")
    with pytest.raises(FileFormatError):
        read_trace(path)
