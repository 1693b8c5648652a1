"""Torch where it is needed and only then: training and scoring on an accelerator."""

from __future__ import annotations

import importlib
from typing import Any

from selector.errors import ScorerError


def import_torch(purpose: str) -> Any:
    """The module torch; raises ScorerError saying what it was wanted for and how to get it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ScorerError(
            f"{purpose} needs torch, which is not installed", hint="install treebudget[decoder]; scoring on a CPU needs no torch"
        ) from error
