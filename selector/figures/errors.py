"""What can go wrong when a picture is drawn."""

from __future__ import annotations

from profiles.errors import UsageError


class FigureError(UsageError):
    """A picture was asked for in a format that cannot be drawn."""
