"""Named errors of the selector; all derive from TreebudgetError."""

from __future__ import annotations

from profiles.errors import TreebudgetError, UsageError


class TrellisError(TreebudgetError):
    """The drafter's proposals have a wrong shape, or probabilities that are none."""


class PoolError(TreebudgetError):
    """A pool of candidate nodes is no tree: a cycle, a forward parent, duplicate siblings or bad probabilities."""


class CostCurveError(TreebudgetError):
    """A cost curve is empty, has another length than needed, or holds values that are no positive seconds."""


class PolicyError(UsageError):
    """A policy name that is not in the registry, or whose argument is no positive number."""


class TraceError(TreebudgetError):
    """A trace file cannot be read, or what is in it contradicts itself."""


class TraceMismatch(TreebudgetError):
    """A trace describes another target, drafter or block size than asked; `field` names which."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        super().__init__(
            f"trace does not fit: {field} is {found!r} in the trace, expected {expected!r}",
            hint=f"record a trace with the {field} you run, or pass the trace that was recorded with it",
        )
        self.field, self.expected, self.found = field, expected, found


class PlanError(TreebudgetError):
    """A plan file cannot be read, or was made for something else; `field` names what, where one is to blame."""

    def __init__(self, message: str, hint: str | None = None, field: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class TuneError(TreebudgetError):
    """A trace cannot be tuned on: too few texts, or prompts that the drafter was trained on."""


class ScorerError(TreebudgetError):
    """A scorer cannot be trained, read or used here; `field` names what differs, where one thing is to blame."""

    def __init__(self, message: str, hint: str | None = None, field: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field
