from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel import CostModel, Identity, Profile, StageCell, VerifyCell, fit_cost
from costmodel.errors import ProfileError, RequestsNotMeasured, UsageError


def three_stage_profile() -> Profile:
    profile = Profile.from_points([1, 8, 64], [0.050, 0.055, 0.090], draft_seconds=0.008, commit_seconds=0.001)
    selects = tuple(StageCell("select", size, 0, 1, 0.0001 * size) for size in (10, 60))
    return replace(profile, stages=profile.stages + selects)


def test_a_round_is_draft_select_verify_commit():
    cost = fit_cost(three_stage_profile())
    rounds = cost.round_seconds(64)
    assert rounds.shape == (64,) and rounds.dtype == np.float64
    assert rounds[7] == pytest.approx(0.008 + 0.001 + 0.001 + 0.055)  # 7 nodes select as 10, 8 tokens verify
    assert rounds[63] == pytest.approx(0.008 + 0.006 + 0.001 + 0.090)
    assert cost.plain_seconds() == pytest.approx(0.051)


def test_round_seconds_is_cached_by_context_bucket_and_read_only():
    cost = CostModel.from_points([1, 8, 1, 8], [1.0, 2.0, 3.0, 4.0], [0, 0, 1600, 1600])
    first = cost.round_seconds(8, 100)
    assert cost.round_seconds(8, 97) is first and cost.round_seconds(8, 120) is not first
    np.testing.assert_allclose(first, cost.verify_seconds(np.arange(1, 9), 96))
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0.0
    assert not np.array_equal(cost.round_seconds(8, 100, form="convex"), [0] * 8)


def test_a_convex_round_is_convex_whatever_selecting_costs():
    profile = three_stage_profile()
    bumpy = [StageCell("select", size, 0, 1, seconds) for size, seconds in ((1, 0.001), (8, 0.004), (32, 0.002), (60, 0.0045))]
    cost = CostModel(replace(profile, stages=(*profile.stages[:2], *bumpy)))
    steps = np.diff(cost.round_seconds(128, form="convex"))
    assert np.all(steps >= 0) and np.all(np.diff(steps) >= -1e-12)


def test_scalars_give_floats_and_arrays_broadcast():
    cost = CostModel.from_points([1, 8, 1, 8], [1.0, 2.0, 3.0, 4.0], [0, 0, 100, 100])
    assert isinstance(cost.verify_seconds(4, 50), float)
    assert cost.verify_seconds(np.array([[1], [8]]), [0, 50, 100]).tolist() == [[1, 2, 3], [2, 3, 4]]
    assert cost.verify_seconds(np.array([[1], [8]]), [0, 50, 100], form="convex").shape == (2, 3)


def test_batches_are_measured_or_refused():
    profile = Profile.from_points([4, 8, 4, 8], [1.0, 2.0, 2.0, 3.0], num_requests=[1, 1, 4, 4], draft_seconds=0.5)
    cost = CostModel(profile)
    assert cost.verify_seconds(4, 0, 1) == 1.0 and cost.verify_seconds(4, 0, 4) == 2.0
    assert cost.verify_seconds(4, 0, 2) == pytest.approx(4 / 3)
    assert cost.draft_seconds(0, 4) == 0.5
    for requests in (0, 5):
        with pytest.raises(RequestsNotMeasured, match="measured 1, 4 requests"):
            cost.verify_seconds(4, 0, requests)
    single = Profile.from_points([1, 8], [1.0, 2.0])
    with pytest.raises(RequestsNotMeasured, match="measured 1 requests"):
        CostModel(single).plain_seconds(num_requests=2)
    shared = CostModel(replace(single, requests_rule="total_tokens"))
    assert shared.verify_seconds(8, 0, 4) == 2.0
    assert shared.plain_seconds(num_requests=8) == 2.0


def test_stage_costs_follow_size_and_context():
    profile = Profile.from_points([1, 8], [1.0, 2.0])
    stages = [StageCell("draft", 8, c, 1, s) for c, s in ((0, 0.1), (100, 0.3))]
    cost = CostModel(replace(profile, stages=tuple(stages)))
    assert cost.draft_seconds(50) == pytest.approx(0.2) and cost.draft_seconds(999) == pytest.approx(0.3)
    assert cost.select_seconds(12) == 0.0 and cost.commit_seconds() == 0.0
    assert cost.select_seconds([1, 2]).tolist() == [0.0, 0.0]


