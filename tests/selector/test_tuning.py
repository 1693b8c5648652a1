"""Tuning with scorers, tuned settings, overlap, contexts."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel
from selector import Plan, TreeSelector
from selector.errors import TuneError
from selector.price import PriceRange, RangedPrice, prices_at
from selector.registry import parse_policy
from selector.replaying.metrics import resamples
from selector.replaying.orders import build_orders
from selector.replaying.playing import play_policy
from selector.replaying.rounds import build_curves, play, play_plain
from selector.taps import Taps
from selector.trace import Trace
from selector.tune import candidates, split_halves, tune
from selector.tuning import candidates as candidates_module
from selector.tuning import pricing
from selector.tuning.candidates import Candidate, Fit, fit_candidate
from selector.tuning.choosing import best, choose, evidence, gain_chosen_elsewhere
from selector.tuning.judging import Judged
from selector.tuning.keeping import forget
from selector.tuning.parts import Part
from selector.tuning.pricing import price_ranges, round_tokens
from selector.tuning.training import Trained
from tests.selector.fake_scorers import FakeScorer, MarginalScorer, TransitionScorer, markov_transition
from tests.selector.helpers import markov_trace
from tests.selector.test_scorer import make_scorer

COST = CostModel.from_points(
    [1, 2, 4, 8, 9, 16, 24, 33], [0.042, 0.044, 0.046, 0.049, 0.055, 0.060, 0.068, 0.08], draft_seconds=0.005
)
FOR = {"target": "toy", "drafter": "toy-drafter", "block_size": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Policies that are played round by round are fitted on a few texts only."""
    monkeypatch.setattr(candidates_module, "ASKED_TOKENS", 150)


def knowing(**kwargs) -> TransitionScorer:
    return TransitionScorer(markov_transition(), identity=FOR, **kwargs)


