"""Errors of training."""

from __future__ import annotations

from profiles.errors import TreebudgetError


class TrainingError(TreebudgetError):
    """Training cannot start or go on with what it was given."""