def test_wrong_questions_are_usage_errors():
    cost = CostModel.from_points([1, 8], [1.0, 2.0])
    with pytest.raises(UsageError, match="root counts"):
        cost.verify_seconds(0)
    with pytest.raises(UsageError, match="negative"):
        cost.verify_seconds(1, -1)
    with pytest.raises(UsageError, match="form"):
        cost.verify_seconds(1, form="spline")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1"):
        cost.round_seconds(0)
    with pytest.raises(UsageError, match="context_tokens must not be negative, got -5"):
        cost.round_seconds(8, -5)


def test_points_that_contradict_each_other_are_refused():
    with pytest.raises(ProfileError, match="given twice"):
        CostModel.from_points([1, 1], [1.0, 2.0])
    with pytest.raises(ProfileError, match="at least 1"):
        CostModel.from_points([0, 1], [1.0, 2.0])
    with pytest.raises(ProfileError, match="finite"):
        CostModel.from_points([1, 2], [1.0, float("nan")])
    with pytest.raises(UsageError, match="whole numbers"):
        CostModel.from_points([1.5], [1.0])
    with pytest.raises(UsageError, match="do not fit each other"):
        CostModel.from_points([1, 2, 3], [1.0, 2.0])
    with pytest.raises(UsageError, match="1 values for 2 points"):
        CostModel.from_points([1, 2], [1.0])
    with pytest.raises(UsageError, match="whole numbers"):
        CostModel.from_points(["a", "b"], [1.0, 2.0])
    with pytest.raises(UsageError, match="do not fit each other: could not convert"):
        CostModel.from_points([1, 2], ["a", "b"])
    with pytest.raises(ProfileError, match="at least one verify cell"):
        CostModel.from_points([], [])


def test_what_lies_outside_is_noted_by_batch():
    points = Profile.from_points([1, 8, 64, 4, 64, 256], [0.01, 0.012, 0.02, 0.011, 0.022, 0.06], 0, [1, 1, 1, 4, 4, 4])
    cost = CostModel(points)
    assert [cost.measured_range(batch) for batch in (1, 2, 4)] == [(64, 0, 0), (64, 0, 0), (256, 0, 0)]
    cost.verify_seconds(200, 0, 4)
    assert cost.diagnostics.flags == ()
    cost.verify_seconds(200, 0, 1)
    assert any("beyond the measured 64" in flag for flag in cost.diagnostics.flags)


def test_a_fraction_of_a_token_is_refused_and_spoils_nothing():
    cost = CostModel.from_points([1, 8, 64], [0.05, 0.06, 0.07])
    for size, context in ((2.5, 0), (float("nan"), 0), (4, float("nan")), (4, float("inf"))):
        with pytest.raises(UsageError):
            cost.round_seconds(size, context)
    assert cost.round_seconds(2).shape == (2,)


def test_suspect_cells_and_gap_are_in_the_diagnostics():
    profile = Profile.from_points([1, 8, 64], [0.05, 0.055, 0.09])
    cells = (*profile.verify[:2], VerifyCell(64, 0, 1, 0.09, 0.08, 0.12, 9, ("bimodal",)))
    found = CostModel(replace(profile, verify=cells)).diagnostics
    assert found.suspect_cells == (cells[2],)
    assert found.largest_gap is not None and found.mean_relative_gap < 0.01
    assert found.to_dict()["status"] == "ok"


@pytest.mark.parametrize(("block_size", "expected"), [(None, 0.02), (4, 0.01), (8, 0.02), (32, 0.08), (64, 0.08)])
def test_a_draft_is_one_of_the_drafters_own_block(block_size, expected):
    """Other block sizes are measured beside it; where the profile does not say which is its own, the middle one counts."""
    sizes = {4: 0.01, 8: 0.02, 32: 0.08}
    profile = Profile.from_points([1, 8], [0.1, 0.2], identity=Identity(block_size=block_size))
    profile = replace(profile, stages=tuple(StageCell("draft", size, 0, 1, seconds) for size, seconds in sizes.items()))
    cost = CostModel(profile)
    assert cost.draft_seconds() == pytest.approx(expected)
    assert cost.round_seconds(8)[0] == pytest.approx(0.1 + expected)
