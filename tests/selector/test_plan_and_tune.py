from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from costmodel import CostModel
from costmodel.identity import Identity
from profiles.errors import TreebudgetError
from selector.calibration import Calibration
from selector.errors import PlanError, PolicyError, TraceMismatch, TuneError
from selector.plan import Plan
from selector.tune import CANDIDATES, split_halves, tune
from tests.selector.helpers import markov_trace

POINTS = [1, 2, 4, 8, 9, 16, 24, 33]
SECONDS = np.array([0.042, 0.044, 0.046, 0.049, 0.055, 0.060, 0.068, 0.08])


def test_a_plan_survives_the_disk(tmp_path):
    plan = Plan("fixed:8", 20.5, Calibration((0.8, 0.7), (-0.1, 0.0)), 0.9, 8, 63, {"a": 1}, [{"b": 2}], {"target": "toy"})
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


def test_what_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(PlanError, match="refused unread"):
        Plan.load(path)
    with pytest.raises(PlanError, match="no plan"):
        Plan.load(tmp_path / "missing.json")
    for change in ({"policy": "best"}, {"surprise": 1}, {"calibration": {"slopes": [1]}}, {"schema": "other"}, {"version": 99}):
        path.write_text(json.dumps({**Plan().to_dict(), **change}))
        with pytest.raises(TreebudgetError):
            Plan.load(path)
    with pytest.raises(PolicyError):
        Plan("best")
    with pytest.raises(PlanError):
        Plan(top_k=0)


def test_a_plan_for_something_else_names_the_field(tmp_path):
    path = Plan(identity={"target": "toy", "block_size": 8}).save(tmp_path / "plan.json")
    assert Plan.load(path, {"target": "toy", "dtype": "float32"}).policy == "priced"
    with pytest.raises(PlanError, match="block_size is 8 in the plan, expected 16") as caught:
        Plan.load(path, {"target": "toy", "block_size": 16})
    assert caught.value.field == "block_size"


def test_tuning_finds_that_drafting_pays():
    cost = CostModel.from_points(POINTS, SECONDS, draft_seconds=0.005)
    plan = tune(markov_trace(num_texts=16), cost, num_bootstrap=200)
    assert plan.policy != "plain"
    assert plan.gains["speedup_over_plain"] > 1.1
    assert "times as fast as plain" in plan.reason
    assert [row["name"] for row in plan.rows] == [candidate.label for candidate in CANDIDATES]
    best = max(plan.rows, key=lambda row: row["tokens_per_second"])
    assert plan.gains["tokens_per_second"] == best["tokens_per_second"]
    assert plan.identity["block_size"] == 5
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_calibration_helps_an_overconfident_drafter():
    cost = CostModel.from_points(POINTS, SECONDS, draft_seconds=0.005)
    plan = tune(markov_trace(num_texts=24, overconfident=3.0), cost, num_bootstrap=100)
    assert plan.gains["calibration_log_loss_gain"] > 0.1


def test_tuning_chooses_plain_where_drafting_does_not_pay():
    """Two tokens cost twice one, and the draft a third: as float32 on a small processor."""
    seconds = [0.058, 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.2]
    plan = tune(markov_trace(num_texts=12), CostModel.from_points(POINTS, seconds, draft_seconds=0.04), num_bootstrap=200)
    assert plan.policy == "plain"
    assert "does not pay" in plan.reason
    assert plan.calibration is None
    assert plan.price == pytest.approx(1 / 0.058)


def test_a_gain_within_two_percent_is_called_not_worth_it():
    plan = tune(
        markov_trace(num_texts=16, seed=5), CostModel.from_points(POINTS, SECONDS, draft_seconds=0.005), num_bootstrap=200
    )
    assert plan.gains["worth_it"] == (plan.gains["gain_over_best_fixed"] >= 0.02)
    if not plan.policy.startswith("fixed"):
        assert ("not worth it" in plan.reason) == (not plan.gains["worth_it"])


def test_too_few_texts_and_another_block_size_are_refused():
    cost = CostModel.from_points(POINTS, SECONDS)
    with pytest.raises(TuneError, match="at least 4"):
        tune(markov_trace(num_texts=3), cost)
    cost.profile.__dict__["identity"] = Identity(block_size=16)
    with pytest.raises(TraceMismatch, match="block_size is 5 in the trace, expected 16"):
        tune(markov_trace(num_texts=4), cost)


def test_a_flat_curve_is_tuned_without_pricing_by_it():
    plan = tune(markov_trace(num_texts=6), CostModel.from_points([1, 33], [0.05, 0.05]), num_bootstrap=50)
    assert "flat" in plan.reason


def test_halves_share_out_every_data_set():
    trace = markov_trace(num_texts=10)
    for half in split_halves(trace):
        assert sorted(trace.texts[i].dataset for i in half).count("math") in (2, 3)
    assert sorted(sum(split_halves(trace), [])) == list(range(10))
