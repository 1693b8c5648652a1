from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.errors import TrellisError
from selector.search.expansion import expand
from selector.trellis import Trellis


def naive_top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    x = logits.astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    logprobs = x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(logprobs, order, axis=1)


@pytest.mark.parametrize(("shape", "k"), [((1, 1), 1), ((3, 127), 5), ((2, 128), 16), ((7, 1000), 32), ((5, 49152), 16)])
def test_top_k_and_normalisation_equal_a_naive_one(shape, k):
    rng = np.random.default_rng(1)
    for spread in (0.1, 3.0, 30.0):
        logits = (rng.standard_normal(shape) * spread).astype(np.float32)
        trellis = Trellis.from_logits(logits, k)
        ids, logprobs = naive_top_k(logits, k)
        np.testing.assert_array_equal(trellis.token_ids, ids)
        np.testing.assert_allclose(trellis.log_edges, logprobs, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_go_to_the_lower_id(data):
    values = data.draw(st.lists(st.integers(-2, 2), min_size=1, max_size=300))
    logits = np.array([values], np.float32)
    k = data.draw(st.integers(1, 20))
    ids, logprobs = naive_top_k(logits, k)
    trellis = Trellis.from_logits(logits, k)
    np.testing.assert_array_equal(trellis.token_ids, ids)
    np.testing.assert_allclose(trellis.log_edges, logprobs, atol=1e-6)


def test_ascending_logits_replace_the_whole_buffer():
    logits = np.arange(1000, dtype=np.float32)[None]
    np.testing.assert_array_equal(Trellis.from_logits(logits, 3).token_ids, [[999, 998, 997]])


@pytest.mark.parametrize("position", [0, 5, 640])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000])
def test_a_nan_row_ends_the_trellis(position, bits):
    logits = np.zeros((3, 700), np.float32)
    logits[1, position] = np.array([bits], np.uint32).view(np.float32)[0]
    trellis = Trellis.from_logits(logits, 4)
    assert (trellis.depth, trellis.num_nan_rows) == (1, 1)


def test_case_7_only_finite_logits_appear():
    logits = np.full((2, 8), -np.inf, np.float32)
    logits[:, 3], logits[:, 6] = 1.0, 2.0
    trellis = Trellis.from_logits(logits, 4)
    assert set(trellis.token_ids[np.isfinite(trellis.log_edges)]) == {3, 6}
    np.testing.assert_allclose(np.exp(trellis.log_edges).sum(axis=1), 1.0, atol=1e-6)


def test_a_row_without_any_finite_logit_ends_the_trellis():
    logits = np.zeros((3, 8), np.float32)
    logits[2] = -np.inf
    assert Trellis.from_logits(logits, 4).depth == 2


def test_infinite_logits_share_the_mass():
    logits = np.array([[0.0, np.inf, 5.0, np.inf]], np.float32)
    trellis = Trellis.from_logits(logits, 4)
    listed = np.isfinite(trellis.log_edges[0])
    assert trellis.token_ids[0, listed].tolist() == [1, 3]
    np.testing.assert_allclose(trellis.log_edges[0, listed], np.log(0.5))


def test_case_8_a_vocabulary_smaller_than_top_k():
    trellis = Trellis.from_logits(np.random.default_rng(0).standard_normal((5, 8)), 64)
    assert trellis.token_ids.shape == (5, 8)
    np.testing.assert_allclose(np.exp(trellis.log_edges).sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_torch_tensors_are_read(dtype):
    torch = pytest.importorskip("torch")
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    trellis = Trellis.from_logits(logits[:, ::2], 5)
    expected = Trellis.from_logits(logits[:, ::2].float().numpy(), 5)
    np.testing.assert_array_equal(trellis.token_ids, expected.token_ids)
    np.testing.assert_array_equal(trellis.log_edges, expected.log_edges)


def test_wrong_input_is_refused_with_a_reason():
    for wrong in (np.zeros(8), [[0.0, 1.0]]):
        with pytest.raises(TrellisError, match="depth, vocab"):
            Trellis.from_logits(wrong, 4)
    with pytest.raises(TrellisError, match="at least 1"):
        Trellis.from_logits(np.zeros((1, 8)), 0)
    with pytest.raises(TrellisError, match="more than 1"):
        Trellis.from_probabilities([[1, 2]], [[0.8, 0.3]])
    with pytest.raises(TrellisError, match=r"\[0, 1\]"):
        Trellis.from_probabilities([[1, 2]], [[0.8, np.nan]])
    with pytest.raises(TrellisError, match="twice"):
        Trellis.from_probabilities([[1, 1]], [[0.4, 0.3]])
    with pytest.raises(TrellisError, match="do not fit"):
        Trellis(np.zeros((2, 3), np.int64), np.zeros((2, 4)))
    with pytest.raises(TrellisError, match="at least one candidate"):
        Trellis(np.zeros((2, 0), np.int64), np.zeros((2, 0)))


def test_pads_never_become_tokens_whatever_stands_at_them():
    trellis = Trellis.from_probabilities([[1, -1], [2, -1]], [[0.5, 0.5], [0.4, np.nan]])
    np.testing.assert_allclose(np.exp(trellis.log_edges), [[0.5, 0.0], [0.4, 0.0]])
    by_parent = Trellis.from_probabilities([[1, -1]], [[[0.5, 0.5], [0.0, 0.0]]])
    assert expand(by_parent, 5).token_ids.tolist() == [1]


def test_no_rows_make_an_empty_trellis():
    assert Trellis.from_logits(np.zeros((0, 8), np.float32), 4).depth == 0
