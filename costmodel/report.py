"""The picture of a cost curve: measured points, convex fit and table, and where budgets fall."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.cells import VerifyCell
from costmodel.errors import UsageError
from costmodel.model import CostModel
from costmodel.pictures import PICTURES, blank_figure, write_figure

MAX_CONTEXTS_DRAWN = 5
MARKER_COLOURS = ("black", "dimgrey", "silver", "gold", "deeppink", "cyan", "lime", "white")


def plot_cost(
    cost: CostModel, path: str | os.PathLike[str], markers: Mapping[str, float] | None = None, marker_context: int | None = None
) -> Path:
    """Draw verification seconds against verify tokens and save the picture atomically (png, svg or pdf by its ending).

    Points are medians with bars from the 10th to the 90th percentile, a line the convex fit, a dashed line the table, one
    colour per context (at most five). `markers` maps labels to numbers of nodes; each is drawn at nodes + 1 on the table
    at `marker_context` (the middle measured context by default).
    """
    target = Path(path)
    ending = target.suffix.lstrip(".").lower()
    if ending not in PICTURES:
        raise UsageError(f"cannot draw to {target}: the ending must be one of {', '.join(PICTURES)}")
    figure = draw_cost(cost, markers, marker_context)
    return write_figure(figure, target, ending)


def draw_cost(cost: CostModel, markers: Mapping[str, float] | None = None, marker_context: int | None = None) -> Any:
    """The matplotlib figure of `plot_cost`; needs no display."""
    figure = blank_figure((9, 5.4))
    axes = figure.subplots()
    contexts = [row.context_tokens for row in cost.table.rows]
    for index, context in enumerate(_drawn(contexts)):
        _draw_context(axes, cost, context, f"C{index}")
    if markers:
        at = contexts[len(contexts) // 2] if marker_context is None else marker_context
        _draw_markers(axes, cost, markers, at)
    _dress(axes, cost)
    return figure


def _drawn(contexts: list[int]) -> list[int]:
    picked = np.unique(np.round(np.linspace(0, len(contexts) - 1, min(MAX_CONTEXTS_DRAWN, len(contexts)))).astype(int))
    return [contexts[index] for index in picked]


def _draw_context(axes: Any, cost: CostModel, context: int, colour: str) -> None:
    cells = [cell for cell in cost.profile.verify if (cell.context_tokens, cell.num_requests) == (context, _requests(cost))]
    cells.sort(key=lambda cell: cell.verify_tokens)
    sampled = [cell for cell in cells if cell.num_samples]
    if sampled:
        tokens = [cell.verify_tokens for cell in sampled]
        seconds = np.array([cell.seconds for cell in sampled])
        axes.errorbar(tokens, seconds * 1e3, yerr=_bars(sampled, seconds) * 1e3, fmt="o", ms=3.5, lw=1, color=colour)
    grid = np.unique(np.round(np.linspace(cells[0].verify_tokens, cells[-1].verify_tokens, 400)))
    axes.plot(grid, cost.convex.seconds(grid, context) * 1e3, color=colour, lw=1.6, label=f"context {context:,}")
    axes.plot(grid, cost.table.seconds(grid, context) * 1e3, color=colour, lw=0.9, ls="--", alpha=0.7)


def _requests(cost: CostModel) -> int:
    return min(cell.num_requests for cell in cost.profile.verify)


def _bars(cells: list[VerifyCell], seconds: np.ndarray) -> np.ndarray:
    """Distances down and up to the percentiles, of shape (2, n); 0 where unknown."""
    low = np.array([cell.seconds if cell.low_seconds is None else cell.low_seconds for cell in cells])
    high = np.array([cell.seconds if cell.high_seconds is None else cell.high_seconds for cell in cells])
    return np.maximum(np.stack([seconds - low, high - seconds]), 0.0)


def _draw_markers(axes: Any, cost: CostModel, markers: Mapping[str, float], context: int) -> None:
    shown, labels = [], []
    for index, (label, num_nodes) in enumerate(sorted(markers.items(), key=lambda item: item[1])):
        tokens = max(float(num_nodes), 0.0) + 1.0
        height = cost.verify_seconds(tokens, context) * 1e3
        colour = MARKER_COLOURS[index % len(MARKER_COLOURS)]
        axes.plot([tokens, tokens], [0, height], color=colour, lw=1.0, ls=":", zorder=1)
        shown += axes.plot([tokens], [height], marker="v", ms=9, color=colour, mec="black", ls="", zorder=5)
        labels.append(f"{label}: {num_nodes:.3g} nodes")
    # A legend of their own: budgets lie close together, so labels at the points would cover each other.
    title = f"mean budgets, context {context}"
    axes.add_artist(axes.legend(shown, labels, loc="lower right", fontsize=8, title=title, title_fontsize=8))


def _dress(axes: Any, cost: CostModel) -> None:
    identity = cost.identity
    named = [identity.target, identity.dtype, identity.device, identity.attention]
    title = ", ".join(str(item) for item in named if item) or cost.profile.source
    axes.set_title(f"{title} ({cost.provenance})", fontsize=10)
    axes.set_xlabel("verify tokens (nodes + 1)")
    axes.set_ylabel("milliseconds per target forward")
    axes.set_ylim(bottom=0)
    axes.plot([], [], color="grey", lw=1.6, label="convex fit")
    axes.plot([], [], color="grey", lw=0.9, ls="--", label="table")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
