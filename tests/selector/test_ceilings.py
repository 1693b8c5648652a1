from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector.calibration import Calibration
from selector.registry import parse_policy
from selector.replaying.ceilings import cheapest_at_least, listed_depths, play_oracle, share_of_gap
from selector.replaying.orders import Orders, build_orders
from selector.replaying.playing import play_policy
from selector.replaying.replay import replay
from selector.replaying.rounds import Curves
from selector.trace import Trace, TraceText
from tests.selector.helpers import COST_KINDS, markov_trace, random_cost

POLICIES = ("plain", "chain", "chain:2", "fixed:1", "fixed:3", "fixed:9", "unimodal", "exact", "priced", "taps", "smart")


def curves_of(orders: Orders, table: np.ndarray, plain: float) -> Curves:
    """One curve for every context."""
    rows = table[None, : orders.max_nodes + 1]
    return Curves(rows, rows, np.array([plain]), np.zeros(len(orders.sizes), np.int64), False)


def one_text(listed: list[list[bool]], length: int) -> Trace:
    """A text of `length` generated tokens 100, 101, ...: at anchor a and depth d the true token is listed where told."""
    tokens = np.concatenate([[7], 100 + np.arange(length)]).astype(np.int32)
    depth = len(listed[0])
    ids = np.full((length, depth, 2), 5, np.int32)
    ids[:, :, 1] = 6
    for a in range(length):
        for d in range(depth):
            if listed[a][d]:
                ids[a, d, 1] = 100 + a + 1 + d
    return Trace({}, [TraceText("t", None, 1, tokens, ids, np.full(ids.shape, np.log(0.4), np.float32))])


def least_seconds(trace: Trace, table: np.ndarray, plain: float, max_nodes: int, perfect: bool) -> float:
    """Brute force over every sequence of choices: a plain step, or any size that holds some useful nodes."""
    total = 0.0
    for text in trace.texts:
        generated = text.token_ids[text.num_prompt_tokens :].tolist()

        def best(anchor: int, text: TraceText = text, generated: list[int] = generated) -> float:
            if anchor >= len(generated) - 1:
                return 0.0
            options = [plain + best(anchor + 1)]
            ids = text.draft_token_ids[anchor]
            useful = 0
            while True:
                options += [table[size] + best(anchor + useful + 1) for size in range(useful, max_nodes + 1)]
                at = anchor + 1 + useful
                if useful == min(len(ids), max_nodes) or at >= len(generated):
                    break
                if not perfect and generated[at] not in ids[useful]:
                    break
                useful += 1
            return min(options)

        total += best(0)
    return total


def test_a_worked_example():
    # Anchors 0..4 of a text of 6 tokens. At anchor 0 both depths are listed, at anchor 3 the second only, else nothing.
    no = [False, False]
    trace = one_text([[True, True], no, no, [False, True], no, no], 6)
    orders = build_orders(trace, 3)
    assert listed_depths(orders).tolist() == [2, 0, 0, 0, 0, 0]
    assert listed_depths(orders, perfect_drafter=True).tolist() == [2, 2, 2, 2, 1, 0]
    rounds = play_oracle(orders, curves_of(orders, np.array([1.5, 1.6, 1.7, 1.8]), 1.0))
    # Two nodes for 1.7 s yield three tokens; then two plain steps at 1 s each: no round without a hit is worth its draft.
    assert (rounds.visited.tolist(), rounds.nodes.tolist(), rounds.accepted.tolist()) == ([0, 3, 4], [2, 0, 0], [2, 0, 0])
    assert rounds.total_seconds == pytest.approx(3.7)
    assert rounds.tokens_per_second == pytest.approx(5 / 3.7)


def test_fewer_nodes_than_are_listed_where_the_last_one_costs_a_cliff():
    trace = one_text([[True, True]] * 3, 3)  # two tokens to come: one node and the bonus end the text
    orders = build_orders(trace, 2)
    rounds = play_oracle(orders, curves_of(orders, np.array([1.1, 1.2, 9.0]), 1.0))
    assert rounds.accepted.tolist() == [1]


def test_a_larger_round_is_charged_where_the_curve_falls():
    assert cheapest_at_least(np.array([[3.0, 2.0, 4.0, 2.0, 5.0]])).tolist() == [[1, 1, 3, 3, 4]]
    trace = one_text([[True, False]] * 3, 3)
    orders = build_orders(trace, 3)
    rounds = play_oracle(orders, curves_of(orders, np.array([5.0, 4.0, 4.5, 1.0]), 2.0))
    assert (rounds.nodes.tolist(), rounds.accepted.tolist(), rounds.seconds.tolist()) == ([3], [1], [1.0])


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("perfect", [False, True])
def test_the_oracle_is_the_best_of_all_choices(kind, perfect):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        trace = markov_trace(num_texts=2, length=6, depth=2, top_k=2, vocab=6, seed=seed)
        orders = build_orders(trace, 3)
        table, plain = random_cost(rng, 4, kind), 0.2 + rng.random()
        rounds = play_oracle(orders, curves_of(orders, table, plain), perfect)
        assert rounds.total_seconds == pytest.approx(least_seconds(trace, table, plain, 3, perfect))
        assert rounds.total_seconds == pytest.approx(rounds.seconds.sum())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(COST_KINDS), st.booleans(), st.integers(1, 20))
