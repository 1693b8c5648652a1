from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selector.errors import ScorerError
from selector.scorer import Scorer
from selector.scorer import lazy as lazy_module
from selector.trellis import Trellis
from tests.selector.helpers import markov_trace
from tests.selector.random_scorers import DEPTH, HIDDEN, SIZE, VOCAB, make_rounds, make_scorer, make_weights


def test_untrained_scorer_gives_the_drafts_own_probabilities() -> None:
    ids, logs, roots = make_rounds(np.random.default_rng(0), 20, DEPTH, 5)
    edges = make_scorer().edges(ids, logs, roots)
    missing = 1 - np.exp(logs).sum(-1)
    for b, d, p in np.ndindex(edges.shape[:3]):
        parent_is_there = p == 0 if d == 0 else logs[b, d - 1, p] > -np.inf
        if not parent_is_there:
            assert np.isneginf(edges[b, d, p]).all()
        elif missing[b, d] > 1e-4:
            np.testing.assert_allclose(np.exp(edges[b, d, p]), np.exp(logs[b, d]), atol=2e-6)


def test_worked_example() -> None:
    """Two candidates of .5 and .3 under a root; the second is the root's own token and repeats are worth log 2."""
    scorer = make_scorer(same=np.full(DEPTH, np.log(2), np.float32), none_bias=np.full(DEPTH, np.log(0.5), np.float32))
    edges = scorer.edges([[[7, 8]]], np.log([[[0.5, 0.3]]]), [8])
    np.testing.assert_allclose(np.exp(edges[0, 0, 0]), np.array([0.5, 0.6]) / (0.5 + 0.6 + 0.2 * 0.5), rtol=1e-5)
    assert np.isneginf(edges[0, 0, 1]).all()


def test_temperature_and_offset_of_none_are_applied_by_depth() -> None:
    slopes, offsets = np.array([0.5, 1, 1], np.float32), np.array([0, np.log(3), 0], np.float32)
    scorer = make_scorer(slopes=slopes, none_offsets=offsets)
    logs = np.log(np.array([[[0.64, 0.16]], [[0.5, 0.25]]])).reshape(1, 2, 2)
    edges = np.exp(scorer.edges([[[1, 2], [3, 4]]], logs, [0]))
    np.testing.assert_allclose(edges[0, 0, 0], np.array([0.8, 0.4]) / (0.8 + 0.4 + 0.2**0.5), rtol=1e-5)
    np.testing.assert_allclose(edges[0, 1], np.tile(np.array([0.5, 0.25]) / (0.75 + 0.75), (2, 1)), rtol=1e-5)


def test_gain_says_how_much_the_network_counts() -> None:
    loud = make_weights(np.random.default_rng(5)) | {"slopes": np.ones(DEPTH), "none_offsets": np.zeros(DEPTH)}
    loud = {name: np.asarray(value, np.float32) for name, value in loud.items()}
    ids, logs, roots = make_rounds(np.random.default_rng(6), 4, DEPTH, 5, pads=False)
    silent = make_scorer(None, **(loud | {"gains": np.zeros(DEPTH, np.float32)})).edges(ids, logs, roots)
    untrained = make_scorer().edges(ids, logs, roots)
    np.testing.assert_allclose(silent, untrained, atol=1e-5)
    full = make_scorer(None, **(loud | {"gains": np.ones(DEPTH, np.float32)})).edges(ids, logs, roots)
    real = untrained > -np.inf
    assert np.abs(full[real] - untrained[real]).max() > 0.1


def test_product_of_the_token_vectors_counts() -> None:
    tables = {name: np.zeros((VOCAB, SIZE), np.float32) for name in ("parent_table", "child_table")}
    tables["parent_table"][3, 1], tables["child_table"][5, 1] = 2.0, 1.0
    scorer = make_scorer(None, **tables, scale=np.array([0.5, 0, 0], np.float32))
    edges = np.exp(scorer.edges([[[5, 6]]], np.log([[[0.4, 0.4]]]), [3]))[0, 0, 0]
    assert edges[0] / edges[1] == pytest.approx(np.e, rel=1e-5)  # exp(0.5 x 2 x 1)
    assert edges[1] / (1 - edges.sum()) == pytest.approx(2.0, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7))
