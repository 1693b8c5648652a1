"""benchmarks/scorer.py: its record, numbers by hand, and the alarm's play against replay and against the live selector."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from costmodel import CostModel
from selector import TreeSelector
from selector.drift.alarm import DriftAlarm, DriftSettings, round_log_likelihoods
from selector.drift.play import gains_by_depth, play_with_alarm, round_gains, scored_rows
from selector.drift.study import ALL, Run, by_kind, critical_exponent, kind_of, study_drift
from selector.edges import CALIBRATED, DRAFTED, SCORED
from selector.policies import ByCost
from selector.reliability import labelled_rows
from selector.replaying.orders import build_orders
from selector.replaying.rounds import build_curves, play
from selector.scorer.samples import collect
from selector.scorer.study import judge_on, make_parts, study_budgets, study_throughput
from selector.trace import Trace
from selector.trellis import Trellis
from selector.tuning.parts import Part, fit_calibration_on
from tests.selector.fake_scorers import ArbitraryScorer, MarginalScorer, TransitionScorer, markov_transition
from tests.selector.helpers import markov_trace

ROOT = Path(__file__).resolve().parents[2]
COST = CostModel.from_points([1, 2, 4, 8, 16, 32, 64], np.array([40, 46, 50, 56, 70, 95, 140]) / 1e3, draft_seconds=0.01)
TRACE = markov_trace(num_texts=8, length=40)
KNOWS = TransitionScorer(markov_transition())
KINDS: dict = {}


def parts(trace: Trace, scorer: object, seconds: float = 0.001) -> dict:
    return dict(make_parts(trace, COST, 24, fit_calibration_on(Part.of(trace, COST, 24)), scorer, seconds))


def gains_of(trace: Trace, scorer: object) -> np.ndarray:
    samples = collect(trace, scorer.top_k)
    return gains_by_depth(scored_rows(scorer, samples), labelled_rows(samples.log_probs, samples), samples)


@pytest.mark.parametrize("scorer", [KNOWS, ArbitraryScorer()])
def test_an_alarm_that_never_fires_is_replay_on_scored_edges_and_one_that_did_is_replay_without(scorer) -> None:
    made = parts(TRACE, scorer)
    scored, drafted, curves = made[SCORED].orders, made[DRAFTED].orders, made[DRAFTED].curves
    patient = DriftAlarm(DriftSettings(rounds_between_false_alarms=1e300))
    ours = play_with_alarm(scored, drafted, curves, 0.001, gains_of(TRACE, scorer), patient)
    theirs = play(ByCost("exact"), scored, curves.plus(0.001))
    assert ours.text_seconds == pytest.approx(theirs.text_seconds) and ours.num_rounds == len(theirs.nodes)
    assert ours.num_scored == ours.num_asked == ours.num_rounds
    assert ours.tokens_per_second == pytest.approx(theirs.tokens_per_second)
    fired = DriftAlarm(DriftSettings(first_pause=10**9))
    while fired.use_scorer:
        fired.observe(-1.0, 0.0)
    without = play_with_alarm(scored, drafted, curves, 0.001, gains_of(TRACE, scorer), fired)
    assert without.text_seconds == pytest.approx(play(ByCost("exact"), drafted, curves).text_seconds)
    assert (without.num_scored, without.num_asked, without.events) == (0, 0, [])


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_play_with_alarm_is_what_the_live_selector_does(seed: int) -> None:
    """Same trees, same alarms: the selector is told of every round's tokens, as a decoder would, text after text."""
    trace, scorer = markov_trace(num_texts=4, length=24, seed=seed), ArbitraryScorer()
    chosen = DriftSettings(rounds_between_false_alarms=20, first_pause=6, check_rounds=4, proof=1.0)
    drafted = build_orders(trace, 24)
    curves = build_curves(drafted, COST)
    scored = build_orders(trace, 24, None, scorer)
    ours = play_with_alarm(scored, drafted, curves, 0.0, gains_of(trace, scorer), DriftAlarm(chosen))
    alarm = DriftAlarm(chosen)
    selector = TreeSelector(COST, policy="exact", max_nodes=24, scorer=scorer, alarm=alarm, pause=None)
    rounds = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in trace.texts:
            anchor = 0
            while anchor < text.num_anchors - 1:
                trellis = Trellis(text.draft_token_ids[anchor].astype(np.int64), text.draft_logprobs[anchor].astype(np.float64))
                context, path = text.num_prompt_tokens + anchor, text.next_tokens()[anchor]
                tree = selector.select_trellis(trellis, 16 * round(context / 16), int(text.token_ids[context]))
                slot = hits = 0
                while hits < len(path):
                    found = np.flatnonzero((tree.parents == slot) & (tree.token_ids == path[hits]))
                    if not found.size:
                        break
                    slot, hits = int(found[0]), hits + 1
                selector.observe(tree, hits, 1.0, [t for t in path[: hits + 1].tolist() if t >= 0])
                anchor, rounds = anchor + hits + 1, rounds + 1
    assert (ours.num_rounds, len(ours.fallbacks)) == (rounds, alarm.num_alarms)
    assert ours.num_scored == selector.stats.scored