def test_no_policy_beats_the_oracle_and_the_oracle_no_perfect_drafter(seed, kind, calibrated, max_nodes):
    rng = np.random.default_rng(seed)
    trace = markov_trace(num_texts=3, length=14, depth=3, top_k=3, vocab=8, seed=seed)
    calibration = Calibration((0.6, 0.5), (-0.2, -0.4)) if calibrated else None
    orders = build_orders(trace, max_nodes, calibration)
    curves = curves_of(orders, random_cost(rng, max_nodes + 1, kind), 0.2 + rng.random())
    oracle, drafter = play_oracle(orders, curves), play_oracle(orders, curves, True)
    assert oracle.tokens_per_second <= drafter.tokens_per_second * (1 + 1e-12)
    for name in POLICIES:
        rounds = play_policy(parse_policy(name), orders, curves)
        assert rounds.tokens_per_second <= oracle.tokens_per_second * (1 + 1e-12), name


def test_replay_prints_both_ceilings_and_every_share():
    cost = CostModel.from_points([1, 2, 8, 9, 33], [0.042, 0.050, 0.059, 0.065, 0.11], draft_seconds=0.010)
    result = replay(markov_trace(), cost, ["exact", "chain:1"])
    oracle, drafter, fixed = result.row("oracle"), result.row("limit of drafting"), result.row("best fixed")
    assert result.rows[-2:] == [oracle, drafter]
    assert (oracle.share_of_gap, fixed.share_of_gap) == (1.0, 0.0)
    assert drafter.share_of_gap > 1
    exact = result.row("exact")
    gap = oracle.tokens_per_second - fixed.tokens_per_second
    assert exact.share_of_gap == pytest.approx((exact.tokens_per_second - fixed.tokens_per_second) / gap)
    assert oracle.acceptance_rate == pytest.approx(1.0)  # a rising curve: nothing is verified that is not accepted
    assert oracle.tokens == exact.tokens


def test_shares():
    assert share_of_gap(11.0, 10.0, 14.0) == pytest.approx(0.25)
    assert share_of_gap(9.0, 10.0, 14.0) == pytest.approx(-0.25)
    assert share_of_gap(10.0, 10.0, 10.0) is None


def test_a_candidate_of_probability_zero_is_not_listed():
    trace = one_text([[True, True]] * 4, 4)
    trace.texts[0].draft_logprobs[0, 1, 1] = -np.inf
    assert listed_depths(build_orders(trace, 4)).tolist() == [1, 2, 1, 0]


class Halved:
    """A scorer that keeps two candidates and believes in half of what the draft says, whatever the parent."""

    top_k = 2
    identity: dict = {}

    def edges(self, token_ids, log_probs, root_token_ids):
        k = min(2, token_ids.shape[2])
        edges = np.repeat(log_probs[:, :, None, :k], k, axis=2) + np.log(0.5)
        edges[:, 0, 1:] = -np.inf
        return edges


def test_the_ceilings_do_not_depend_on_what_corrects_the_draft():
    cost = CostModel.from_points([1, 2, 8, 9, 33], [0.042, 0.050, 0.059, 0.065, 0.11], draft_seconds=0.010)
    plain, scored = replay(markov_trace(), cost, ["exact"]), replay(markov_trace(), cost, ["exact"], scorer=Halved())
    for role in ("limit of selection", "limit of drafting"):
        one, other = plain.row(role), scored.row(role)
        assert (one.seconds, one.mean_nodes, one.share_of_gap) == (other.seconds, other.mean_nodes, other.share_of_gap)
    drafted = scored.row("best fixed as drafted")
    assert (drafted.tokens_per_second, drafted.share_of_gap) == (plain.row("best fixed").tokens_per_second, 0.0)
    assert scored.calibrated
    gap = plain.row("oracle").tokens_per_second - drafted.tokens_per_second
    exact = scored.row("exact")
    assert exact.share_of_gap == pytest.approx((exact.tokens_per_second - drafted.tokens_per_second) / gap)
    assert exact.tokens_per_second <= scored.row("oracle").tokens_per_second


def test_scored_rounds_pay_for_scoring_and_the_ceilings_do_not():
    cost = CostModel.from_points([1, 2, 8, 9, 33], [0.042, 0.050, 0.059, 0.065, 0.11], draft_seconds=0.010)
    free = replay(markov_trace(), cost, ["chain:2"], scorer=Halved(), num_bootstrap=2)
    paid = replay(markov_trace(), cost, ["chain:2"], scorer=Halved(), scoring_seconds=0.003, num_bootstrap=2)
    one, other = free.row("chain:2"), paid.row("chain:2")
    assert other.seconds == pytest.approx(one.seconds + 0.003 * one.rounds)
    for role in ("plain", "best fixed as drafted", "oracle"):
        assert free.row(role).seconds == paid.row(role).seconds
    assert "3.000 ms a round" in paid.notes[-1]
