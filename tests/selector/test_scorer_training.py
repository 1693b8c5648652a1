from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from selector.errors import ScorerError
from selector.scorer import Scorer, ScorerSettings, tokens_per_round_by_budget, train_scorer
from selector.scorer.calibration import fit_depth_calibration
from selector.scorer.crossfit import blind_evidence, evidence
from selector.scorer.fitting import fit_network
from selector.scorer.judging import path_ranks, play_budget
from selector.scorer.preparing import ReducedEmbedding, deal_texts, prepare, split_texts
from selector.scorer.samples import collect
from selector.search.reference import expand_in_python
from selector.trace import Trace, TraceText
from selector.trellis import Trellis
from selector.tuning.training import TRAIN, make_trainer
from tests.selector.helpers import markov_trace

torch = pytest.importorskip("torch")
VOCAB = 30
SMALL = ScorerSettings(
    top_k=4, token_features=12, hidden=12, embedding_components=VOCAB, max_epochs=10, patience=10, batch_anchors=128
)


def raw_log_loss(trace: Trace, edges: np.ndarray, top_k: int) -> np.ndarray:
    """(depth,) mean log-loss of what the target said, None of these included."""
    samples = collect(trace, top_k)
    at = samples.group_anchor, samples.group_depth
    rows = edges[(*at, samples.parent_column)] if edges.ndim == 4 else edges[at]
    rows = np.concatenate([rows, np.log(np.maximum(1 - np.exp(rows).sum(1, keepdims=True), 1e-5))], axis=1)
    losses = -rows[np.arange(len(rows)), samples.label]
    return np.array([losses[samples.group_depth == d].mean() for d in range(trace.depth)])


def tiny_text(tokens: list[int], drafts: list[list[list[int]]], **more: object) -> TraceText:
    ids = np.array(drafts, np.int32)
    logs = np.broadcast_to(np.log([0.5, 0.3]), ids.shape).astype(np.float32)
    return TraceText("text", None, 1, np.array(tokens, np.int32), ids, logs, **more)  # type: ignore[arg-type]


def test_only_what_was_reached_is_counted() -> None:
    """Text 9 | 1 2 3: anchor 0 sees 2 then 3; anchor 1 misses 3 (5, 6 drafted); anchor 2 is the end of the text."""
    drafts = [[[2, 7], [8, 3], [1, 4]], [[5, 6], [1, 2], [3, 4]], [[1, 2], [3, 4], [5, 6]]]
    samples = collect(Trace({}, [tiny_text([9, 1, 2, 3], drafts)]), top_k=2)
    groups = list(zip(samples.group_anchor.tolist(), samples.group_depth.tolist(), samples.label.tolist(), strict=True))
    assert groups == [(0, 0, 0), (0, 1, 1), (1, 0, 2)]
    assert samples.parent_token.tolist() == [1, 2, 2] and samples.parent_column.tolist() == [0, 0, 0]
    assert collect(Trace({}, [tiny_text([9, 1, 2, 3], drafts)]), top_k=1).label.tolist() == [0, 1, 1]


def test_groups_are_those_of_a_walk_over_every_anchor() -> None:
    trace = markov_trace(num_texts=5, length=20, seed=4)
    samples, expected, start = collect(trace, 3), [], 0
    for text in trace.texts:
        generated = text.token_ids[text.num_prompt_tokens :].tolist()
        for a in range(text.num_anchors):
            parent, column = generated[a], 0
            for d, following in enumerate(generated[a + 1 : a + 1 + trace.depth]):
                listed = text.draft_token_ids[a, d, :3].tolist()
                label = listed.index(following) if following in listed else 3
                expected.append((start + a, d, parent, column, label))
                if label == 3:
                    break
                parent, column = following, label
        start += text.num_anchors
    found = (samples.group_anchor, samples.group_depth, samples.parent_token, samples.parent_column, samples.label)
    assert list(zip(*(x.tolist() for x in found), strict=True)) == expected