def test_gains_are_the_alarms_own_likelihoods() -> None:
    scorer, text = ArbitraryScorer(top_k=5), TRACE.texts[3]
    gains, start = gains_of(TRACE, scorer), sum(one.num_anchors for one in TRACE.texts[:3])
    for a in range(0, text.num_anchors, 7):
        ids, logs = text.draft_token_ids[a].astype(np.int64), text.draft_logprobs[a].astype(np.float64)
        edges = scorer.edges(ids[None], logs[None], text.token_ids[text.num_prompt_tokens + a][None])[0]
        path = [token for token in text.next_tokens()[a].tolist() if token >= 0]
        for n in range(len(path) + 1):
            own, raw = round_log_likelihoods(edges, logs, ids, path[:n])
            assert gains[start + a, n] == pytest.approx(own - raw)


def test_budgets_and_throughput_against_replay() -> None:
    made = parts(TRACE, KNOWS)
    rows = {(row.num_nodes, row.edges): row for row in study_budgets(made, (4, 16, 999), num_bootstrap=20)}
    assert set(rows) == {(n, edges) for n in (4, 16) for edges in (DRAFTED, CALIBRATED, SCORED)}  # no 999
    tokens = sum(text.num_anchors - 1 for text in TRACE.texts)
    for row in rows.values():
        assert row.tokens_per_round == pytest.approx(tokens / row.rounds)
        assert row.gain == pytest.approx(row.tokens_per_round / rows[row.num_nodes, DRAFTED].tokens_per_round - 1)
    best = rows[4, SCORED]
    assert best.gain > 0 and best.gain_interval[0] <= best.gain <= best.gain_interval[1]
    rates, plain = study_throughput(made, made, num_bootstrap=20)
    found = {(row.kind, row.edges): row for row in rates}
    assert len(found) == 12 and found["fixed", DRAFTED].gain == 0.0
    assert plain[0].tokens_per_second == pytest.approx(1 / 0.04, rel=1e-6)  # a plain step takes 40 ms
    free = study_throughput(made, parts(TRACE, KNOWS, 0.0), num_bootstrap=20)[0]
    slower, same = found["exact", SCORED], [row for row in free if (row.kind, row.edges) == ("exact", SCORED)][0]
    assert slower.tokens_per_second < same.tokens_per_second  # scoring is charged


def test_reliability_of_one_prefix_by_hand() -> None:
    """One text of two tokens: one prefix, whose token the draft gave .25 and the scorer, leaving a tenth, says the same."""
    text = TRACE.texts[0]
    drafts = np.full((2, 1, 2), math.log(0.25), np.float32)
    ids = np.full((2, 1, 2), [text.token_ids[text.num_prompt_tokens + 1], 99], np.int32)
    tokens = text.token_ids[: text.num_prompt_tokens + 2]
    one = Trace(TRACE.identity, [replace(text, token_ids=tokens, draft_token_ids=ids, draft_logprobs=drafts)])
    found = judge_on(one, fit_calibration_on(Part.of(one, COST, 4)), MarginalScorer())
    row = found.row(SCORED)
    assert (row.num_groups, row.observed) == (1, 1.0) and row.predicted == pytest.approx(0.5)
    assert row.log_loss == pytest.approx(math.log(4), abs=1e-6) and row.ece == pytest.approx(0.5)  # 2 x |.25 - .5|
    assert found.row(DRAFTED).log_loss == pytest.approx(math.log(4), abs=1e-6)


