"""What can go wrong in the decoder, by name."""

from __future__ import annotations

from profiles.errors import TreebudgetError, UsageError

__all__ = [
    "CheckFailedError",
    "ChecksumError",
    "ContextError",
    "DownloadError",
    "DrafterError",
    "LogitsError",
    "PromptError",
    "TargetError",
    "TargetMissingError",
    "TreebudgetError",
    "UsageError",
]


class TargetError(TreebudgetError):
    """The target model cannot be loaded, or is of a form this decoder does not support."""


class TargetMissingError(TargetError):
    """The default target has not been fetched on this machine yet."""


class DrafterError(TreebudgetError):
    """A drafter's configuration or weights cannot be used, or it was called out of step with the context."""


class LogitsError(TreebudgetError):
    """The target's logits contain NaN; nothing of that round was emitted."""


class ContextError(TreebudgetError):
    """The prompt and the tokens asked for do not fit into the target's context."""


class DownloadError(TreebudgetError):
    """A target could not be downloaded."""


class ChecksumError(DownloadError):
    """A downloaded file is not the file that was expected."""


class PromptError(UsageError):
    """A prompts file has a line that cannot be used."""


class CheckFailedError(TreebudgetError):
    """`decoder check` found a policy whose text differs from plain decoding."""