def test_soft_labels_are_the_targets_distribution_at_the_prefix() -> None:
    drafts = [[[2, 7], [8, 3]], [[3, 6], [1, 2]], [[1, 2], [3, 4]]]
    ids = np.array([[2, 7], [3, 8], [4, 5]], np.int32)
    known = {"target_token_ids": ids, "target_logprobs": np.log([[0.6, 0.2], [0.7, 0.1], [0.9, 0.1]]).astype(np.float32)}
    trace = Trace({}, [tiny_text([9, 1, 2, 3], drafts, **known)])
    soft = collect(trace, 2).soft
    assert soft is not None
    np.testing.assert_allclose(soft, [[0.6, 0.2, 0.2], [0.1, 0.7, 0.2], [0.7, 0, 0.3]], atol=1e-6)  # (0,0) (0,1) (1,0)
    sharp = collect(trace, 2, sharpening=np.inf).soft
    np.testing.assert_allclose(sharp, [[1, 0, 0], [0, 1, 0], [1, 0, 0]], atol=1e-6)
    squared = collect(trace, 2, sharpening=2.0).soft
    np.testing.assert_allclose(squared[0], [0.9, 0.1, 0.0], atol=1e-6)
    other = TraceText("other", None, 1, trace.texts[0].token_ids, trace.texts[0].draft_token_ids, trace.texts[0].draft_logprobs)
    both = collect(Trace({}, [*trace.texts, other]), 2).soft
    assert np.isnan(both[3:]).all() and not np.isnan(both[:3]).any()


def test_losses_by_hand_and_by_loops() -> None:
    from selector.scorer.losses import local_loss, reach_loss

    q = np.array([[0.5, 0.25, 0.25], [0.5, 0.0, 0.5], [0.125, 0.25, 0.625]], np.float32)
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(q))
    labels = torch.tensor([[1.0, 0, 0], [0.5, 0, 0.5], [0, 0, 1]])
    expected = [np.log(2), np.log(2), -np.log(0.625)]
    np.testing.assert_allclose(local_loss(torch, log_q, labels), expected, rtol=1e-5)
    mask = torch.tensor([[True, True], [True, False]])  # anchor 0 is accepted at depth 1, then none; anchor 1 takes column 1
    loss = reach_loss(torch, log_q, torch.tensor([0, 2, 1]), mask)
    reaches, accepted = [[0.5, 0.25], [0.25, 0.0], [0.125, 0.25]], [[1, 0], [0, 0], [0, 1]]
    by_hand = [
        sum(-np.log(r if y else 1 - r) for r, y in zip(*pair, strict=True)) for pair in zip(reaches, accepted, strict=True)
    ]
    np.testing.assert_allclose(loss, by_hand, rtol=1e-4, atol=1e-5)


def test_training_finds_what_the_drafter_does_not_know() -> None:
    """The drafter of `markov_trace` ignores the parent; the chain's next token is the parent's successor 7 times of 10."""
    trace = markov_trace(num_texts=50, seed=1)
    train, other = trace.select(range(40)), trace.select(range(40, 50))
    losses: list[float] = []
    scorer = train_scorer(train, np.eye(VOCAB, dtype=np.float32), SMALL, progress=lambda epoch, loss: losses.append(loss))
    samples = collect(other, 4)
    edges = scorer.edges(samples.token_ids, samples.log_probs, samples.roots)
    assert (raw_log_loss(other, edges, 4) < raw_log_loss(other, samples.log_probs, 4) - 0.1).all()
    budgets = (2, 4, 8)
    scored = tokens_per_round_by_budget(other, edges, samples.token_ids, budgets)
    drafted = tokens_per_round_by_budget(other, samples.log_probs, samples.token_ids, budgets)
    assert all(scored[n] > drafted[n] for n in budgets)
    assert scorer.training["held_out_log_loss"][1:] == losses and scorer.training["num_texts"] == [32, 8]
    assert scorer.identity == {"target": "toy", "drafter": "toy-drafter", "block_size": 5, "dtype": "float32"}


def test_training_repeats_and_the_network_in_training_is_the_scorer() -> None:
    trace, settings = markov_trace(num_texts=8, seed=2), replace(SMALL, max_epochs=2)
    first, again = (train_scorer(trace, np.eye(VOCAB), settings) for _ in range(2))
    for one, two in zip(first.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, two)
    other = train_scorer(trace, np.eye(VOCAB), replace(settings, seed=1))
    assert not np.array_equal(first.weights.child_in, other.weights.child_in)
    start = train_scorer(trace, np.eye(VOCAB), replace(settings, max_seconds=0.0, kl_weight=0.0))
    assert start.training["out_of_time"] and start.training["epochs"] == 1


