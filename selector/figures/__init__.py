"""Figures of a replay: what the papers show, for your own model, prompts and machine."""

from __future__ import annotations

from selector.figures.errors import FigureError
from selector.figures.write import write_figures

__all__ = ["FigureError", "write_figures"]
