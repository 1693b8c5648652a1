"""Engines that try to fool the profiler: each kind is detected and named. Issue: refuses to be fooled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel import CostModel, load_profile
from costmodel.adaptive import AdaptivePlan
from costmodel.errors import ConstantTokens, ModeMismatch, NoVerifyCalls, RowsMismatch, SizeNotExecutable
from costmodel.measure import profile_backend
from costmodel.plan import MeasurePlan
from tests.costmodel.fakes import IDENTITY, FakeBackend, VirtualClock

GRID = MeasurePlan(verify_tokens=(1, 2, 4, 8, 16), context_tokens=(1, 100), select_nodes=(8,), max_rounds=3, max_seconds=1e9)
ADAPTIVE = AdaptivePlan(max_verify_tokens=32, max_context_tokens=256, samples=2, max_seconds=1e9)
PLANS = pytest.mark.parametrize("plan", [GRID, ADAPTIVE], ids=["grid", "adaptive"])


def run(backend: FakeBackend, plan):
    return profile_backend(backend, plan, clock=backend.clock)


@PLANS
@pytest.mark.parametrize("rows", [lambda t: t + 1, lambda t: max(t - 1, 1) if t > 1 else 2, lambda t: 64])
def test_another_number_of_rows(plan, rows):
    with pytest.raises(RowsMismatch, match="executed"):
        run(FakeBackend(VirtualClock(), rows=rows), plan)


@PLANS
def test_zero_verify_calls_by_their_rows(plan):
    with pytest.raises(NoVerifyCalls, match="no target forward ran"):
        run(FakeBackend(VirtualClock(), lambda t, c: 0.001, rows=lambda t: 0), plan)


class Counting(FakeBackend):
    """Counts the target's forwards; a size seen before is answered from a cache of results."""

    num_target_forwards = 0
    caches = False

    def verify(self, num_verify_tokens: int) -> int:
        seen = ("verify", num_verify_tokens, self.context) in self.calls
        if not (self.caches and seen):
            self.num_target_forwards += 1
        return super().verify(num_verify_tokens)


@PLANS
def test_zero_verify_calls_by_the_engine_s_own_counter(plan):
    run(Counting(VirtualClock()), plan)
    cheat = Counting(VirtualClock())
    cheat.caches = True
    with pytest.raises(NoVerifyCalls):
        run(cheat, plan)


class TokenFake(FakeBackend):
    """Says which token ids it verified."""

    constant = True

    def verify(self, num_verify_tokens: int) -> int:
        ids = np.zeros(num_verify_tokens, int) if self.constant else np.arange(num_verify_tokens)
        self.verify_token_ids = ids
        return super().verify(num_verify_tokens)


@PLANS
def test_constant_token_ids_on_a_mixture_of_experts(plan):
    experts = replace(IDENTITY, model_shape={"layers": 2, "hidden": 8, "experts": 16})
    with pytest.raises(ConstantTokens, match="one token id"):
        run(TokenFake(VirtualClock(), identity=experts), plan)
    varied = TokenFake(VirtualClock(), identity=experts)
    varied.constant = False
    run(varied, plan)
    run(TokenFake(VirtualClock()), plan)  # a dense model costs the same whatever the ids


class Picky(FakeBackend):
    """Executes multiples of 4 and 1 only."""

    def verify(self, num_verify_tokens: int) -> int:
        if num_verify_tokens > 1 and num_verify_tokens % 4:
            raise SizeNotExecutable(f"{num_verify_tokens} was not captured")
        return super().verify(num_verify_tokens)


@PLANS
def test_sizes_that_cannot_be_executed_are_left_out_and_not_interpolated_across(plan):
    backend = Picky(VirtualClock(), lambda t, c: 0.01 + 0.001 * t)
    profile = run(backend, plan)
    assert all(cell.verify_tokens in (1, *range(4, 33, 4)) for cell in profile.verify)
    assert any("cannot execute 2 verify tokens" in note for note in profile.notes)
    cost = CostModel(profile)
    assert profile.executable_verify_tokens and 2 not in profile.executable_verify_tokens
    assert cost.verify_seconds([2, 3, 4], 1).tolist() == [cost.verify_seconds(4, 1)] * 3


@PLANS
def test_a_size_refused_for_one_batch_is_still_measured_for_another(plan):
    """Graphs of a batch of 4 only from 8 on; of one request all sizes."""

    class Uneven(FakeBackend):
        requests = 1

        def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
            super().prepare(context_tokens, num_requests)
            self.requests = num_requests

        def verify(self, num_verify_tokens: int) -> int:
            if self.requests == 4 and num_verify_tokens < 8:
                raise SizeNotExecutable("too small")
            return super().verify(num_verify_tokens)

    profile = run(Uneven(VirtualClock()), replace(plan, num_requests=(4, 1)))
    sizes = {requests: {cell.verify_tokens for cell in profile.verify if cell.num_requests == requests} for requests in (1, 4)}
    assert {1, 4, 8} <= sizes[1] and 4 not in sizes[4] and {8, 16} <= sizes[4]
    assert any("cannot execute 4 verify tokens for 4 requests" in note for note in profile.notes)


