"""A server under load, simulated from a trace: plain decoding, uniform budgets and merged budgets at any batch size."""

from __future__ import annotations

from selector.load.study import LoadRow, LoadStudy, study_load

__all__ = ["LoadRow", "LoadStudy", "study_load"]
