"""One look for all figures: a title that says what is seen, a caption that says how, a footer that says of what."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costmodel.pictures import PICTURES, blank_figure, write_figure
from selector.figures.errors import FigureError

DPI = 150
INK, MUTED, GRID = "#222222", "#6b6b6b", "#d9d9d9"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7B5EA7", "#56B4E9", "#F0E442", "#999999",
)  # fmt: skip
STAGE_COLOURS = {"draft": ORANGE, "score": RED, "select": PURPLE, "verify": BLUE, "commit": GREEN}
_TOP_INCHES, _LINE_INCHES, _FOOT_INCHES = 0.44, 0.17, 0.3
_PARAMETERS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "treebudget",  # the same picture, the same bytes
}


@contextmanager
def house_style() -> Iterator[None]:
    """Everything drawn and saved inside looks alike, whatever the user's matplotlib settings are."""
    from matplotlib import rc_context

    with rc_context(_PARAMETERS):
        yield


def new_figure(title: str, caption: str, footer: str, panels: int = 1, size: tuple[float, float] = (7.6, 5.0)) -> Any:
    """(figure, list of axes) with title, caption and footer in place; needs no display. To be used in `house_style`."""
    figure = blank_figure(size, facecolor="white")
    axes = figure.subplots(1, panels, squeeze=False)[0].tolist()
    width, height = size
    lines, foot_lines = textwrap.wrap(caption, int(width * 15.5)), textwrap.wrap(footer, int(width * 19))
    top = _TOP_INCHES + _LINE_INCHES * len(lines)
    left, below = 0.12 / width, 1 - 0.37 / height
    figure.text(left, 1 - 0.1 / height, plain(title), ha="left", va="top", size=12, weight="bold", color=INK)
    figure.text(left, below, plain("\n".join(lines)), ha="left", va="top", size=8.5, color=MUTED, linespacing=1.3)
    figure.text(left, 0.08 / height, plain("\n".join(foot_lines)), ha="left", va="bottom", size=7, color=MUTED)
    foot = (_FOOT_INCHES + 0.13 * (len(foot_lines) - 1)) / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.01, foot, 0.98, 1 - foot - top / height), w_pad=0.08, wspace=0.05)
    return figure, axes


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure as png, svg or pdf by the ending of `path`, whole or not at all; raises FigureError for others."""
    target = Path(path)
    ending = picture_ending(target)
    return write_figure(figure, target, ending, DPI, metadata={"Date": None} if ending == "svg" else None)


def picture_ending(path: str | Path) -> str:
    """The ending of a picture file without its dot; raises FigureError for a format that cannot be drawn."""
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in PICTURES:
        raise FigureError(f"cannot draw to {path}: the ending must be one of {', '.join(PICTURES)}")
    return ending


def plain(text: str) -> str:
    """`text` safe for matplotlib, which reads what lies between two dollar signs as mathematics."""
    return text.replace("$", r"\$")


def provenance(identity: Mapping[str, Any], cost: Any, num_texts: int) -> str:
    """The footer: which trace and which profile, and where the profile's numbers come from."""
    named = [str(identity[key]) for key in ("target", "drafter", "dtype") if identity.get(key)]
    block = f", block {identity['block_size']}" if identity.get("block_size") else ""
    device = getattr(getattr(cost, "identity", None), "device", None) or "unnamed device"
    trace = f"trace: {' / '.join(named) or 'unnamed'}{block}, {num_texts} texts"
    return f"{trace}  |  {getattr(cost, 'provenance', 'measured')} profile: {device}"
