"""The root of every error this library raises on purpose."""

from __future__ import annotations


class TreebudgetError(Exception):
    """A failure the library foresaw; `hint` names the next step to take, or is None."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(TreebudgetError):
    """The caller asked for something that makes no sense (exit code 2 on the command line)."""


class FileFormatError(TreebudgetError):
    """A file is not what was expected of it: not JSON, another schema, or a version from the future."""
