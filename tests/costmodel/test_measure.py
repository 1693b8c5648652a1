from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from costmodel import CostModel
from costmodel.errors import MeasurementError, RowsMismatch, UsageError
from costmodel.measure import num_steps, profile_backend
from costmodel.plan import MeasurePlan, Shape
from tests.costmodel.fakes import IDENTITY, FakeBackend, VirtualClock

PLAN = MeasurePlan(
    verify_tokens=(1, 2, 4, 8), context_tokens=(1, 100), select_nodes=(8,), commit_tokens=(1,), max_rounds=5, max_seconds=1e9
)


def run(backend: FakeBackend, plan: MeasurePlan = PLAN, **options):
    return profile_backend(backend, plan, clock=backend.clock, **options)


def test_medians_are_what_the_engine_costs_and_preparing_is_not_timed():
    backend = FakeBackend(VirtualClock())
    profile = run(backend)
    assert len(profile.verify) == 8 and all(cell.num_samples == 5 for cell in profile.verify)
    for cell in profile.verify:
        assert cell.seconds == pytest.approx(backend.curve(cell.verify_tokens, cell.context_tokens))
        assert not cell.flags
    stages = {(cell.stage, cell.size): cell.seconds for cell in profile.stages}
    assert stages == pytest.approx({("draft", 8): 0.003, ("select", 8): 0.0001, ("commit", 1): 0.0002})
    assert profile.provenance == "measured" and profile.identity == IDENTITY
    assert CostModel(profile).plain_seconds(1) == pytest.approx(backend.curve(1, 1) + 0.0002)


