"""Named errors of planning."""

from __future__ import annotations

from profiles.errors import TreebudgetError, UsageError


class ImpossibleAcceptance(UsageError):
    """No drafter can have been accepted like this: rising survival, more tokens than were drafted, shares above one."""


class AcceptanceMissing(UsageError):
    """Acceptance was not given; it is never assumed."""


class PageUnavailable(TreebudgetError):
    """The page needs plotly, which is not installed."""
