"""Measure, store and fit what a target model's verification costs. Knows nothing of tokens or trees."""

from __future__ import annotations

from costmodel.cells import StageCell, VerifyCell
from costmodel.identity import Identity
from costmodel.loading import load_profile
from costmodel.model import CostModel, fit_cost
from costmodel.profile import Profile

__all__ = ["CostModel", "Identity", "Profile", "StageCell", "VerifyCell", "fit_cost", "load_profile"]
