"""Adaptive profiling of fake engines on a virtual clock: what it finds, how few points it needs, and that it resumes."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel import CostModel
from costmodel.adaptive import AdaptivePlan
from costmodel.errors import UsageError
from costmodel.experts import expected_experts
from costmodel.measure import profile_backend
from tests.costmodel.fakes import FakeBackend, VirtualClock

PLAN = AdaptivePlan(max_verify_tokens=128, max_context_tokens=2048, max_seconds=1e9, samples=2)


def linear(t: int, c: int) -> float:
    return 0.02 + 1e-4 * t + 2e-6 * c


def knee(t: int, c: int) -> float:
    return max(0.02, 0.02 + 4e-4 * (t - 40)) + 2e-6 * c


def cliff(t: int, c: int) -> float:
    return linear(t, c) + (0.012 if t > 53 else 0.0)


def concave(t: int, c: int) -> float:
    return 0.01 + 2e-6 * c + 3e-4 * expected_experts(t, 128, 8)


def run(curve, plan: AdaptivePlan = PLAN, **options):
    backend = FakeBackend(VirtualClock(), curve, **options)
    return profile_backend(backend, plan, clock=backend.clock), backend


def worst(profile, curve, contexts=(1, 333, 1000, 2048), sizes=range(1, 129)) -> float:
    cost = CostModel(profile)
    return max(abs(cost.verify_seconds(t, c) / curve(t, c) - 1) for t in sizes for c in contexts)


@pytest.mark.parametrize(("curve", "most"), [(linear, 48), (knee, 75), (concave, 110)])
def test_the_wanted_error_is_reached_with_few_points(curve, most):
    profile, _ = run(curve)
    assert worst(profile, curve) < PLAN.error
    assert len(profile.verify) <= most
    assert any("beyond twice the noise, no gap between points is wider than the wanted 3%" in note for note in profile.notes)


def test_a_cliff_is_found_cornered_and_reported():
    profile, _ = run(cliff)
    assert worst(profile, cliff, contexts=(1, 2048)) < PLAN.error
    cliffs = CostModel(profile).diagnostics.cliffs
    assert {(item.from_verify_tokens, item.to_verify_tokens) for item in cliffs} == {(53, 54)}
    assert any(note.startswith("not convex at context 1") for note in profile.notes)


def test_a_concave_stretch_is_reported_as_such():
    profile, _ = run(concave)
    assert CostModel(profile).diagnostics.concave_stretches
    assert any("above the chord" in note for note in profile.notes)


def test_noise_does_not_make_it_refine_without_end():
    # 5 % noise: points are sampled more often (up to max_samples), not placed everywhere.
    profile, backend = run(linear, noise=0.05)
    assert len(profile.verify) < 100
    assert max(cell.num_samples for cell in profile.verify) > PLAN.samples
    assert worst(profile, linear) < 0.08


def test_time_is_the_other_end_and_the_progress_says_what_remains():
    seen: list[tuple[float, str]] = []
    backend = FakeBackend(VirtualClock(), concave)
    plan = AdaptivePlan(max_verify_tokens=128, max_context_tokens=2048, max_seconds=12.0)
    profile = profile_backend(backend, plan, clock=backend.clock, progress=lambda steps, note: seen.append((steps, note)))
    assert backend.clock.now < 12.0 + 6.0  # one visit over at most
    assert any(note.startswith("chose") and "stopped after 12 s" in note for note in profile.notes)
    assert sum(step for step, _ in seen) == pytest.approx(backend.clock.now, abs=2.0)
    assert "at most" in seen[-1][1] and "points" in seen[-1][1]


def test_an_interrupted_adaptive_run_goes_on(tmp_path):
    class Stopped(Exception):
        pass

    def stop(call: int) -> float:
        if call == 200:
            raise Stopped
        return 1.0

    path = tmp_path / "partial.jsonl"
    with pytest.raises(Stopped):
        profile_backend(FakeBackend(clock := VirtualClock(), concave, disturb=stop), PLAN, partial_path=path, clock=clock)
    kept = path.read_bytes()
    backend = FakeBackend(VirtualClock(), concave)
    profile = profile_backend(backend, PLAN, partial_path=path, clock=backend.clock)
    assert path.read_bytes().startswith(kept) and any("earlier run" in note for note in profile.notes)
    whole, _ = run(concave)
    assert {cell.verify_tokens for cell in profile.verify} == {cell.verify_tokens for cell in whole.verify}
    again = FakeBackend(VirtualClock(), concave)
    profile_backend(again, PLAN, partial_path=path, clock=again.clock)
    assert len(again.calls) < 12  # a look for a drafter and a reference or two: everything was there


def test_batches_are_chosen_too():
    class Batched(FakeBackend):
        requests = 1

        def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
            super().prepare(context_tokens, num_requests)
            self.requests = num_requests
            self.curve = lambda t, c: 0.01 + 1e-4 * t + 1e-6 * c * num_requests + max(0.0, 2e-3 * (num_requests - 6))

    backend = Batched(VirtualClock())
    requests = tuple(range(1, 17))
    plan = AdaptivePlan(max_verify_tokens=64, max_context_tokens=512, num_requests=requests, samples=2, max_seconds=1e9)
    profile = profile_backend(backend, plan, clock=backend.clock)
    measured = {cell.num_requests for cell in profile.verify}
    assert {1, 16} < measured < set(range(1, 17))
    assert all(cell.verify_tokens % cell.num_requests == 0 for cell in profile.verify)
    cost = CostModel(profile)
    for requests in (3, 6, 9):
        backend.prepare(512, requests)
        assert cost.verify_seconds(48, 512, requests) == pytest.approx(backend.curve(48, 512), rel=0.06)


def test_impossible_ranges_are_usage_errors():
    for bad in ({"error": 0.0}, {"num_requests": ()}, {"num_requests": (65,)}, {"max_context_tokens": 0}):
        with pytest.raises(UsageError):
            AdaptivePlan(**bad)


def test_choices_do_not_depend_on_the_machine():
    first, second = run(concave)[0], run(concave)[0]
    assert first.verify == second.verify
    assert np.all(np.diff(sorted({cell.context_tokens for cell in first.verify})) > 0)


def test_gap_and_noise_are_stated_apart():
    """With 4 % noise the medians are not known within 3 %, and the notes must not read as if the curve were."""
    profile, _ = run(linear, noise=0.04)
    noise = next(note for note in profile.notes if note.startswith("noise: medians are known within"))
    gap = next(note for note in profile.notes if note.startswith("chose"))
    assert float(noise.split("within ")[1].split("%")[0]) > 0.5 and "the worst within" in noise
    assert "twice the noise" in gap or "beyond the noise" in gap


def test_drafts_are_timed_at_every_context_and_block_size():
    class Drafts(FakeBackend):
        draft_block_sizes = (4, 16)

        def draft(self, block_size: int = 0) -> int:
            super().draft()
            return block_size or self.block_size

    backend = Drafts(VirtualClock(), linear)
    profile = profile_backend(backend, PLAN, clock=backend.clock)
    drafts = {(cell.size, cell.context_tokens) for cell in profile.stages if cell.stage == "draft"}
    contexts = {cell.context_tokens for cell in profile.verify}
    assert len(contexts) >= 3 and drafts == {(size, context) for size in (4, 8, 16) for context in contexts}


@pytest.mark.parametrize("calls", range(20, 100, 8))
def test_stages_that_an_interruption_cut_off_are_measured_after_it(tmp_path, calls):
    """Wherever the first visits are cut, the next run measures what is missing of drafting, selecting and committing."""

    class Stopped(Exception):
        pass

    def stop(call: int) -> float:
        if call == calls:
            raise Stopped
        return 1.0

    plan = AdaptivePlan(max_verify_tokens=8, max_context_tokens=64, max_seconds=1e9, samples=2)
    path = tmp_path / "partial.jsonl"
    with pytest.raises(Stopped):
        profile_backend(FakeBackend(clock := VirtualClock(), linear, disturb=stop), plan, partial_path=path, clock=clock)
    backend = FakeBackend(VirtualClock(), linear)
    profile = profile_backend(backend, plan, partial_path=path, clock=backend.clock)
    whole, _ = run(linear, plan)
    assert [(cell.stage, cell.size, cell.context_tokens) for cell in profile.stages] == [
        (cell.stage, cell.size, cell.context_tokens) for cell in whole.stages
    ]


def test_a_wanted_error_below_one_percent_is_not_said_to_be_none():
    profile, _ = run(linear, AdaptivePlan(error=0.005, max_verify_tokens=8, max_context_tokens=64, max_seconds=1e9))
    assert any("wider than the wanted 0.5%" in note for note in profile.notes)