def test_torch_network_is_the_second_implementation(seed: int, batch: int, depth: int, width: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    scorer, rounds = make_scorer(rng), make_rounds(rng, batch, depth, width)
    compiled, other = scorer.edges(*rounds), scorer.edges_torch(*(torch.from_numpy(x) for x in rounds)).numpy()
    real = compiled > -np.inf
    assert (real == (other > -np.inf)).all()
    np.testing.assert_allclose(compiled[real], other[real], atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 7))
def test_siblings_and_none_share_one_unit(seed: int, depth: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    ids, logs, roots = make_rounds(rng, 2, depth, width)
    edges = make_scorer(rng).edges(ids, logs, roots)
    k = min(width, 5)
    assert edges.shape == (2, depth, k, k)
    assert (np.exp(edges).sum(-1) <= 1 + 1e-6).all()
    assert np.isneginf(edges[np.broadcast_to((ids[:, :, None, :k] < 0), edges.shape)]).all()
    Trellis.from_probabilities(np.where(ids[0, :, :k] < 0, -1, ids[0, :, :k]), np.minimum(np.exp(edges[0]), 1))


def test_batches_are_their_rounds_and_what_is_not_scored_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    scorer, (ids, logs, roots) = make_scorer(rng), make_rounds(rng, 6, DEPTH + 2, 8)
    edges = scorer.edges(ids, logs, roots)
    for b in range(6):
        np.testing.assert_array_equal(edges[b : b + 1], scorer.edges(ids[b : b + 1], logs[b : b + 1], roots[b : b + 1]))
    np.testing.assert_array_equal(edges, scorer.edges(ids[..., :5], logs[..., :5], roots))
    locked = ids.copy()
    locked.flags.writeable = False
    np.testing.assert_array_equal(edges, scorer.edges(locked, logs.astype(np.float64), roots))


def test_nothing_is_scored_of_an_empty_round() -> None:
    assert make_scorer().edges(np.zeros((2, 0, 4), int), np.zeros((2, 0, 4)), [1, 2]).shape == (2, 0, 4, 4)
    with pytest.raises(ScorerError, match=r"\(B, depth, K\)"):
        make_scorer().edges(np.zeros((3, 4), int), np.zeros((3, 4)), [1])


def test_file_holds_the_scorer_and_no_embedding(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scorer, rounds = make_scorer(rng), make_rounds(rng, 3, DEPTH, 5)
    again = Scorer.load(scorer.save(tmp_path / "scorer.safetensors"))
    np.testing.assert_array_equal(scorer.edges(*rounds), again.edges(*rounds))
    assert again.identity == scorer.identity and again.top_k == 5
    assert (tmp_path / "scorer.safetensors").stat().st_size < 2 * 2 * VOCAB * SIZE + 4 * 400 + 3000


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match="no scorer at"):
        Scorer.load(tmp_path / "none")
    pickled = tmp_path / "pickle"
    pickled.write_bytes(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94")
    with pytest.raises(ScorerError, match="is no scorer"):
        Scorer.load(pickled)
    with pytest.raises(ScorerError, match=r"is no scorer: .*expected 'treebudget\.scorer'"):
        Scorer.load(markov_trace(2, 5).save(tmp_path / "trace"))
    with pytest.raises(ScorerError, match="scale must be float32"):
        make_scorer(scale=np.zeros(DEPTH + 1, np.float32))
    with pytest.raises(ScorerError, match="out holds values that are not finite"):
        make_scorer(out=np.full(HIDDEN, np.nan, np.float32))


@pytest.mark.parametrize(("field", "value"), [("target", "other"), ("drafter", "large"), ("block_size", 16)])
def test_mismatch_names_the_field(field: str, value: object) -> None:
    scorer = make_scorer()
    scorer.check({"target": "toy", "drafter": None, "dtype": "anything"})
    with pytest.raises(ScorerError, match=f"{field} is .* in the scorer, {value!r} here") as caught:
        scorer.check(scorer.identity | {field: value})
    assert caught.value.field == field


def test_scoring_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, selector.scorer, selector.drift.alarm, selector.reliability; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(lazy_module.importlib, "import_module", missing)
    with pytest.raises(ScorerError, match="needs torch, which is not installed"):
        make_scorer().edges_torch(None, None, None)