def test_held_out_loss_in_training_is_the_scorers_own_before_calibration() -> None:
    trace, settings = markov_trace(num_texts=10, seed=3), replace(SMALL, max_epochs=3, unvisited_weight=1.0)
    scorer = train_scorer(trace, np.eye(VOCAB), settings)
    ones = np.ones(trace.depth, np.float32)
    bare = Scorer(scorer.weights._replace(slopes=ones, gains=ones, none_offsets=0 * ones), 4, {})
    held = trace.select(split_texts(trace, settings)[1])
    samples = collect(held, 4)
    rows = bare.edges(samples.token_ids, samples.log_probs, samples.roots)[
        samples.group_anchor, samples.group_depth, samples.parent_column
    ]
    rows = np.concatenate([rows, np.log(np.maximum(1 - np.exp(rows).sum(1, keepdims=True), 1e-7))], axis=1)
    loss = -rows[np.arange(len(rows)), samples.label].mean()
    assert loss == pytest.approx(min(scorer.training["held_out_log_loss"]), abs=2e-3)  # tables are rounded to float16


def test_soft_labels_reach_the_training() -> None:
    trace = markov_trace(num_texts=8, seed=5)
    texts = []
    for text in trace.texts:
        best = np.append(text.token_ids[text.num_prompt_tokens + 1 :], 0).astype(np.int32)[:, None]
        texts.append(replace(text, target_token_ids=best, target_logprobs=np.zeros(best.shape, np.float32)))
    settings = replace(SMALL, max_epochs=2, soft_share=1.0)
    certain = train_scorer(Trace(trace.identity, texts), np.eye(VOCAB), settings)  # a target sure of its text is hard labels
    hard = train_scorer(trace, np.eye(VOCAB), settings)
    np.testing.assert_allclose(certain.weights.out, hard.weights.out, atol=1e-5)
    assert certain.training["soft_labels"] and not hard.training["soft_labels"]


def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(ScorerError, match="at least 4 texts"):
        train_scorer(markov_trace(num_texts=3), np.eye(VOCAB), SMALL)
    with pytest.raises(ScorerError, match=r"a row for token 29, got shape \(20, 20\)"):
        train_scorer(markov_trace(num_texts=6), np.eye(20), SMALL)
    with pytest.raises(ScorerError, match="top_k must be at least 1"):
        ScorerSettings(top_k=0)
    with pytest.raises(ScorerError, match="soft_share must lie in"):
        ScorerSettings(soft_share=1.5)
    for wrong in ({"validation_share": 1.0}, {"averaging": 1.0}, {"learning_rate": float("inf")}, {"top_k": 2.5}, {"seed": -1}):
        with pytest.raises(ScorerError, match=next(iter(wrong))):
            ScorerSettings(**wrong)
    with pytest.raises(ScorerError, match="not finite"):
        train_scorer(markov_trace(num_texts=8), np.full((VOCAB, 4), np.nan), SMALL)
    with pytest.raises(ScorerError, match="nothing would be learned"):
        ScorerSettings(kl_weight=0, reach_weight=0)


def test_calibration_finds_temperature_gain_and_offset() -> None:
    rng = np.random.default_rng(0)
    drafted, residuals = rng.normal(0, 1.5, (2, 20_000, 4))
    logits = 0.6 * drafted + 0.5 * residuals + np.array([0, 0, 0, 0.8])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    label = (rng.random((len(p), 1)) > p.cumsum(1)).sum(1)
    depth = np.where(np.arange(len(p)) < 19_990, 0, 1)  # depth 1 is seen too seldom and takes the values of depth 0
    found = fit_depth_calibration(drafted, residuals, label, depth, np.ones(len(p)), 2)
    for name, value in (("slopes", 0.6), ("gains", 0.5), ("none_offsets", 0.8)):
        np.testing.assert_allclose(found[name], [value, value], atol=0.06)  # about 5 standard errors
    never = fit_depth_calibration(drafted, residuals, label, depth, np.zeros(len(p)), 2)
    assert never["slopes"].tolist() == [1, 1] and never["gains"].tolist() == [1, 1] and never["none_offsets"].tolist() == [0, 0]


