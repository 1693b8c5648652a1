"""Cases from the field that concern cost: 3, 4, 5, 15, 16, 21, 22 and 23."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from costmodel import CostModel, Identity, Profile, load_profile
from costmodel.errors import FileFormatError, IdentityMismatch
from costmodel.measure import profile_backend
from costmodel.plan import MeasurePlan
from costmodel.statistics import summarize
from tests.costmodel.fakes import IDENTITY, FakeBackend, VirtualClock


def test_case_3_a_cliff_is_kept_and_reported():
    cost = CostModel.from_points([8, 9, 10, 13, 17, 33], np.array([53.8, 60.8, 62.0, 62.0, 63.2, 72.5]) / 1e3)
    assert cost.verify_seconds(8) == pytest.approx(0.0538, rel=1e-12)
    cliffs = cost.diagnostics.cliffs
    assert [(cliff.from_verify_tokens, cliff.to_verify_tokens) for cliff in cliffs] == [(8, 9)]
    assert cliffs[0].relative_jump == pytest.approx(0.1301, abs=1e-3)
    assert cost.diagnostics.concave_stretches


def test_case_4_an_uneven_grid_is_fitted_on_t():
    tokens = [1, 65, 97, 113]
    cost = CostModel.from_points(tokens, [10 + 0.1 * t for t in tokens])
    np.testing.assert_allclose(cost.convex.seconds(tokens), [10.1, 16.5, 19.7, 21.3], rtol=1e-9)
    np.testing.assert_allclose(cost.verify_seconds(tokens, form="convex"), [10.1, 16.5, 19.7, 21.3], rtol=1e-9)


def test_case_5_a_flat_curve_is_degenerate():
    cost = CostModel.from_points([1, 8, 64, 256], [0.06] * 4)
    assert cost.diagnostics.degenerate and cost.diagnostics.status == "degenerate"
    assert "flat" in str(cost.diagnostics.degenerate_reason)


def test_case_5_a_single_size_is_degenerate():
    cost = CostModel.from_points([8], [0.06])
    assert cost.diagnostics.degenerate and "one size" in str(cost.diagnostics.degenerate_reason)
    assert cost.verify_seconds([1, 8, 9]).tolist() == [0.06] * 3


def test_a_rising_curve_is_not_degenerate():
    assert CostModel.from_points([1, 64], [0.06, 0.07]).diagnostics.status == "ok"


@pytest.mark.parametrize(
    ("field", "other"),
    [("device", "NVIDIA H100"), ("dtype", "float32"), ("attention", "eager"), ("tensor_parallel", 2), ("block_size", 16),
     ("mode", "captured"), ("quantization", "int8"), ("num_threads", 8), ("drafter", "other"), ("engine", "other")],
)  # fmt: skip
def test_cases_15_and_23_a_mismatch_names_the_field(tmp_path, field, other):
    identity = replace(IDENTITY, device="NVIDIA A100", dtype="bfloat16")
    path = Profile.from_points([1, 8], [0.05, 0.06], identity=identity).save(tmp_path / "here.json")
    load_profile(path, expect=identity)
    with pytest.raises(IdentityMismatch, match=field) as caught:
        load_profile(path, expect=replace(identity, **{field: other}))
    assert caught.value.field == field
    assert (caught.value.expected, caught.value.found) == (other, getattr(identity, field))
    with pytest.raises(IdentityMismatch, match=field):
        load_profile(path, expect={field: other})


class _Bomb:
    fired = False

    def __reduce__(self):
        return (setattr, (_Bomb, "fired", True))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_case_16_a_pickled_file_is_refused_unread(tmp_path, protocol):
    path = tmp_path / "profile.json"
    path.write_bytes(pickle.dumps(_Bomb(), protocol=protocol))
    with pytest.raises(FileFormatError, match="refused unread"):
        load_profile(path)
    assert not _Bomb.fired


def test_case_21_two_modes_are_flagged_not_averaged():
    summary = summarize([0.010, 0.014] * 6)
    assert summary.flags == ("bimodal",)
    assert summary.seconds == 0.010 and summary.high_seconds == 0.014


def test_case_21_through_the_profiler():
    clock = VirtualClock()
    flips = np.random.default_rng(5)
    backend = FakeBackend(clock, lambda t, c: 0.010, disturb=lambda call: 1.0 + 0.4 * flips.integers(2))
    plan = MeasurePlan(verify_tokens=(1, 2), context_tokens=(1,), max_rounds=40, max_seconds=1e9)
    cells = profile_backend(backend, plan, clock=clock).verify
    assert all("bimodal" in cell.flags for cell in cells)
    assert all(min(abs(cell.seconds - 0.010), abs(cell.seconds - 0.014)) < 1e-9 for cell in cells)


def test_case_22_the_same_build_against_itself_shows_no_difference():
    # Slow drift of 10 % over the run and 1 % noise: interleaving spreads the drift evenly over all shapes.
    clock = VirtualClock()
    backend = FakeBackend(clock, lambda t, c: 0.010, noise=0.01, disturb=lambda call: 1 + 0.1 * call / 1000)
    plan = MeasurePlan(verify_tokens=tuple(range(1, 21)), context_tokens=(1,), max_rounds=25, max_seconds=1e9)
    seconds = np.array([cell.seconds for cell in profile_backend(backend, plan, clock=clock).verify])
    # Medians of 25 scatter by about 1.0 % (noise and drift together); 4 % is beyond four sigma: odds below 1 in 1,000.
    assert np.ptp(seconds) / seconds.mean() < 0.04


def test_case_22_warm_up_is_dropped():
    clock = VirtualClock()
    backend = FakeBackend(clock, lambda t, c: 0.010, disturb=lambda call: 50.0 if call <= 15 else 1.0)
    plan = MeasurePlan(verify_tokens=(1, 2, 3, 4, 5, 6), context_tokens=(1,), max_rounds=3)
    cells = profile_backend(backend, plan, clock=clock).verify
    assert all(cell.high_seconds == pytest.approx(0.010) for cell in cells)


def test_identity_unknown_fields_are_not_compared():
    Identity(dtype="bfloat16").check(IDENTITY, fields=["device", "target"])
    Identity().check(IDENTITY)
    IDENTITY.check(Identity())
    with pytest.raises(IdentityMismatch, match=r"model_shape\.layers"):
        IDENTITY.check({"model_shape": {"layers": 3}})


def test_identity_a_fine_tune_of_the_same_shape_costs_the_same():
    IDENTITY.check(replace(IDENTITY, target="toy-finetuned"))
    with pytest.raises(IdentityMismatch, match="target"):
        IDENTITY.check({"target": "other"})
    with pytest.raises(IdentityMismatch, match="engine_version"):
        replace(IDENTITY, engine_version="5.0").check({"engine_version": "4.0"}, fields=["engine_version"])
    replace(IDENTITY, engine_version="5.0").check({"engine_version": "4.0"})
