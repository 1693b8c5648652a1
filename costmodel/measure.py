"""Timing a backend honestly: interleaved rounds, warm-up dropped, a reference point to catch drift, everything kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from costmodel.adaptive import AdaptivePlan, AdaptiveSession, refusal
from costmodel.aggregate import build_profile
from costmodel.backend import Backend
from costmodel.errors import SizeNotExecutable, UsageError
from costmodel.partial import Sample, SampleLog
from costmodel.plan import MeasurePlan, Shape, declared_sizes
from costmodel.profile import Profile
from costmodel.timing import Clock, Timer

Progress = Callable[..., None]


def profile_backend(
    backend: Backend,
    plan: MeasurePlan | AdaptivePlan | None = None,
    *,
    partial_path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Time every shape of `plan` on `backend` and return the profile of medians; an AdaptivePlan chooses as it goes.

    Each round visits every place (context, batch) in random order and times every shape there once, in random order; the
    first pass of a process is warm-up and is dropped. With `partial_path` every sample is on disk before the next one
    and a later call with the same identity and grid goes on; the caller deletes that file when the profile is saved.
    `progress(steps, note)` is called once per timed call; `clock()` returns seconds. Raises RowsMismatch where the
    backend executes another number of rows, nodes or tokens than asked.
    """
    plan = plan or MeasurePlan()
    sizes = declared_sizes(backend)
    log = SampleLog(partial_path, plan.key(backend.identity) + ("" if sizes is None else f" of sizes {sizes}"))
    try:
        kind = AdaptiveSession if isinstance(plan, AdaptivePlan) else _Session
        session = kind(backend, plan, log, progress or _silent, clock)  # type: ignore[arg-type]
        session.run()
    finally:
        log.close()
    notes = [*session.notes, *getattr(backend, "notes", ())]
    return build_profile(backend.identity, plan, log.samples, notes, session.executable)


def num_steps(plan: MeasurePlan, num_block_sizes: int = 0) -> int:
    """How many times `progress` is called at most: one warm-up pass and `max_rounds` rounds, with a drafter.

    `num_block_sizes` counts the block sizes beside its own at which drafts are timed.
    """
    return sum(len(grid_shapes(plan, place)) + num_block_sizes for place in plan.places()) * (plan.max_rounds + 1)


def grid_shapes(plan: MeasurePlan, place: tuple[int, int], has_drafter: bool = True) -> list[Shape]:
    """The shapes of one place; of the sizes, those that the requests of the batch can share evenly.

    Raises UsageError where none is left.
    """
    shapes = plan.shapes(*place, has_drafter=has_drafter)
    kept = [shape for shape in shapes if shape.stage != "verify" or shape.size % shape.num_requests == 0]
    if not any(shape.stage == "verify" for shape in kept):
        hint = f"add multiples of {place[1]} to the sizes"
        raise UsageError(f"none of the sizes {list(plan.verify_tokens)} is a multiple of {place[1]} requests", hint=hint)
    return kept


def _silent(steps: float = 1, note: str = "") -> None:
    pass