def test_useless_network_is_not_believed() -> None:
    rng = np.random.default_rng(1)
    drafted, residuals = np.log(rng.dirichlet(np.ones(4), 4000)), rng.normal(0, 2, (4000, 4))
    label = (rng.random((4000, 1)) > np.exp(drafted).cumsum(1)).sum(1)
    found = fit_depth_calibration(drafted, residuals, label, np.zeros(4000, int), np.ones(4000), 1)
    assert found["gains"][0] < 0.1 and found["slopes"][0] == pytest.approx(1.0, abs=0.1)


def test_tokens_per_round_is_what_walking_python_trees_gives() -> None:
    trace = markov_trace(num_texts=4, length=25, seed=6)
    samples = collect(trace, 4)
    for budget, found in tokens_per_round_by_budget(trace, samples.log_probs, samples.token_ids, (1, 3, 9)).items():
        tokens = rounds = first = 0
        for text in trace.texts:
            a, following = 0, text.next_tokens()
            while a < text.num_anchors - 1:
                nodes = expand_in_python(Trellis(samples.token_ids[first + a], samples.log_probs[first + a]), budget)
                pairs = zip(nodes.parents.tolist(), nodes.token_ids.tolist(), strict=True)
                children = {pair: slot for slot, pair in enumerate(pairs, 1)}
                slot = hit = 0
                while hit < trace.depth and (slot, int(following[a, hit])) in children:
                    slot, hit = children[slot, int(following[a, hit])], hit + 1
                rounds, a = rounds + 1, a + 1 + hit
            tokens, first = tokens + text.num_anchors - 1, first + text.num_anchors  # the first one needs no round
        assert found == pytest.approx(tokens / rounds)


def test_a_budget_counts_only_nodes_within_it() -> None:
    edges = np.log(np.array([[[0.6, 0.4], [0.6, 0.4]]]))
    ids = np.array([[[1, 2], [3, 4]]])
    ranks = path_ranks(edges, ids, np.array([[2, 4]]), 6)  # order: 1, 2, 1-3, then 2-3 and 1-4 tie, 2-4
    assert ranks.tolist() == [[1, 5]]
    visited, accepted = play_budget(np.array([[0, 3], [9, 0], [0, 0], [0, 0]]), [0, 4], 4)
    assert visited.tolist() == [0] and accepted.tolist() == [2]


def test_calibration_on_every_text_by_networks_that_did_not_see_it() -> None:
    """Each text is in one fold; what its network says of it is what a network trained on the others says."""
    trace = markov_trace(num_texts=12, seed=4)
    folds = deal_texts(trace, 3, seed=0)
    assert sorted(index for fold in folds for index in fold) == list(range(12)) and {len(fold) for fold in folds} == {4}
    settings = replace(SMALL, max_epochs=2, calibration_folds=3)
    table = ReducedEmbedding.of(np.eye(VOCAB), settings)
    found = blind_evidence(torch, trace, table, settings, 0.0)
    prepared = prepare(torch, trace, sorted(set(range(12)) - set(folds[1])), folds[1], table, settings)
    fitted, _ = fit_network(torch, prepared.train, prepared.held, prepared.reduced, trace.depth, settings, None)
    own = evidence(torch, fitted, prepared.held, prepared.reduced, settings)
    first = len(collect(trace.select(folds[0]), settings.top_k).label)
    np.testing.assert_allclose(found.residuals[first : first + len(own.label)], own.residuals, atol=1e-6)
    assert len(found.label) == len(collect(trace, settings.top_k).label)


@pytest.mark.parametrize(("folds", "seconds"), [(4, 60.0), (4, 0.0), (1, 60.0), (0, 60.0)])
def test_calibration_falls_back_to_the_texts_kept_aside(folds: int, seconds: float) -> None:
    trace = markov_trace(num_texts=8, seed=2)
    settings = replace(SMALL, max_epochs=2, calibration_folds=folds, max_seconds=seconds)
    blind = train_scorer(trace, np.eye(VOCAB), settings).training["calibrated_on"].startswith("every text")
    assert blind == (folds > 1 and seconds > 0)
    trainer, _ = make_trainer(TRAIN, np.eye(VOCAB), settings)
    assert trainer is not None
    note = trainer(trace, seconds).note  # only where time was what was missing
    said = "the scorer is calibrated on 2 of 8 texts; with more training time it would be on all"
    assert note == ("" if folds < 2 or blind else said)
    with pytest.raises(ScorerError, match="calibration_folds must not be negative"):
        replace(settings, calibration_folds=-1)
