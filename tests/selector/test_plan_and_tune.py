from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from costmodel import CostModel
from costmodel.identity import Identity
from profiles.errors import TreebudgetError
from selector.calibration import Calibration
from selector.errors import PlanError, PolicyError, ScorerError, TraceMismatch, TuneError
from selector.plan import Plan
from selector.price import PriceRange
from selector.tune import CANDIDATES, split_halves, tune
from selector.tuning import candidates
from tests.selector.fake_scorers import FakeScorer, MarginalScorer
from tests.selector.helpers import markov_trace

POINTS = [1, 2, 4, 8, 9, 16, 24, 33]
SECONDS = np.array([0.042, 0.044, 0.046, 0.049, 0.055, 0.060, 0.068, 0.08])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Policies that are played round by round are fitted on a few texts only."""
    monkeypatch.setattr(candidates, "ASKED_TOKENS", 150)


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


@pytest.mark.parametrize(("field", "value", "said"), [
    ("price", float("nan"), "positive number, got nan"), ("price", "40", "got .40."), ("price", -1.0, "got -1.0"),
    ("prices", [{"context_low": 0, "context_high": 9, "price": 0.0}], "prices must be a positive number"),
    ("reach_scale", 0.0, "positive number"), ("scoring_seconds", -0.1, "not be negative"), ("top_k", 0, "at least 1, got 0"),
    ("top_k", 2.5, "whole number"), ("max_nodes", True, "whole number"), ("policy", "foo", "unknown policy 'foo'"),
    ("policy", 5, "must be a str, got 5"), ("identity", None, "must be a dict, got None"), ("notes", "few", "must be a list"),
    ("identity", {"context_tokens": ["1", 9]}, "two whole numbers"), ("identity", {"context_tokens": [9, 1]}, "the lower first"),
    ("prices", [{"context_low": "0", "context_high": 9, "price": 3.0}], "contexts in prices"),
    ("policy_settings", {"name": "exact"}, "no such settings"), ("scorer", {"file": "..", "sha256": ""}, "no plain file name"),
    ("scorer", {"file": "", "sha256": ""}, "no plain file name"),
])  # fmt: skip
def test_a_number_that_is_none_is_named(field, value, said):
    with pytest.raises(PlanError, match=said) as caught:
        Plan.from_dict(Plan("priced").to_dict() | {field: value})
    assert caught.value.field == field
    with pytest.raises(PlanError, match="names no policy"):
        Plan.from_dict({"price": 4.0})


def test_a_plan_for_something_else_names_the_field(tmp_path):
    path = Plan(identity={"target": "toy", "block_size": 8}).save(tmp_path / "plan.json")
    assert Plan.load(path, {"target": "toy", "dtype": "float32"}).policy == "priced"
    with pytest.raises(PlanError, match="block_size is 8 in the plan, expected 16") as caught:
        Plan.load(path, {"target": "toy", "block_size": 16})
    assert caught.value.field == "block_size"


class LoadedScorer(FakeScorer):
    """What a file of a fake scorer holds."""

    @classmethod
    def load(cls, path):
        return cls(identity=json.loads(path.read_text()))


@pytest.fixture
def files_hold_fake_scorers(monkeypatch):
    monkeypatch.setattr("selector.scorer.Scorer", LoadedScorer)


FOR = {"target": "toy", "drafter": "toy-drafter", "block_size": 5}


def test_a_plan_and_its_scorer_survive_the_disk_together(tmp_path, files_hold_fake_scorers):
    plan = Plan(
        "taps:24", 20.5, policy_settings={"utility_threshold": 0.03}, prices=[PriceRange(1, 9, 3.0)], identity=FOR,
        fallback={"drift": "x"}, notes=["n"], scoring_seconds=1e-4, attached=MarginalScorer(identity=FOR),
    )  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    saved = Plan.load(plan.save(tmp_path / "plan.json"))
    assert saved.to_dict()["version"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "plan.json", "plan.scorer.safetensors"]
    assert (saved.prices, saved.fallback, saved.notes) == (plan.prices, plan.fallback, plan.notes)
    assert (saved.make_policy().max_nodes, saved.make_policy().utility_threshold) == (24, 0.03)
    assert saved.has_scorer and saved.load_scorer().identity == FOR
    for name in ("plan.json", "plan.scorer.safetensors"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    assert Plan.load(tmp_path / "elsewhere" / "plan.json").load_scorer().identity == FOR


def test_a_plan_saved_elsewhere_takes_its_scorer_along(tmp_path, files_hold_fake_scorers):
    first = Plan(identity=FOR, attached=MarginalScorer(identity=FOR)).save(tmp_path / "plan.json")
    loaded = Plan.load(first)
    copy = Plan.load(loaded.save(tmp_path / "elsewhere" / "other.json"))
    assert copy.scorer.file == "other.scorer.safetensors" and copy.load_scorer().identity == FOR
    assert Plan.load(loaded.save(first)).load_scorer().identity == FOR  # over itself
    (tmp_path / "plan.scorer.safetensors").unlink()
    with pytest.raises(PlanError, match="scorer is missing"):
        loaded.save(tmp_path / "third.json")
    assert not (tmp_path / "third.json").exists()


def test_a_scorer_of_other_weights_than_the_plans_is_refused():
    one, other = ({**FOR, "target_sha256": sha} for sha in ("aa", "bb"))
    Plan(identity=one, attached=MarginalScorer(identity=FOR)).load_scorer()  # known on one side only
    with pytest.raises(ScorerError, match="target_sha256"):
        Plan(identity=one, attached=MarginalScorer(identity=other)).load_scorer()


def test_a_missing_changed_or_foreign_scorer_is_refused(tmp_path, files_hold_fake_scorers):
    path = Plan(identity=FOR, attached=MarginalScorer(identity=FOR)).save(tmp_path / "plan.json")
    beside = tmp_path / "plan.scorer.safetensors"
    with pytest.raises(PlanError, match="block_size is 5 in the plan, expected 16"):
        Plan.load(path, {"block_size": 16})
    unknown = Plan.load(Plan(attached=MarginalScorer(identity=FOR)).save(tmp_path / "other.json"))
    with pytest.raises(PlanError, match="block_size is 5 in the plan's scorer, expected 16") as caught:
        unknown.check({"block_size": 16, "target": None})
    assert caught.value.field == "block_size"
    original = beside.read_text()
    beside.write_text(original + " ")
    with pytest.raises(PlanError, match="is not the scorer that was written with the plan"):
        Plan.load(path).load_scorer()
    beside.unlink()
    with pytest.raises(PlanError, match="scorer is missing"):
        Plan.load(path).load_scorer()
    foreign = Plan(identity=FOR, attached=MarginalScorer(identity={**FOR, "drafter": "another"}))
    with pytest.raises(ScorerError, match="drafter"):
        foreign.load_scorer()
    with pytest.raises(PlanError, match="plain file name"):
        Plan.from_dict({**Plan().to_dict(), "scorer": {"file": "../x", "sha256": "", "identity": {}}})
    assert Plan().load_scorer() is None


def test_a_plan_of_version_1_still_loads(tmp_path):
    old = {name: value for name, value in Plan("fixed:8", 20.5).to_dict().items() if name in (
        "schema", "policy", "price", "calibration", "reach_scale", "top_k", "max_nodes", "gains", "rows", "identity",
        "provenance", "reason",
    )}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps({**old, "version": 1}))
    assert Plan.load(tmp_path / "plan.json") == Plan("fixed:8", 20.5)


def test_settings_that_the_policy_does_not_have_are_refused():
    with pytest.raises(PlanError, match="no such settings"):
        Plan("exact", policy_settings={"utility_threshold": 0.1})
    with pytest.raises(PolicyError):
        Plan("taps", policy_settings={"depth_weight": -1.0})
    with pytest.raises(PlanError, match="unknown fields: folder"):
        Plan.from_dict({**Plan().to_dict(), "folder": "/"})


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