class _Session:
    """One process's share of the work: the state that all rounds need."""

    def __init__(self, backend: Backend, plan: MeasurePlan, log: SampleLog, progress: Progress, clock: Clock) -> None:
        self.backend = backend
        self.plan = plan
        self.log = log
        self.progress = progress
        self.clock = clock
        self.timer = Timer(backend, clock)
        self.done = {(sample.round_index, sample.shape) for sample in log.samples if sample.role == "grid"}
        self.has_drafter = True
        self.notes: list[str] = []
        self.refused: set[tuple[int, int]] = set()  # size and requests
        self.executable = declared_sizes(backend)

    def run(self) -> None:
        """Warm up, then time rounds until the plan is met or its time is over."""
        started = self.clock()
        if self.log.num_resumed:
            self.notes.append(f"{self.log.num_resumed} samples are from an earlier run that was interrupted")
        first = self._first_open_round()
        if first is None:
            return
        self._warm_up()
        for index in range(first, self.plan.max_rounds):
            deadline = started + self.plan.max_seconds if index >= self.plan.min_rounds else float("inf")
            if not self._round(index, deadline):
                limit = f"{self.plan.max_seconds:g} s had passed"
                self.notes.append(f"stopped after {index} of {self.plan.max_rounds} rounds: {limit}")
                return

    def _first_open_round(self) -> int | None:
        """The first round with a shape not yet timed; None where an earlier run finished the plan."""
        if any(shape.stage == "verify" for _, shape in self.done) and not any(shape.stage == "draft" for _, shape in self.done):
            self.has_drafter = self._drafts(self.plan.places()[0])
        for index in range(self.plan.max_rounds):
            if any((index, shape) not in self.done for place in self.plan.places() for shape in self._shapes(place)):
                return index
        return None

    def _drafts(self, place: tuple[int, int]) -> bool:
        self.backend.prepare(*place)
        return self.backend.draft() > 0

    def _shapes(self, place: tuple[int, int]) -> list[Shape]:
        shapes = grid_shapes(self.plan, place, self.has_drafter)
        if self.has_drafter:
            shapes += [Shape("draft", size, *place) for size in getattr(self.backend, "draft_block_sizes", ())]
        kept = [shape for shape in shapes if shape.stage != "verify" or (shape.size, shape.num_requests) not in self.refused]
        return kept if any(shape.stage == "verify" for shape in kept) else []  # a place without forwards has no price

    def _try(self, shape: Shape) -> None:
        """Time once for nothing; a size that the runtime cannot execute is left out from here on."""
        try:
            self.timer.time(shape)
        except SizeNotExecutable:
            self.refused.add((shape.size, shape.num_requests))
            self.notes.append(refusal(shape))
            if self.executable is None:
                self.executable = [size for size in self.plan.verify_tokens]
            if all((shape.size, requests) in self.refused for requests in self.plan.num_requests if shape.size % requests == 0):
                self.executable = [size for size in self.executable if size != shape.size]

    def _warm_up(self) -> None:
        """Run every shape once and drop it; also learns whether there is a drafter."""
        for place in self.plan.places():
            self.has_drafter = self._drafts(place)
            for shape in list(self._shapes(place)):
                self._try(shape)
                self.progress(1, f"warm-up, context {place[0]}")

    def _round(self, index: int, deadline: float) -> bool:
        """Time every open shape once; False where the deadline cut the round short between two places."""
        random = np.random.default_rng([self.plan.seed, index])
        if self.clock() > deadline:
            return False
        self._reference(index)
        for place_index in random.permutation(len(self.plan.places())):
            place = self.plan.places()[int(place_index)]
            shapes = self._shapes(place)
            open_shapes = [shapes[int(i)] for i in random.permutation(len(shapes)) if (index, shapes[int(i)]) not in self.done]
            if not open_shapes:
                continue
            if self.clock() > deadline:
                return False
            self.backend.prepare(*place)
            first = next(shape for shape in shapes if shape.stage == "verify")
            self.timer.time(first)  # the first call after a new cache is not typical
            for shape in open_shapes:
                self._keep(index, "grid", shape)
                self.progress(1, f"round {index + 1} of {self.plan.max_rounds}, context {place[0]}")
        self._reference(index)
        return True

    def _reference_shape(self) -> Shape:
        """The smallest size at the first place that has one, measured again at both ends of every round, to catch drift.

        Raises SizeNotExecutable where the runtime refused every size.
        """
        for place in self.plan.places():
            sizes = [shape for shape in self._shapes(place) if shape.stage == "verify"]
            if sizes:
                return min(sizes)
        raise SizeNotExecutable(f"the runtime can execute none of the sizes asked for: {list(self.plan.verify_tokens)}",
                                hint="ask for others, or for none: then they are chosen among those it declares")

    def _reference(self, index: int) -> None:
        reference = self._reference_shape()
        self.backend.prepare(reference.context_tokens, reference.num_requests)
        self.timer.time(reference)
        self._keep(index, "reference", reference)

    def _keep(self, index: int, role: str, shape: Shape) -> None:
        executed, seconds = self.timer.time(shape)
        self.log.append(Sample(index, role, shape, executed, seconds))
