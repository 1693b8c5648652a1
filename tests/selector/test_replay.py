from __future__ import annotations

import numpy as np
import pytest

from costmodel import CostModel
from profiles.errors import UsageError
from selector import TreeSelector, Trellis
from selector.calibration import Calibration
from selector.errors import TraceError
from selector.plan import Plan
from selector.price import PriceRange, prices_at
from selector.registry import parse_policy
from selector.replaying.metrics import acceptance_by_depth, acceptance_rate
from selector.replaying.orders import build_orders
from selector.replaying.replay import replay
from selector.replaying.rounds import build_curves, play, play_at_fixed_point
from selector.taps import Taps
from selector.trace import Trace, TraceText
from tests.selector.helpers import markov_trace

CONTEXTS = np.repeat([0, 200], 8)
POINTS = [1, 2, 4, 8, 9, 16, 24, 33]
SECONDS = np.array([0.042, 0.050, 0.053, 0.059, 0.065, 0.076, 0.084, 0.11])


def cost_model() -> CostModel:
    """Grows with context, with a cliff between 8 and 9."""
    return CostModel.from_points(POINTS * 2, np.concatenate([SECONDS, SECONDS * 1.2]), CONTEXTS, draft_seconds=0.010)


def decode_live(trace: Trace, cost: CostModel, selector: TreeSelector) -> tuple[list[int], int, float]:
    """Decode every text with the selector, as a greedy decoder would; returns nodes per round, tokens and seconds."""
    nodes, num_tokens, seconds = [], 0, 0.0
    for text in trace.texts:
        generated = text.token_ids[text.num_prompt_tokens :].tolist()
        out = generated[:1]
        while len(out) < len(generated):
            anchor = len(out) - 1
            context = text.num_prompt_tokens + anchor
            trellis = Trellis(text.draft_token_ids[anchor].astype(np.int64), text.draft_logprobs[anchor].astype(np.float64))
            tree = selector.select_trellis(trellis, context, root_token=out[-1])
            target = []
            for slot in range(tree.num_verify_tokens):
                path, at = [], slot
                while at > 0:
                    path.insert(0, int(tree.token_ids[at]))
                    at = int(tree.parents[at])
                follows = generated[anchor + 1 : anchor + 1 + len(path)] == path and anchor + 1 + len(path) < len(generated)
                target.append(generated[anchor + 1 + len(path)] if follows else -7)
            path = tree.walk(target)
            committed = [int(token) for token in tree.token_ids[path[1:]]] + [target[path[-1]]]
            out += [token for token in committed if token != -7]  # cut at the end of the text
            spent = float(cost.round_seconds(selector.max_nodes + 1, context)[tree.num_nodes])
            selector.observe(tree, len(path) - 1, spent)
            nodes.append(tree.num_nodes)
            seconds += spent
        assert out == generated
        num_tokens += len(generated) - 1
    return nodes, num_tokens, seconds


def test_prices_by_range_are_charged_and_not_found_on_the_texts_replayed():
    trace, cost = markov_trace(num_texts=4, length=24), cost_model()
    ranges = [PriceRange(0, 29, 5.0), PriceRange(30, 99, 60.0)]
    orders = build_orders(trace, 32)
    expected = play(parse_policy("priced"), orders, build_curves(orders, cost), prices_at(ranges, orders.context_tokens), 0.9)
    row = replay(trace, cost, ["priced"], 32, price=ranges, reach_scale=0.9, num_bootstrap=2).row("priced")
    assert (row.seconds, row.price) == (expected.total_seconds, expected.price)
    one, found = (replay(trace, cost, ["priced"], 32, price=price, num_bootstrap=2).row("priced") for price in (5.0, None))
    assert one.price == 5.0 and found.price not in (5.0, row.price)