def test_drift_cells() -> None:
    part = Part.of(TRACE, COST, 24)
    calibration = fit_calibration_on(part)
    scorers = {"same": (MarginalScorer(), calibration), "wrong": (TransitionScorer(markov_transition(seed=5), 0.99), calibration)}
    quick = DriftSettings(rounds_between_false_alarms=20)
    cells = {(c.trained_on, c.run_on): c for c in study_drift(part, scorers, KINDS, 0.0, 1, 20, settings=quick)}
    assert set(cells) == {(name, kind) for name in scorers for kind in ("math", "code", ALL)}
    good, bad = cells["same", ALL], cells["wrong", ALL]
    assert good.nats_per_round == 0.0 and good.share_scored == good.share_asked == 1.0 and good.rounds_until_alarm is None
    assert good.alarm == pytest.approx(good.scorer) and good.scorer == pytest.approx(good.drafted)
    assert bad.nats_per_round < 0 and bad.share_alarmed == 1.0 and bad.share_scored < 0.5 and bad.alarm > bad.scorer
    run = Run.of(part, collect(TRACE, 16), scorers["wrong"][0], calibration)
    always = play(ByCost("exact"), run.scored, run.curves)
    assert bad.nats_per_round == pytest.approx(round_gains(always, run.gains).mean())
    assert cells["same", "math"].num_texts + cells["same", "code"].num_texts == good.num_texts == 8


def test_kinds_and_the_critical_exponent() -> None:
    assert kind_of("mbpp", {"code": ("mbpp",)}) == "code" and kind_of("other", {}) == "other"
    assert kind_of(None, {}) == "unlabelled"
    assert by_kind(TRACE, {}) == {"math": [0, 2, 4, 6], "code": [1, 3, 5, 7]}
    # three texts better by log 2 and one worse by log 5/2: at 1 the mean is (3/2 + 5/2) / 4
    assert critical_exponent(np.log([0.5, 0.5, 0.5, 2.5])) == pytest.approx(1.0)
    assert critical_exponent(np.array([-1.0, -2.0])) is None and critical_exponent(np.array([-1.0, 1.5])) == 0.0


def test_the_command_prints_one_record(tmp_path: Path) -> None:
    train, judged = markov_trace(num_texts=10, length=24), markov_trace(num_texts=6, length=20, seed=1)
    train.save(tmp_path / "train.safetensors")
    judged.save(tmp_path / "eval.safetensors")
    table = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    save_file({"embed_tokens.weight": table}, tmp_path / "e.safetensors")
    COST.profile.save(tmp_path / "profile.json")
    command = [sys.executable, str(ROOT / "benchmarks" / "scorer.py"), "--train", "train.safetensors"]
    command += ["--embedding", "e.safetensors", "--profile", "profile.json", "--seconds", "8"]
    command += ["--orders", "2", "--bootstrap", "20", "--json"]
    done = subprocess.run([*command, "--eval", "eval.safetensors"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["schema"] == "treebudget.benchmark.scorer"
    assert {row["predictor"] for row in record["reliability"]["rows"]} == {DRAFTED, CALIBRATED, SCORED}
    assert [row["num_nodes"] for row in record["budgets"]] == [n for n in (4, 8, 16, 32, 63) for _ in range(3)]
    assert len(record["throughput"]) == 13 and record["scoring_seconds"] > 0
    cells = {(cell["trained_on"], cell["run_on"]) for cell in record["drift"]["cells"]}
    assert cells == {(a, b) for a in ("all", "math", "code", "shuffled") for b in ("math", "code", "all")}
    tokens = sum(text.num_anchors - 1 for text in judged.texts)
    assert record["budgets"][0]["tokens_per_round"] == pytest.approx(tokens / record["budgets"][0]["rounds"])
    again = subprocess.run([*command, "--eval", "train.safetensors"], capture_output=True, text=True, cwd=tmp_path)
    assert again.returncode == 1 and "10 prompts are in both traces" in again.stderr and "Traceback" not in again.stderr
