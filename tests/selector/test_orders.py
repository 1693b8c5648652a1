"""Scored traces: orders, plays and live selection agree with walking every tree by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector import Plan, TreeSelector, Trellis
from selector import scoring as scoring_module
from selector.calibration import Calibration
from selector.drift.alarm import DriftAlarm, DriftSettings
from selector.policies import RoundInputs
from selector.registry import parse_policy
from selector.replaying.orders import Anchors, build_orders
from selector.replaying.playing import play_any, play_policy
from selector.replaying.rounds import build_curves, play
from selector.scoring import measure_scoring_seconds, score_chunks
from selector.tree import DraftTree
from tests.selector.fake_scorers import ArbitraryScorer, MarginalScorer
from tests.selector.helpers import markov_trace
from tests.selector.test_replay import cost_model, decode_live

NAMES = ["chain", "chain:2", "fixed:1", "fixed:6", "fixed:32", "unimodal", "exact", "smart", "taps:8"]


def path_depth(tree: DraftTree, path: list[int]) -> int:
    """How far the tree follows a path of tokens, by looking through all its slots."""
    slot = depth = 0
    for token in path:
        below = [i for i in range(1, tree.num_verify_tokens) if tree.parents[i] == slot and tree.token_ids[i] == token]
        if not below:
            break
        slot, depth = below[0], depth + 1
    return depth


def play_by_hand(trace, policy, scorer, curves, max_nodes):
    """A trellis and a tree per round, nothing precomputed: rounds as (nodes, accepted, seconds)."""
    rounds, anchor0 = [], 0
    for text in trace.texts:
        a = 0
        generated = text.token_ids[text.num_prompt_tokens :].tolist()
        while a < len(generated) - 1:
            ids, logs = text.draft_token_ids[a].astype(np.int64), text.draft_logprobs[a].astype(np.float64)
            edges = scorer.edges(ids[None], logs[None], np.array([generated[a]]))[0]
            k = edges.shape[2]
            row = curves.bucket[anchor0 + a]
            tree = policy.select(
                Trellis(ids[:, :k].copy(), edges), RoundInputs(curves.table[row], curves.convex[row], None, max_nodes)
            )
            accepted = path_depth(tree, generated[a + 1 :])
            rounds.append((tree.num_nodes, accepted, curves.table[row][tree.num_nodes]))
            a += accepted + 1
        anchor0 += len(generated)
    return rounds


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top_k", [2, 16])
def test_scored_replay_equals_walking_every_tree(name, top_k, monkeypatch):
    monkeypatch.setattr(scoring_module, "CHUNK_BYTES", 3000)  # several chunks of anchors
    trace, cost, scorer = markov_trace(num_texts=3, length=24, seed=3), cost_model(), ArbitraryScorer(top_k)
    orders = build_orders(trace, 32, None, scorer)
    assert len(scorer.batches) > 3
    curves, policy = build_curves(orders, cost), parse_policy(name)
    expected = play_by_hand(trace, policy, scorer, curves, 32)
    found = play_policy(policy, orders, curves, adapt=False)
    assert list(zip(found.nodes.tolist(), found.accepted.tolist(), strict=True)) == [round_[:2] for round_ in expected]
    np.testing.assert_allclose(found.seconds, [round_[2] for round_ in expected])
    asked = play_any(policy, orders, curves)
    np.testing.assert_array_equal(asked.visited, found.visited)
    np.testing.assert_array_equal(asked.nodes, found.nodes)
    np.testing.assert_array_equal(asked.depths, found.depths)


@pytest.mark.parametrize("name", ["chain", "fixed:6", "exact", "unimodal"])
def test_scored_replay_equals_live_decoding(name):
    trace, cost, scorer = markov_trace(num_texts=3, length=24), cost_model(), ArbitraryScorer(3)
    patient = DriftAlarm(DriftSettings(rounds_between_false_alarms=1e300))  # the scorer is nonsense
    selector = TreeSelector(cost, plan=Plan(name), pause=None, scorer=scorer, alarm=patient)
    nodes, tokens, seconds = decode_live(trace, cost, selector)
    orders = build_orders(trace, selector.max_nodes, None, scorer)
    rounds = play(parse_policy(name), orders, build_curves(orders, cost))
    assert rounds.nodes.tolist() == nodes
    assert rounds.tokens_per_second == pytest.approx(tokens / seconds)
    assert selector.stats.scored == selector.stats.rounds > 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_edges_that_do_not_look_at_the_parent_are_marginals(seed, max_nodes):
    trace = markov_trace(num_texts=2, length=8, seed=seed)
    trace.texts[0].draft_logprobs[2, 1] = np.nan
    trace.texts[1].draft_token_ids[3, 0, 1:] = -1
    plain, scored = build_orders(trace, max_nodes), build_orders(trace, max_nodes, None, MarginalScorer())
    for name in ("phi", "deepest", "sizes", "ranks", "chain_reached", "chain_lengths"):
        np.testing.assert_array_equal(getattr(scored, name), getattr(plain, name), err_msg=name)


def test_a_scored_chain_follows_the_chosen_parent():
    """The best child of the best child, where the best of the row is another."""
    trace = markov_trace(num_texts=1, length=12, seed=1)
    scorer = ArbitraryScorer()
    orders = build_orders(trace, 8, None, scorer)
    text = trace.texts[0]
    for a in range(12):
        tree = parse_policy("chain").select(orders.trellis(a), RoundInputs(np.ones(9), np.ones(9), None, 8))
        assert orders.chain_lengths[a] == tree.num_nodes
        assert orders.chain_reached[a] == path_depth(tree, text.token_ids[text.num_prompt_tokens + a + 1 :].tolist())
    assert orders.chain_reached.max() > 0


def test_an_empty_trace_can_be_scored():
    trace = markov_trace(num_texts=2, length=5).select([])
    assert build_orders(trace, 8, None, ArbitraryScorer()).num_texts == 0


def test_selecting_texts_is_building_from_them():
    trace = markov_trace(num_texts=5, length=9)
    for calibration, scorer in [(None, None), (Calibration((0.7,), (-0.2,)), None), (None, ArbitraryScorer(3))]:
        chosen = build_orders(trace, 8, calibration, scorer).select([3, 1])
        direct = build_orders(trace.select([3, 1]), 8, calibration, scorer)
        for name in ("phi", "ranks", "text_starts", "context_tokens", "chain_reached", "hits", "log_edges"):
            np.testing.assert_array_equal(getattr(chosen, name), getattr(direct, name), err_msg=name)


def test_a_price_per_anchor_is_the_price_at_every_anchor():
    trace = markov_trace(num_texts=4, length=20)
    orders = build_orders(trace, 32)
    curves = build_curves(orders, cost_model())
    one = play(parse_policy("priced"), orders, curves, 30.0)
    many = play(parse_policy("priced"), orders, curves, np.full(len(orders.sizes), 30.0))
    np.testing.assert_array_equal(one.nodes, many.nodes)
    asked = play_any(parse_policy("priced"), orders, curves, np.full(len(orders.sizes), 30.0))
    np.testing.assert_array_equal(asked.nodes, play(parse_policy("priced"), orders, curves, 30.0, adapt=False).nodes)
    assert asked.price == 30.0
    high = play(parse_policy("priced"), orders, curves, np.where(orders.context_tokens < 30, 1.0, 1e6))
    assert (high.nodes[orders.context_tokens[high.visited] >= 30] == 0).all()
    assert (high.nodes[orders.context_tokens[high.visited] < 30] > 0).any()


def test_chunks_cover_all_anchors_in_order(monkeypatch):
    monkeypatch.setattr(scoring_module, "CHUNK_BYTES", 8 * 4 * 16 * 7)
    anchors, scorer = Anchors.of(markov_trace(num_texts=2, length=10)), ArbitraryScorer()
    parts = list(score_chunks(scorer, anchors.token_ids, anchors.log_edges, anchors.root_token_ids))
    assert [part for part, _ in parts] == [slice(0, 7), slice(7, 14), slice(14, 20)]
    whole = scorer.edges(anchors.token_ids, anchors.log_edges, anchors.root_token_ids)
    np.testing.assert_array_equal(np.concatenate([edges for _, edges in parts]), whole)
    assert measure_scoring_seconds(scorer, anchors.token_ids, anchors.log_edges, anchors.root_token_ids, 5) > 0
    assert set(scorer.batches[-8:]) == {1}


def test_a_curve_with_seconds_added():
    orders = build_orders(markov_trace(num_texts=2, length=6), 8)
    curves = build_curves(orders, CostModel.from_points([1, 9], [0.05, 0.06]))
    np.testing.assert_allclose(curves.plus(0.001).table - curves.table, 0.001)
    np.testing.assert_array_equal(curves.plus(0.001).plain, curves.plain)