@pytest.mark.parametrize("name", ["chain", "chain:2", "fixed:1", "fixed:6", "fixed:32", "unimodal", "exact"])
@pytest.mark.parametrize("calibration", [None, Calibration((0.6, 0.5), (-0.2, -0.4))])
def test_replay_equals_live_decoding_round_by_round(name, calibration):
    trace, cost = markov_trace(num_texts=4, length=30, overconfident=1.5), cost_model()
    plan = Plan(name, calibration=calibration)
    selector = TreeSelector(cost, plan=plan, pause=None)
    nodes, tokens, seconds = decode_live(trace, cost, selector)
    orders = build_orders(trace, selector.max_nodes, calibration)
    rounds = play(parse_policy(name), orders, build_curves(orders, cost))
    assert rounds.nodes.tolist() == nodes
    assert rounds.total_seconds == pytest.approx(seconds)
    assert rounds.tokens_per_second == pytest.approx(tokens / seconds)


def test_replay_of_priced_equals_live_decoding_at_that_price():
    trace, cost = markov_trace(num_texts=4, length=30), cost_model()
    orders = build_orders(trace, 32)
    rounds = play(parse_policy("priced"), orders, build_curves(orders, cost), price=25.0, adapt=False)
    selector = TreeSelector(cost, plan=Plan("priced", price=25.0), pause=None, adapt=False)
    selector.observe = lambda *_: None  # the price stays
    assert decode_live(trace, cost, selector)[0] == rounds.nodes.tolist()


def test_plain_and_the_token_count():
    trace, cost = markov_trace(num_texts=3, length=20), cost_model()
    result = replay(trace, cost, ["exact"])
    plain = result.row("plain")
    assert plain.tokens == 3 * 19  # the first token comes from the prompt's forward
    assert plain.rounds == plain.tokens
    expected = sum(cost.plain_seconds(16 * round((text.num_prompt_tokens + a) / 16)) for text in trace.texts for a in range(19))
    assert plain.seconds == pytest.approx(expected)
    assert all(row.tokens == plain.tokens for row in result.rows)


def test_baselines_are_the_best_of_their_kind():
    trace, cost = markov_trace(), cost_model()
    names = [f"chain:{n}" for n in (1, 2, 3)] + ["chain", "fixed:1", "fixed:4", "fixed:8", "fixed:16", "fixed:32"]
    result = replay(trace, cost, names)
    chain, fixed = result.row("best chain"), result.row("best fixed")
    for row in result.rows:
        if row.name.startswith("chain"):
            assert row.tokens_per_second <= chain.tokens_per_second
            assert row.gain_over_best_chain <= 0
        if row.name.startswith("fixed"):
            assert row.tokens_per_second <= fixed.tokens_per_second
    low, high = fixed.speedup_interval
    assert low <= fixed.speedup_over_plain <= high
    assert fixed.gain_over_best_fixed == 0
    assert set(fixed.datasets) == {"math", "code"}


def test_the_price_is_a_fixed_point():
    trace, cost = markov_trace(num_texts=24), cost_model()
    orders = build_orders(trace, 32)
    curves = build_curves(orders, cost)
    rounds = play_at_fixed_point(orders, curves)
    assert rounds.price == pytest.approx(rounds.tokens_per_second, rel=0.02)


def test_a_perfect_drafter_takes_one_round_per_block():
    tokens = np.arange(30, dtype=np.int32)
    ids = np.full((21, 4, 1), -1, np.int32)
    for a in range(21):
        ids[a, :, 0] = np.minimum(tokens[9 + a] + 1 + np.arange(4), 99)
    text = TraceText("one", None, 9, tokens, ids, np.full(ids.shape, -0.01, np.float32))
    result = replay(Trace({}, [text]), cost_model(), ["chain"])
    assert result.row("chain").rounds == 4  # 20 tokens, 5 a round
    assert result.row("chain").acceptance_by_depth == [1.0] * 4