class Captured(FakeBackend):
    """Captured graphs of sizes it declares; pads to the next."""

    executable_verify_tokens = (1, 2, 4, 8, 16, 24, 32)

    def __init__(self, clock: VirtualClock) -> None:
        sizes = self.executable_verify_tokens
        super().__init__(
            clock, lambda t, c: 0.01 + 0.001 * t, identity=replace(IDENTITY, mode="captured"),
            rows=lambda t: next(size for size in sizes if size >= t),
        )  # fmt: skip


def test_a_captured_engine_is_measured_at_its_sizes_and_steps_between():
    profile = run(Captured(VirtualClock()), ADAPTIVE)
    assert profile.executable_verify_tokens == Captured.executable_verify_tokens
    assert {cell.verify_tokens for cell in profile.verify} <= set(Captured.executable_verify_tokens)
    cost = CostModel(profile)
    assert cost.verify_seconds([9, 16, 17, 23, 24], 1).tolist() == pytest.approx([0.026, 0.026, 0.034, 0.034, 0.034])


def test_a_captured_engine_that_does_not_say_its_sizes_is_probed():
    class Silent(Captured):
        def __getattribute__(self, name):
            if name == "executable_verify_tokens":
                raise AttributeError(name)
            return super().__getattribute__(name)

    sizes = Captured.executable_verify_tokens
    backend = FakeBackend(
        VirtualClock(), lambda t, c: 0.01 + 0.001 * t, identity=replace(IDENTITY, mode="captured"),
        rows=lambda t: next(size for size in sizes if size >= t),
    )  # fmt: skip
    profile = run(backend, ADAPTIVE)
    assert profile.executable_verify_tokens == sizes


def test_an_eager_profile_for_a_captured_runtime(tmp_path):
    path = run(FakeBackend(VirtualClock()), GRID).save(tmp_path / "eager.json")
    with pytest.raises(ModeMismatch, match="mode is 'eager'") as caught:
        load_profile(path, expect=Captured(VirtualClock()).identity)
    assert caught.value.field == "mode" and "measure again" in str(caught.value.hint)


@PLANS
def test_bimodal_samples_are_flagged(plan):
    flips = np.random.default_rng(5)
    backend = FakeBackend(VirtualClock(), lambda t, c: 0.010, disturb=lambda call: 1.0 + 0.4 * flips.integers(2))
    more = replace(plan, max_rounds=40) if isinstance(plan, MeasurePlan) else replace(plan, samples=40, max_samples=40)
    cells = run(backend, more).verify
    assert sum("bimodal" in cell.flags for cell in cells) > 0.8 * len(cells)
    assert all(min(abs(cell.seconds - 0.010), abs(cell.seconds - 0.014)) < 1e-9 for cell in cells)
    assert len(CostModel(run(FakeBackend(VirtualClock()), plan)).diagnostics.suspect_cells) == 0


@PLANS
def test_thermal_drift_is_named(plan):
    more = replace(plan, max_rounds=12) if isinstance(plan, MeasurePlan) else replace(plan, samples=12)
    backend = FakeBackend(VirtualClock(), noise=0.01, disturb=lambda call: 1 + 0.5 * call / 400)
    profile = run(backend, more)
    assert any(note.startswith("drift") for note in profile.notes)


@PLANS
def test_an_engine_that_runs_none_of_the_sizes_is_named(plan):
    class Nothing(FakeBackend):
        def verify(self, num_verify_tokens: int) -> int:
            raise SizeNotExecutable("nothing was captured")

    with pytest.raises(SizeNotExecutable, match="none of the sizes|nothing was captured"):
        run(Nothing(VirtualClock()), plan)


def test_a_batch_without_any_executable_size_is_left_out():
    class Single(FakeBackend):
        requests = 1

        def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
            super().prepare(context_tokens, num_requests)
            self.requests = num_requests

        def verify(self, num_verify_tokens: int) -> int:
            if self.requests > 1:
                raise SizeNotExecutable("graphs of one request only")
            return super().verify(num_verify_tokens)

    profile = run(Single(VirtualClock()), replace(GRID, num_requests=(4, 1)))
    assert {cell.num_requests for cell in (*profile.verify, *profile.stages)} == {1}
    assert any("cannot execute 16 verify tokens for 4 requests" in note for note in profile.notes)
