"""Pictures without a display: a blank matplotlib figure, and one written whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from profiles.files import write_atomic

PICTURES = ("png", "svg", "pdf")


def blank_figure(size: tuple[float, float], **options: Any) -> Any:
    """A matplotlib figure of `size` inches, laid out so that nothing overlaps; `options` are the figure's own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: str | os.PathLike[str], ending: str = "png", dpi: int = 130, **options: Any) -> Path:
    """Write a figure in the format `ending`, atomically; `options` are `savefig`'s."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, dpi=dpi, **options)
    return write_atomic(path, buffer.getvalue())