def test_every_round_times_every_shape_once_in_its_own_order(tmp_path):
    backend = FakeBackend(VirtualClock())
    path = tmp_path / "partial.jsonl"
    run(backend, partial_path=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    grid = [line for line in lines if line["role"] == "grid"]
    counts = Counter((line["round"], line["stage"], line["size"], line["context_tokens"]) for line in grid)
    assert set(counts.values()) == {1} and len(counts) == 5 * 14
    orders = {
        tuple((line["stage"], line["size"], line["context_tokens"]) for line in grid if line["round"] == r) for r in range(5)
    }
    assert len(orders) == 5
    references = Counter(line["round"] for line in lines if line["role"] == "reference")
    assert set(references.values()) == {2}


def test_the_reference_point_tells_of_drift():
    clock = VirtualClock()
    steady = run(FakeBackend(clock, noise=0.01), replace(PLAN, max_rounds=12))
    assert any(note.startswith("reference point") for note in steady.notes)
    assert not any("drift" in note for note in steady.notes)
    clock = VirtualClock()
    slowing = FakeBackend(clock, noise=0.01, disturb=lambda call: 1 + 0.5 * call / 250)
    drifted = run(slowing, replace(PLAN, max_rounds=12))
    assert any(note.startswith("drift") for note in drifted.notes)
    assert sum("drift" in cell.flags for cell in drifted.verify) >= 6


def test_a_backend_without_drafter_is_timed_without_draft_and_select():
    profile = run(FakeBackend(VirtualClock(), block_size=0))
    assert {cell.stage for cell in profile.stages} == {"commit"}
    assert CostModel(profile).draft_seconds() == 0.0


@pytest.mark.parametrize("rows", [lambda t: t + 1, lambda t: t - 1, lambda t: 8])
def test_another_number_of_rows_is_an_error(rows):
    with pytest.raises(RowsMismatch, match="verify was asked for .* rows at context 1 and executed"):
        run(FakeBackend(VirtualClock(), rows=rows))


def test_a_padding_engine_is_filed_under_what_it_executed():
    backend = FakeBackend(VirtualClock(), rows=lambda t: -(-t // 4) * 4, identity=replace(IDENTITY, mode="padded"))
    profile = run(backend)
    assert profile.executable_verify_tokens == (4, 8)
    assert {cell.verify_tokens: cell.num_samples for cell in profile.verify} == {4: 15, 8: 5}
    assert CostModel(profile).verify_seconds([1, 4, 5], 1).tolist() == pytest.approx(
        [backend.curve(4, 1)] * 2 + [backend.curve(8, 1)]
    )
    with pytest.raises(RowsMismatch):
        run(FakeBackend(VirtualClock(), rows=lambda t: max(t - 1, 1), identity=replace(IDENTITY, mode="padded")))


def test_time_is_limited_but_never_below_the_least_rounds():
    backend = FakeBackend(VirtualClock())
    short = run(backend, replace(PLAN, max_rounds=50, min_rounds=2, max_seconds=0.0))
    assert {cell.num_samples for cell in short.verify} == {2}
    late = run(FakeBackend(VirtualClock()), replace(PLAN, max_rounds=50, max_seconds=10.5))
    assert {cell.num_samples for cell in late.verify} == {4, 5}  # cut between two contexts
    assert any("stopped after 2 of 50 rounds" in note for note in short.notes)
    timed = run(FakeBackend(VirtualClock()), replace(PLAN, max_rounds=50, max_seconds=30.0))
    assert 3 < timed.verify[0].num_samples < 50


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    class Stopped(Exception):
        pass

    def stop(call: int) -> float:
        if call == 70:
            raise Stopped
        return 1.0

    path = tmp_path / "partial.jsonl"
    with pytest.raises(Stopped):
        run(FakeBackend(VirtualClock(), disturb=stop), partial_path=path)
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"round": 2, "role": "gr')  # what a kill leaves of the line in flight
    backend = FakeBackend(VirtualClock())
    profile = run(backend, partial_path=path)
    assert path.read_bytes().startswith(kept) and b'"gr{' not in path.read_bytes()
    assert all(cell.num_samples == 5 for cell in profile.verify)
    assert any("earlier run" in note for note in profile.notes)
    fresh = FakeBackend(VirtualClock())
    run(fresh)
    assert len(backend.calls) < len(fresh.calls)
    done = FakeBackend(VirtualClock())
    run(done, partial_path=path)
    assert not done.calls  # all of it was there


@pytest.mark.parametrize("change", [
    {"round": "x"}, {"round": -5}, {"executed": "3"}, {"executed": None}, {"stage": "zzz"}, {"size": "a"},
    {"seconds": float("nan")}, {"seconds": -1.0}, {"seconds": 0.0}, {"round": 10**9}, {"role": 5},
])  # fmt: skip
def test_a_line_that_no_run_wrote_ends_what_is_taken_over(tmp_path, change):
    path = tmp_path / "partial.jsonl"
    run(FakeBackend(VirtualClock()), partial_path=path)
    lines = path.read_text().splitlines()
    odd = json.loads(lines[20]) | change
    path.write_text("\n".join([*lines[:20], json.dumps(odd), *lines[21:]]) + "\n")
    backend = FakeBackend(VirtualClock())
    profile = run(backend, partial_path=path)
    assert all(cell.num_samples == 5 for cell in profile.verify) and backend.calls


def test_another_identity_grid_or_file_starts_anew(tmp_path):
    path = tmp_path / "partial.jsonl"
    run(FakeBackend(VirtualClock()), partial_path=path)
    other = FakeBackend(VirtualClock(), identity=replace(IDENTITY, dtype="bfloat16"))
    run(other, partial_path=path)
    assert other.calls
    grid = FakeBackend(VirtualClock())
    profile = run(grid, replace(PLAN, verify_tokens=(1, 2)), partial_path=path)
    assert len(profile.verify) == 4
    path.write_bytes(b"\x80\x04 no JSON at all")
    rubbish = FakeBackend(VirtualClock())
    run(rubbish, partial_path=path)
    assert rubbish.calls and path.read_bytes().startswith(b'{"schema"')
    more = FakeBackend(VirtualClock())
    longer = run(more, replace(PLAN, max_rounds=7), partial_path=path)  # more rounds of the same grid go on
    assert all(cell.num_samples == 7 for cell in longer.verify)


KILLED = """
import os, signal, sys
from costmodel.measure import profile_backend
from costmodel.plan import MeasurePlan
from tests.costmodel.fakes import FakeBackend, VirtualClock

def kill(call):
    if call == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

clock = VirtualClock()
plan = MeasurePlan(verify_tokens=(1, 2, 4, 8), context_tokens=(1, 100), select_nodes=(8,), commit_tokens=(1,), max_rounds=5)
profile_backend(FakeBackend(clock, disturb=kill), plan, partial_path=sys.argv[1], clock=clock)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_kill_9_loses_only_the_point_in_flight(tmp_path):
    path = tmp_path / "partial.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    code = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, check=False).returncode
    assert code == -signal.SIGKILL
    samples = len(path.read_text().splitlines()) - 1
    assert samples > 20
    backend = FakeBackend(VirtualClock())
    run(backend, partial_path=path)
    assert len(path.read_text().splitlines()) - 1 == 5 * 14 + 5 * 2 + 1  # one reference more: the broken round began twice


def test_progress_counts_calls_and_the_plan_says_how_many():
    seen = []
    run(FakeBackend(VirtualClock()), progress=lambda steps=1, note="": seen.append(note))
    assert len(seen) == num_steps(PLAN) == 14 * 6
    assert seen[0].startswith("warm-up") and seen[-1].startswith("round 5 of 5")


def test_a_clock_that_stands_still_is_an_error():
    with pytest.raises(MeasurementError, match="clock"):
        profile_backend(FakeBackend(VirtualClock(), lambda t, c: 0.0), PLAN, clock=lambda: 0.0)


def test_impossible_plans_are_usage_errors():
    for change in ({"verify_tokens": ()}, {"verify_tokens": (0, 1)}, {"context_tokens": (5, 5)}, {"max_rounds": 2}):
        with pytest.raises(UsageError):
            replace(PLAN, **change)


def test_a_batch_verifies_at_least_one_token_per_request():
    plan = replace(PLAN, num_requests=(1, 4))
    assert Shape("verify", 2, 1, 4) not in plan.shapes(1, 4) and Shape("verify", 4, 1, 4) in plan.shapes(1, 4)
    assert len(plan.places()) == 4
    profile = run(FakeBackend(VirtualClock()), plan)
    assert np.isfinite(CostModel(profile).verify_seconds(8, 50, 2))


def test_only_sizes_that_the_batch_shares_evenly_are_asked_for():
    backend = FakeBackend(VirtualClock())
    plan = replace(PLAN, verify_tokens=(1, 2, 3, 4, 6, 8), num_requests=(4, 3))
    profile = run(backend, plan)
    assert {(cell.verify_tokens, cell.num_requests) for cell in profile.verify} == {(4, 4), (8, 4), (3, 3), (6, 3)}
    with pytest.raises(UsageError, match="none of the sizes .* is a multiple of 5 requests"):
        run(FakeBackend(VirtualClock()), replace(PLAN, num_requests=(5,)))


def test_getting_ready_is_not_timed_and_block_sizes_and_notes_are_kept():
    class Engine(FakeBackend):
        draft_block_sizes = (4, 16)
        notes = ("drafted on the moon",)
        ready: tuple[str, int] | None = None

        def make_ready(self, stage: str, size: int) -> None:
            self.pending += 7.0  # as capturing a graph would cost
            self.ready = (stage, size)

        def verify(self, num_verify_tokens: int) -> int:
            assert self.ready == ("verify", num_verify_tokens)
            return super().verify(num_verify_tokens)

        def draft(self, block_size: int = 0) -> int:
            self._spend("draft", block_size, 1e-4 * (block_size or self.block_size))
            return block_size or self.block_size

    profile = run(Engine(VirtualClock()))
    assert max(cell.seconds for cell in profile.verify) < 1
    drafts = {(cell.size, cell.context_tokens): cell.seconds for cell in profile.stages if cell.stage == "draft"}
    assert drafts == pytest.approx({(size, context): 1e-4 * size for size in (4, 8, 16) for context in (1, 100)})
    assert "drafted on the moon" in profile.notes
    assert CostModel(profile).draft_seconds(1) == pytest.approx(8e-4)  # a round's draft has the drafter's own block size


def test_a_drafter_that_drafts_another_block_is_an_error():
    class Stubborn(FakeBackend):
        draft_block_sizes = (4,)

        def draft(self, block_size: int = 0) -> int:
            return super().draft()

    with pytest.raises(RowsMismatch, match="draft was asked for 4 block size"):
        run(Stubborn(VirtualClock()))


def test_other_captured_sizes_start_anew(tmp_path):
    path = tmp_path / "partial.jsonl"
    for sizes in ((1, 2, 4, 8), (1, 8)):
        backend = FakeBackend(VirtualClock(), identity=replace(IDENTITY, mode="captured"))
        backend.executable_verify_tokens = sizes  # type: ignore[attr-defined]
        run(backend, partial_path=path)
        assert backend.calls
