"""What can go wrong when one round is explained."""

from __future__ import annotations

from profiles.errors import UsageError


class ExplainError(UsageError):
    """A text, a round or a tokenizer was asked for that is not there."""