def test_a_draft_that_runs_past_the_end_is_cut():
    tokens = np.arange(13, dtype=np.int32)
    ids = np.zeros((3, 4, 1), np.int32)
    ids[:, :, 0] = np.arange(3)[:, None] + 11 + np.arange(4)
    text = TraceText("short", None, 10, tokens, ids, np.full(ids.shape, -0.01, np.float32))
    row = replay(Trace({}, [text]), cost_model(), ["chain"]).row("chain")
    assert (row.tokens, row.rounds) == (2, 1)


def test_nan_and_padded_drafts_never_enter():
    trace = markov_trace(num_texts=2, length=10)
    text = trace.texts[0]
    text.draft_logprobs[:, 1, :] = np.nan
    text.draft_token_ids[:, 0, 2:] = -1
    orders = build_orders(Trace({}, [text]), 16)
    assert orders.deepest.max() == 1
    assert orders.sizes.max() == 2


def test_texts_of_one_token_are_harmless():
    short = TraceText("a", None, 3, np.arange(4, dtype=np.int32), np.zeros((1, 4, 4), np.int32), np.zeros((1, 4, 4), np.float32))
    empty = TraceText("b", None, 3, np.arange(3, dtype=np.int32), np.zeros((0, 4, 4), np.int32), np.zeros((0, 4, 4), np.float32))
    whole = markov_trace(num_texts=2, length=10)
    mixed = Trace({}, [empty, *whole.texts, short])
    alone, beside = replay(whole, cost_model(), ["exact"]), replay(mixed, cost_model(), ["exact"])
    assert beside.row("exact").tokens == 18 and beside.num_texts == 2
    assert beside.rows == alone.rows  # intervals too: a text without a round is not resampled
    with pytest.raises(TraceError, match="nothing to replay"):
        replay(Trace({}, [short, empty]), cost_model(), ["exact"])


def test_policies_of_one_name_and_other_settings_are_both_played():
    trace = markov_trace(num_texts=3, length=12)
    rows = replay(trace, cost_model(), [Taps(4), Taps(4, utility_threshold=0.5), Taps(4), "taps:4"]).rows
    assert [row.name for row in rows].count("taps:4") == 2


def test_no_price_is_found_and_no_resample_is_refused():
    trace = markov_trace(num_texts=3, length=12)
    found = [replay(trace, cost_model(), ["priced"], price=price).row("priced").price for price in (None, [])]
    assert found[0] == found[1]
    assert replay(trace, cost_model(), ["priced"], price=np.float32(30)).row("priced").price == 30
    with pytest.raises(UsageError, match="num_bootstrap must be at least 1"):
        replay(trace, cost_model(), ["exact"], num_bootstrap=0)


def test_a_what_if_is_labelled():
    trace = markov_trace(num_texts=2, length=10)
    cost = cost_model()
    assert replay(trace, cost, ["exact"]).what_if == {}
    trace.identity["device"] = "another"
    cost.profile.__dict__["identity"] = type(cost.identity)(device="this")
    assert replay(trace, cost, ["exact"]).what_if == {"device": ["another", "this"]}


def test_a_flat_curve_is_noted():
    result = replay(markov_trace(num_texts=2, length=12), CostModel.from_points([1, 33], [0.05, 0.05]), ["exact"])
    assert result.row("exact").mean_nodes <= 4
    assert "flat" in result.notes[0]


def test_case_14_depths_never_offered_are_unknown():
    assert acceptance_by_depth([4, 4, 4], [4, 4, 4], 6) == [1.0, 1.0, 1.0, 1.0, None, None]
    assert acceptance_by_depth([0, 2], [3, 3], 3) == [0.5, 1.0, 0.0]


def test_case_24_acceptance_falls_with_the_budget():
    rates = [acceptance_rate(3.2, budget) for budget in (4, 8, 16)]
    np.testing.assert_allclose(rates, [0.733, 0.314, 0.147], atol=5e-4)
    assert acceptance_rate(1.0, 1) is None
