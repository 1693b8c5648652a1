"""From samples to a profile: medians, spread and flags per shape, drift of the reference point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from costmodel.cells import StageCell, VerifyCell
from costmodel.errors import MeasurementError
from costmodel.identity import Identity
from costmodel.partial import Sample
from costmodel.plan import Shape
from costmodel.profile import Profile, now_utc
from costmodel.statistics import DRIFT_RELATIVE, drifts, summarize


class Seeded(Protocol):
    """What is needed of a plan here."""

    @property
    def seed(self) -> int:
        """The seed of the order of samples."""


def build_profile(
    identity: Identity,
    plan: Seeded,
    samples: Sequence[Sample],
    notes: Iterable[str] = (),
    executable: Sequence[int] | None = None,
) -> Profile:
    """The profile of the samples of one run (or of several that resumed each other).

    `executable` lists the sizes the engine says it runs; None takes those seen, where it pads. A padded size is filed under
    the rows that were executed. Raises MeasurementError where nothing was timed.
    """
    groups: dict[Shape, list[Sample]] = {}
    for sample in samples:
        if sample.role == "grid":
            shape = sample.shape
            groups.setdefault(Shape(shape.stage, sample.executed, shape.context_tokens, shape.num_requests), []).append(sample)
    verify, stages = [], []
    for shape, group in sorted(groups.items()):
        summary = summarize([sample.seconds for sample in sorted(group, key=lambda sample: sample.round_index)])
        spread = (summary.seconds, summary.low_seconds, summary.high_seconds, summary.num_samples, summary.flags)
        if shape.stage == "verify":
            verify.append(VerifyCell(shape.size, shape.context_tokens, shape.num_requests, *spread))
        else:
            stages.append(StageCell(shape.stage, shape.size, shape.context_tokens, shape.num_requests, *spread))
    if not verify:
        raise MeasurementError("nothing was timed, so there is no profile")
    num_rounds = 1 + max(sample.round_index for sample in samples)
    if executable is None and identity.mode in ("captured", "padded"):
        executable = [cell.verify_tokens for cell in verify]
    return Profile(
        identity=identity,
        provenance="measured",
        source=f"costmodel profile, {num_rounds} interleaved rounds, warm-up dropped, seed {plan.seed}",
        created=now_utc(),
        verify=tuple(verify),
        stages=tuple(stages),
        notes=(*notes, *reference_notes(samples)),
        executable_verify_tokens=None if executable is None else tuple(sorted(set(executable))),
    )


def reference_notes(samples: Sequence[Sample]) -> list[str]:
    """What the reference point, measured at both ends of every round, says about the whole run."""
    values = np.array([sample.seconds for sample in samples if sample.role == "reference"])
    if values.size < 2:
        return []
    low, middle, high = np.percentile(values, [10, 50, 90])
    notes = [f"reference point: median {middle * 1e3:.2f} ms, p10 {low * 1e3:.2f}, p90 {high * 1e3:.2f}, {values.size} samples"]
    if drifts(values):
        notes.append(f"drift: the reference point changed by more than {DRIFT_RELATIVE:.0%} during the run; repeat when idle")
    return notes
