"""Capacity planning on top of the cost model: which budget, how fast, how much, how many GPUs."""

from __future__ import annotations

from costmodel.planning.acceptance import Acceptance
from costmodel.planning.memory import Memory
from costmodel.planning.pricing import Pricer
from costmodel.planning.whatif import Settings, what_if

__all__ = ["Acceptance", "Memory", "Pricer", "Settings", "what_if"]
