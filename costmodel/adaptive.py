"""Choosing where to measure as it goes: always the widest gap next, until the wanted error or the time is reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from costmodel.backend import Backend
from costmodel.choose import Points, choose, open_sizes
from costmodel.errors import SizeNotExecutable, UsageError
from costmodel.gaps import Gap, find_breaks
from costmodel.identity import Identity
from costmodel.partial import Sample, SampleLog
from costmodel.plan import Shape, declared_sizes
from costmodel.timing import Clock, Timer

Place = tuple[int, int]  # context, requests


@dataclass(frozen=True)
class AdaptivePlan:
    """How far, how precise and how long to measure.

    Measuring ends when every gap is known within `error` and every median within half of it, or after `max_seconds`, but
    never before the first points have `min_samples`. `num_requests` lists the batches that may be measured; the
    smallest and the largest are, those between where a gap asks for it.
    """

    error: float = 0.03
    max_verify_tokens: int = 64
    max_context_tokens: int = 512
    min_context_tokens: int = 1
    num_requests: tuple[int, ...] = (1,)
    allowed_contexts: tuple[int, ...] | None = None
    samples: int = 4
    min_samples: int = 2
    max_samples: int = 12
    max_seconds: float = 100.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.error < 1:
            raise UsageError(f"error must lie between 0 and 1, got {self.error}")
        if not 1 <= max(self.num_requests, default=0) <= self.max_verify_tokens or min(self.num_requests) < 1:
            raise UsageError(f"requests must lie between 1 and {self.max_verify_tokens}, got {list(self.num_requests)}")
        if not 0 <= self.min_context_tokens <= self.max_context_tokens:
            raise UsageError(f"contexts must rise from at least 0, got {self.min_context_tokens} to {self.max_context_tokens}")

    def first_sizes(self, num_requests: int) -> list[int]:
        """Powers of two and the numbers halfway between them (times the requests), and the largest size."""
        top = self.max_verify_tokens // num_requests
        wished = {step << power for power in range(top.bit_length()) for step in (1, 3)} | {top}
        return sorted(num_requests * size for size in wished if size <= top)

    def first_contexts(self) -> list[int]:
        """The smallest, the largest and the one halfway."""
        middle = 16 * round((self.min_context_tokens + self.max_context_tokens) / 32)
        if self.allowed_contexts is not None:
            middle = min(self.allowed_contexts, key=lambda context: abs(context - middle))
        middle = min(max(middle, self.min_context_tokens), self.max_context_tokens)
        return sorted({self.min_context_tokens, middle, self.max_context_tokens})

    def key(self, identity: Identity) -> str:
        """A digest of the identity and the range: samples of another one are never mixed in."""
        free = ("error", "max_seconds", "samples", "min_samples", "max_samples")
        document = {"identity": identity.to_dict(), "range": {k: v for k, v in asdict(self).items() if k not in free}}
        return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def refusal(shape: Shape) -> str:
    """The note on a size that the runtime cannot execute."""
    batch = "" if shape.num_requests == 1 else f" for {shape.num_requests} requests"
    return f"the runtime cannot execute {shape.size} verify tokens{batch}; nothing is interpolated across it"


class AdaptiveSession:
    """One process's share of an adaptive run; everything it knows is in the log, so that a later process goes on."""

    def __init__(self, backend: Backend, plan: AdaptivePlan, log: SampleLog, progress: Callable[..., None], clock: Clock) -> None:
        self.backend, self.plan, self.log, self.progress, self.clock = backend, plan, log, progress, clock
        self.timer = Timer(backend, clock)
        self.declared = declared_sizes(backend)
        self.refused: set[tuple[int, int]] = set()  # size and requests
        self.warm: set[Shape] = set()
        self.notes: list[str] = []
        self.points = Points(log.samples)
        self.has_drafter = False
        self.widest = float("inf")
        self.deadline = self.reported = 0.0
        self.random = np.random.default_rng([plan.seed, len(log.samples)])
        self.round = 1 + max((sample.round_index for sample in log.samples), default=-1)

    @property
    def executable(self) -> list[int] | None:
        """The sizes the runtime can execute: declared, or those measured where some were refused; None where all."""
        if self.declared is not None or not self.refused:
            return self.declared
        return sorted({shape.size for shape in self.points.shapes("verify")})

    @property
    def _wanted(self) -> str:
        return f"{100 * self.plan.error:.3g}%"

    @property
    def stepped(self) -> bool:
        """Whether nothing may be interpolated between measured sizes, because the engine does not say which it runs."""
        pads = self.backend.identity.mode in ("captured", "padded")
        return self.declared is None and (pads or bool(self.refused))

    def run(self) -> None:
        """Measure until the plan is met or its time is over."""
        self.reported = self.clock()
        self.deadline = self.reported + self.plan.max_seconds
        if self.log.num_resumed:
            self.notes.append(f"{self.log.num_resumed} samples are from an earlier run that was interrupted")
        self.backend.prepare(*self._reference()[2:])
        self.has_drafter = self.backend.draft() > 0
        first = self._first_shapes()
        self._fill(first, self.plan.min_samples, float("inf"))
        while self._fill(self._with_stages([*first, *self.points.shapes()]), self.plan.samples, self.deadline):
            gaps = self._choose()
            wanted = [shape for _, shapes in gaps for shape in self._with_stages(shapes)]
            if not (self._fill(wanted, self.plan.samples, self.deadline) if wanted else self._sharpen()):
                break
        self._report()

    def _sizes(self, num_requests: int) -> list[int]:
        refused = {size for size, requests in self.refused if requests == num_requests}
        return open_sizes(self.plan.max_verify_tokens, num_requests, self.declared, refused, self.points.padded(num_requests))

    def _reference(self) -> Shape:
        requests = min(self.plan.num_requests)
        return Shape("verify", self._first_sizes(requests)[0], self.plan.min_context_tokens, requests)

    def _first_sizes(self, num_requests: int) -> list[int]:
        sizes = self.plan.first_sizes(num_requests)
        if self.declared is None:
            return sizes
        runnable = [size for size in self.declared if num_requests <= size <= self.plan.max_verify_tokens]
        if not runnable:
            hint = "raise --max-verify-tokens"
            raise UsageError(f"the engine executes {self.declared} verify tokens, none of them in range", hint=hint)
        return sorted({min(runnable, key=lambda size: (abs(size - wish), size)) for wish in sizes})

    def _first_shapes(self) -> list[Shape]:
        places = [(context, requests) for requests in self._first_requests() for context in self.plan.first_contexts()]
        shapes = [Shape("verify", size, *place) for place in places for size in self._first_sizes(place[1])]
        return self._with_stages(shapes)

    def _first_requests(self) -> list[int]:
        return sorted({min(self.plan.num_requests), max(self.plan.num_requests)})

    def _with_stages(self, shapes: Iterable[Shape]) -> list[Shape]:
        """The shapes, and drafting, selecting and committing at their places (what is measured already is not again)."""
        result = list(dict.fromkeys(shapes))
        for place in dict.fromkeys(shape[2:] for shape in result):
            result += [Shape("commit", size, *place) for size in (1, 4, 8)]
            if self.has_drafter:
                nodes = [size for size in (1, 8, 32, 64, 256, 512) if size <= max(self.plan.max_verify_tokens, 8)]
                blocks = [0, *getattr(self.backend, "draft_block_sizes", ())]  # 0: the drafter's own
                result += [Shape("draft", size, *place) for size in blocks]
                result += [Shape("select", size, *place) for size in nodes]
        return list(dict.fromkeys(result))

    def _fill(self, shapes: Iterable[Shape], samples: int, deadline: float) -> bool:
        """Bring every shape to that many samples, two a visit in visits that go round; False where time ran out."""
        wanted = list(dict.fromkeys(shapes))
        while True:
            short = [shape for shape in wanted if self.points.count(shape) < samples and not self._is_refused(shape)]
            if not short:
                return True
            if not self._round(short, samples, deadline):
                return False

    def _is_refused(self, shape: Shape) -> bool:
        return shape.stage == "verify" and (shape.size, shape.num_requests) in self.refused

    def _round(self, shapes: list[Shape], samples: int, deadline: float) -> bool:
        """Visit every place once, in random order, with the reference point first and last."""
        places = list(dict.fromkeys((shape.context_tokens, shape.num_requests) for shape in shapes))
        self._visit_reference()
        for index in self.random.permutation(len(places)):
            if self.clock() > deadline:
                return False
            here = [shape for shape in shapes if shape[2:] == places[index]]
            self._visit(places[index], here, samples)
        self._visit_reference()
        self.round += 1
        return True

    def _visit(self, place: Place, shapes: list[Shape], samples: int) -> None:
        self.backend.prepare(*place)
        runnable = [shape for shape in shapes if self._warm_up(shape)]
        for _ in range(2):
            open_shapes = [shape for shape in runnable if self.points.count(shape) < samples]
            for index in self.random.permutation(len(open_shapes)):
                self._keep("grid", open_shapes[int(index)])

    def _warm_up(self, shape: Shape) -> bool:
        """Run a shape once for nothing, the first time in this process; False where the runtime cannot execute it."""
        if shape in self.warm:
            return True
        try:
            self.timer.time(shape)
        except SizeNotExecutable:
            self.refused.add((shape.size, shape.num_requests))
            self.notes.append(refusal(shape))
            return False
        self.warm.add(shape)
        return True

    def _visit_reference(self) -> None:
        reference = self._reference()
        self.backend.prepare(*reference[2:])
        self.timer.time(reference)
        self._keep("reference", reference)

    def _keep(self, role: str, shape: Shape) -> None:
        executed, seconds = self.timer.time(shape)
        self.log.append(Sample(self.round, role, shape, executed, seconds))
        self.points.add(self.log.samples[-1])
        now = self.clock()
        known = "" if self.widest == float("inf") else f", widest gap {self.widest:.1%} of {self._wanted} wanted"
        left = max(self.deadline - now, 0.0)
        self.progress(now - self.reported, f"{len(self.points.shapes())} points{known}, at most {left:.0f} s left")
        self.reported = now

    def _choose(self) -> list[tuple[Gap, list[Shape]]]:
        gaps = choose(self.points, self._sizes, self.plan, self.stepped)
        self.widest = max((gap.relative for gap, _ in gaps), default=0.0)
        return gaps

    def _sharpen(self) -> bool:
        """Two samples more of every point not yet known within half the wanted error; False where there is none or no time.

        Noise hides gaps, so those are looked for again after every pass.
        """
        vague = [
            shape
            for shape in self.points.shapes("verify")
            if self.points.count(shape) < self.plan.max_samples and self.points.relative_error(shape) > self.plan.error / 2
        ]
        return bool(vague) and self._fill(vague, 2 + min(map(self.points.count, vague)), self.deadline)

    def _report(self) -> None:
        """Notes on what was reached, and on breaks of convexity."""
        self._choose()
        num = len(self.points.shapes("verify"))
        noise = np.array([self.points.relative_error(shape) for shape in self.points.shapes("verify")])
        self.notes.append(
            f"noise: medians are known within {np.median(noise):.1%} (median standard error), the worst within {noise.max():.1%}"
        )
        wanted = f"wanted {self._wanted}"
        if self.widest > self.plan.error:
            what = f"stopped after {self.plan.max_seconds:g} s, the widest gap is {self.widest:.1%} beyond the noise, {wanted}"
        else:
            what = f"beyond twice the noise, no gap between points is wider than the {wanted}"
        self.notes.append(f"chose {num} verify points adaptively; {what}")
        for (context, requests), (sizes, seconds, errors) in sorted(self.points.rows().items()):
            for index in np.flatnonzero(find_breaks(sizes, seconds, errors)):
                self.notes.append(
                    f"not convex at context {context}, {requests} requests: {sizes[index]:.0f} verify tokens lie above the chord "
                    f"from {sizes[index - 1]:.0f} to {sizes[index + 1]:.0f}"
                )
