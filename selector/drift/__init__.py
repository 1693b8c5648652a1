"""Whether a scorer can still be trusted: the alarm that watches it while decoding, and what that is worth on traces."""

from __future__ import annotations

from selector.drift.alarm import DriftAlarm, DriftEvent, DriftSettings

__all__ = ["DriftAlarm", "DriftEvent", "DriftSettings"]
