"""Named errors of the cost model; all derive from TreebudgetError."""

from __future__ import annotations

from profiles.errors import FileFormatError, TreebudgetError, UsageError

__all__ = [
    "BackendNotFound",
    "ConstantTokens",
    "FileFormatError",
    "FitError",
    "IdentityMismatch",
    "MeasurementError",
    "ModeMismatch",
    "NoVerifyCalls",
    "NotMeasured",
    "OpsNotInstalled",
    "ProfileError",
    "RequestsNotMeasured",
    "RowsMismatch",
    "SizeNotExecutable",
    "TreebudgetError",
    "UsageError",
]


class ProfileError(TreebudgetError):
    """A profile cannot be found, or what is in it contradicts itself."""


class IdentityMismatch(TreebudgetError):
    """What was measured is not what is being run; `field`, `expected` and `found` say where they part."""

    def __init__(self, field: str, expected: object, found: object, what: str = "profile") -> None:
        super().__init__(
            f"{what} does not describe what is being run: {field} is {found!r} in the {what}, expected {expected!r}",
            hint=f"measure again with the {field} you run, or name a {what} that was measured with it",
        )
        self.field = field
        self.expected = expected
        self.found = found


class ModeMismatch(IdentityMismatch):
    """A profile of one engine mode (eager, captured, padded) was offered for another; their costs differ by factors."""


class FitError(TreebudgetError):
    """No cost curve can be fitted to these points."""


class RequestsNotMeasured(TreebudgetError):
    """A cost was asked for more (or fewer) requests in the batch than were ever measured."""


class MeasurementError(TreebudgetError):
    """A backend could not be timed."""


class RowsMismatch(MeasurementError):
    """A backend executed another number of rows, nodes or tokens than it was asked for."""


class NoVerifyCalls(RowsMismatch):
    """A backend was asked to verify and the target ran no forward at all."""


class ConstantTokens(MeasurementError):
    """A mixture of experts was timed on one repeated token id, which wakes only that token's experts."""


class SizeNotExecutable(MeasurementError):
    """Raised by a backend for a size that its runtime cannot execute; the profiler then leaves that size out."""


class NotMeasured(TreebudgetError):
    """A measurement was required, and there is only something composed, published or estimated."""


class OpsNotInstalled(TreebudgetError):
    """The operator tables (the extra `ops`) are not installed."""


class BackendNotFound(TreebudgetError):
    """No backend of that name is installed."""