@pytest.fixture(scope="module")
def with_scorer():
    """A plan tuned with a trainer that knows the texts' chain, and the traces it was asked to train on."""
    seen: list[Trace] = []

    def trainer(trace: Trace, seconds: float) -> Trained:
        seen.append(trace)
        assert seconds > 0
        return Trained(knowing(), list(range(len(trace.texts) // 2)), f"trained on {len(trace.texts)} texts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates_module, "ASKED_TOKENS", 150)
        steps: list[str] = []
        plan = tune(markov_trace(num_texts=12), COST, num_bootstrap=200, advance=steps.append, scorer="train", trainer=trainer)
    return plan, seen, steps


def test_a_scorer_that_knows_more_wins_on_held_out_texts(with_scorer):
    plan, _, steps = with_scorer
    assert plan.gains["edges"] == "scored"
    assert plan.gains["gain_over_unscored"] > 0.02
    low, high = plan.gains["gain_over_unscored_interval"]
    assert low <= plan.gains["gain_over_unscored"] <= high
    assert "the scorer is worth" in plan.reason
    assert plan.notes[-1] == "trained on 12 texts"  # what is to be known of the scorer that is used
    assert [row["name"] for row in plan.rows] == [candidate.label for candidate in candidates(True)]
    assert steps == 2 * [candidate.label for candidate in candidates(True)]
    assert plan.fallback["drift"] == "the calibration" and plan.calibration is not None


def test_scorers_are_trained_on_the_other_half_and_at_last_on_all(with_scorer):
    _, seen, _ = with_scorer
    trace = markov_trace(num_texts=12)
    keys = [{text.key for text in part.texts} for part in seen]
    halves = [{trace.texts[i].key for i in half} for half in split_halves(trace)]
    assert keys == [*halves, halves[0] | halves[1]]


def test_a_tuned_scorer_is_charged_its_time_and_decodes_live(with_scorer, tmp_path):
    plan = with_scorer[0]
    assert 0 < plan.scoring_seconds < 0.1
    assert 0 < plan.gains["scoring_seconds"] < 0.1
    selector = TreeSelector(COST, plan=plan)
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    assert selector.select(logits, plan.context_range[0], root_token=3).num_nodes > 0
    assert selector.stats.scored == 1
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.scorer.safetensors").exists()


def test_an_interrupted_tuning_trains_nothing_twice(tmp_path):
    trace, keep, calls = markov_trace(num_texts=8, length=16), tmp_path / "plan.json.partial", []

    def trainer(texts: Trace, seconds: float) -> Trained:
        calls.append(len(texts.texts))
        if calls == [4, 4]:
            raise KeyboardInterrupt
        scorer = replace(make_scorer(np.random.default_rng(len(calls))), identity=FOR)
        return Trained(scorer, [0, 1], f"training {len(calls)}")

    def run(texts=trace, **kwargs):
        return tune(texts, COST, num_bootstrap=20, scorer="train", trainer=trainer, keep=keep, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(list(keep.iterdir())) == 2  # one training, kept with what is to be known of it
    run()
    assert calls[:3] == [4, 4, 4] and len(calls) in (3, 4)  # the second half; and all texts if scored edges won
    before = len(calls)
    run()
    assert len(calls) == before
    run(training_seconds=7.0)
    run(markov_trace(num_texts=8, length=16, seed=5), training_seconds=7.0)
    assert len(calls) >= before + 4  # other time or other texts are other trainings
    (keep / "mine.txt").write_text("stays")
    forget(keep)
    assert [path.name for path in keep.iterdir()] == ["mine.txt"]
    forget(tmp_path / "nothing")


def test_a_scorer_without_use_is_not_taken():
    """One that leaves out everything but the drafter's last candidates."""

    class Useless(FakeScorer):
        def row(self, depth, parent, children, log_probs):
            return np.where(np.arange(len(children)) == len(children) - 1, -0.01, -np.inf)

    plan = tune(markov_trace(num_texts=8, length=24), COST, num_bootstrap=50, scorer=Useless(identity=FOR))
    assert plan.gains["edges"] != "scored" and not plan.has_scorer
    assert plan.gains["gain_over_unscored"] < 0
    assert any("was given" in note for note in plan.notes)


def test_without_torch_or_embedding_tuning_goes_on_and_says_so(monkeypatch):
    trace = markov_trace(num_texts=4, length=12)
    plan = tune(trace, COST, num_bootstrap=20, scorer="train")
    assert any("embedding was not given" in note for note in plan.notes)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find(name))
    plan = tune(trace, COST, num_bootstrap=20, scorer="train", embedding=np.zeros((30, 4), np.float32))
    assert any("torch is not installed" in note for note in plan.notes)
    assert [row["name"] for row in plan.rows] == [candidate.label for candidate in candidates(False)]
    with pytest.raises(TuneError, match="scorer must be 'train'"):
        tune(trace, COST, scorer="yes")


@pytest.mark.parametrize(("saw", "allowed"), [(2, False), (2, True), (0, False), (None, False)])
def test_prompts_the_drafter_was_trained_on_are_refused(saw, allowed):
    trace = markov_trace(num_texts=4, length=10)
    trace = Trace({**trace.identity, "drafter_saw": saw}, trace.texts)
    if saw and not allowed:
        with pytest.raises(TuneError, match="trained on 2 prompts of the trace's 4") as caught:
            tune(trace, COST)
        assert "--allow-overlap" in caught.value.hint
        return
    notes = tune(trace, COST, num_bootstrap=20, allow_overlap=allowed).notes
    assert [("trained on" in note) for note in notes] == ([] if saw == 0 else [True])


def test_a_plan_records_the_contexts_and_prices_by_range(monkeypatch):
    monkeypatch.setattr(pricing, "MIN_ROUNDS", 30)
    trace = markov_trace(num_texts=8, length=30)
    plan = tune(trace, COST, num_bootstrap=20)
    assert plan.context_range == trace.context_range
    assert 2 <= len(plan.prices) <= 3
    lows, highs = [item.context_low for item in plan.prices], [item.context_high for item in plan.prices]
    assert lows[1:] == [high + 1 for high in highs[:-1]]
    assert trace.context_range[0] <= lows[0] and highs[-1] <= trace.context_range[1]
    assert min(item.price for item in plan.prices) <= plan.price <= max(item.price for item in plan.prices)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


# --- parts and pieces


def test_price_ranges_worked_example(monkeypatch):
    """Eight rounds, ranges of at least three rounds: two, cut at the median."""
    monkeypatch.setattr(pricing, "MIN_ROUNDS", 3)
    contexts, seconds = np.array([10, 10, 20, 20, 30, 30, 40, 40]), np.full(8, 0.5)
    tokens = np.array([1, 1, 1, 1, 3, 3, 3, 3])
    ranges = price_ranges(contexts, tokens, seconds)
    assert ranges == [PriceRange(10, 24, 2.0), PriceRange(25, 40, 6.0)]
    assert price_ranges(contexts * 0 + 7, tokens, seconds) == [PriceRange(7, 7, 4.0)]
    assert price_ranges(contexts[:0], tokens[:0], seconds[:0]) == []
    assert price_ranges(contexts[:5], tokens[:5], seconds[:5]) == [PriceRange(10, 30, 2.8)]  # too few for two
    asked = np.array([1, 10, 24, 25, 400])
    np.testing.assert_array_equal(prices_at(ranges, asked), [2, 2, 2, 6, 6])
    assert [RangedPrice(ranges).at(context).price for context in asked.tolist()] == [2, 2, 2, 6, 6]


def test_a_quantile_between_repeated_contexts_is_no_range():
    """Two contexts, one a third of all rounds: the upper tercile lies on the second, the lower between them."""
    tokens, seconds = np.ones(600, int), np.ones(600)
    two = price_ranges(np.repeat([0, 100], [200, 400]), tokens, seconds)
    assert two == [PriceRange(0, 66, 1.0), PriceRange(67, 100, 1.0)]
    few = price_ranges(np.repeat([0, 50], [5, 595]), tokens, seconds)
    assert few == [PriceRange(0, 50, 1.0)]  # five rounds are no price


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 20), st.integers(0, 1000))
def test_price_ranges_cover_all_rounds_and_hold_enough_of_them(contexts, min_rounds, seed):
    rng = np.random.default_rng(seed)
    at, tokens, seconds = np.array(contexts), rng.integers(1, 6, len(contexts)), 0.1 + rng.random(len(contexts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "MIN_ROUNDS", min_rounds)
        ranges = price_ranges(at, tokens, seconds)
    assert (ranges[0].context_low, ranges[-1].context_high) == (at.min(), at.max())
    assert [item.context_low for item in ranges[1:]] == [item.context_high + 1 for item in ranges[:-1]]
    for item in ranges:
        inside = [i for i, context in enumerate(contexts) if item.context_low <= context <= item.context_high]
        assert len(ranges) == 1 or len(inside) >= min_rounds
        assert item.price == pytest.approx(sum(tokens[inside]) / sum(seconds[inside]))
    everywhere = np.arange(-2, 16)
    live = [RangedPrice(ranges).at(context).price for context in everywhere.tolist()]
    np.testing.assert_array_equal(prices_at(ranges[::-1], everywhere), live)


def judged(kind: str, seconds: list[float], edges: str = "drafted") -> Judged:
    """Four texts of ten tokens decoded in so many seconds each."""
    return Judged(Candidate(kind, edges), 40, np.array(seconds), np.full(4, 5))


def test_the_best_of_many_is_judged_on_texts_it_was_not_chosen_on():
    """Twenty candidates that are equally fast but for noise: the best looks faster, and chosen on other texts it does not."""
    rng, promised, honest = np.random.default_rng(0), [], []
    pairs = [(kind, edges) for kind in ("fixed", "exact", "priced", "taps", "smart", "unimodal") for edges in
             ("drafted", "calibrated", "scored")]  # fmt: skip
    for _ in range(30):
        rows = [
            Judged(Candidate(*pair), 240, 1 + 0.1 * rng.standard_normal(24), np.full(24, 5))
            for pair in [("plain", "drafted"), ("chain", "drafted"), *pairs]
        ]
        found = evidence(best(rows), rows, resamples(24, 200, 0))
        promised.append(found["gain_over_best_fixed"])
        honest.append(found["gain_over_best_fixed_chosen_elsewhere"])
    assert np.mean(promised) > 0.03 > 0.01 > abs(np.mean(honest))
    rows = [judged("plain", [2.0] * 4), judged("chain", [1.5] * 4), judged("fixed", [1.0] * 4), judged("exact", [0.8] * 4)]
    assert gain_chosen_elsewhere(rows, resamples(4, 200, 0)) == pytest.approx(0.25)
    assert gain_chosen_elsewhere(rows, np.ones((3, 4))) is None


def test_texts_of_one_prompt_are_tuned_on_once_and_few_without_a_scorer():
    trace = markov_trace(num_texts=6, length=16)
    doubled = Trace(trace.identity, [replace(text, key=f"{text.key}-{i}") for i in range(2) for text in trace.texts])
    once, twice = (tune(each, COST, num_bootstrap=20) for each in (trace, doubled))
    assert twice.notes[-1] == "6 texts were left out: they repeat the prompts of others"
    assert twice.gains["num_texts"] == 6 and twice.rows == once.rows
    few = tune(trace, COST, num_bootstrap=20, scorer="train", trainer=lambda texts, seconds: pytest.fail("trained"))
    assert few.notes[-1] == "no scorer: to train one on each half 8 texts are needed, there are 6"


def test_what_is_chosen_and_why():
    weights = resamples(4, 200, 0)
    plain, chain, fixed = judged("plain", [2.0] * 4), judged("chain", [1.5] * 4), judged("fixed", [1.0] * 4)
    winner, reason = choose([plain, chain, fixed, judged("exact", [0.99] * 4)], weights)
    assert winner.candidate.kind == "exact" and "+1.0% over the best fixed budget" in reason and "not worth it" in reason
    winner, reason = choose([plain, chain, fixed, judged("exact", [0.9] * 4)], weights)
    assert winner.candidate.kind == "exact" and "not worth it" not in reason
    winner, reason = choose([plain, chain, fixed], weights)
    assert winner is fixed and "over the best fixed" not in reason
    slow = [plain, judged("chain", [2.1] * 4), judged("fixed", [1.99] * 4)]
    winner, reason = choose(slow, weights)
    assert winner is plain and "does not pay" in reason
    lucky = [plain, judged("chain", [2.1] * 4), judged("fixed", [0.5, 2.2, 2.2, 2.2])]  # faster by one text only
    assert choose(lucky, weights)[0] is plain
    scored = judged("exact", [0.8] * 4, "scored")
    winner, reason = choose([plain, chain, fixed, scored], weights)
    assert winner is scored and "the scorer is worth +25.0% over the best without it" in reason


def test_tokens_of_rounds_add_up():
    orders = build_orders(markov_trace(num_texts=5, length=23), 32)
    curves = build_curves(orders, COST)
    played = [play(parse_policy(name), orders, curves) for name in ("exact", "chain", "fixed:9")]
    for rounds in (*played, play_plain(orders, curves)):
        text = np.searchsorted(orders.text_starts, rounds.visited, side="right") - 1
        np.testing.assert_array_equal(np.bincount(text, round_tokens(rounds, orders)), orders.num_tokens)


def test_tuned_taps_settings_reach_the_plan():
    fit = Fit(Taps(24, utility_threshold=0.03, depth_weight=0.2))
    assert (fit.policy.name, fit.settings) == ("taps:24", {"utility_threshold": 0.03, "depth_weight": 0.2})
    assert Plan(fit.policy.name, policy_settings=fit.settings).make_policy() == fit.policy
    assert Fit(parse_policy("smart:80")).settings == {} and Fit(parse_policy("plain")).settings == {}


def test_fitting_taps_is_at_least_as_good_as_its_defaults_on_the_texts_it_was_fitted_on():
    part = Part.of(markov_trace(num_texts=3, length=40), COST, 32)
    fit = fit_candidate(Candidate("taps"), part)
    default = play_policy(Taps(max_nodes=8), part.orders, part.curves)
    assert fit.play(part).tokens_per_second >= default.tokens_per_second


def test_thinning_keeps_every_nth_text():
    part = Part.of(markov_trace(num_texts=9, length=10), COST, 8)
    few = part.thinned(30)
    assert [text.key for text in few.trace.texts] == ["text-0", "text-3", "text-6"]
    direct = Part.of(few.trace, COST, 8)
    np.testing.assert_array_equal(few.orders.phi, direct.orders.phi)
    np.testing.assert_allclose(few.curves.table[few.curves.bucket], direct.curves.table[direct.curves.bucket])
    assert part.thinned(1000) is part


def test_scored_marginals_are_judged_as_drafted_but_for_the_time():
    part = Part.of(markov_trace(num_texts=3, length=20), COST, 16)
    scored = part.scored(MarginalScorer(), 0.002)
    for kind in ("fixed:6", "chain"):
        one, other = play(parse_policy(kind), part.orders, part.curves), play(parse_policy(kind), scored.orders, scored.curves)
        np.testing.assert_array_equal(one.nodes, other.nodes)
        np.testing.assert_allclose(other.seconds, one.seconds + 0.002)
