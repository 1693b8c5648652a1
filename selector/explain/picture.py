"""One round as a picture: the tree from left to right, its accepted path, and what was left out, dashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selector.explain.account import Explanation, NodeAccount
from selector.explain.terminal import headline, outcome
from selector.explain.tokens import TokenNames
from selector.figures.style import BLUE, GREEN, GREY, INK, MUTED, RED, house_style, new_figure, plain, save_figure

Key = tuple[int, ...]
_BOX_WIDTH, _BOX_HEIGHT = 0.8, 0.74  # of a column, of a row
_COLUMN_INCHES, _ROW_INCHES = 1.75, 0.5
_FILLS = {"accepted": ("#d7f0e5", GREEN), "tree": ("#e3eff8", BLUE), "left out": ("white", GREY), "missed": ("#fbe6dc", RED)}
_LEGEND = (
    "Green: accepted. Blue: in the tree. Dashed: left out. Red: the target's own token, left out. In a box: reach (chance "
    "given its parent, tokens gained less the price of its time)."
)


def draw_explanation(account: Explanation, names: TokenNames, path: str | Path) -> Path:
    """Draw the round to a png, svg or pdf file; raises FigureError for other endings."""
    shown = drawn_nodes(account)
    at = layout(shown)
    rows = max(y for _, y in at.values()) + 1
    columns = max(len(key) for key in at) + 1
    where, how = headline(account, names)
    number = account.round_number
    which = f"anchor {account.anchor}" if number is None else f"round {number}"
    title = f"{account.key}, {which}: {account.policy} takes {len(account.nodes)} nodes, {account.num_accepted} accepted"
    caption = ". ".join([where, *outcome(account, names)]) + "."
    footer = f"{_LEGEND} {how[0].upper()}{how[1:]}. {account.provenance} profile."
    size = max(9.0, 0.6 + _COLUMN_INCHES * columns), 1.9 + _ROW_INCHES * max(rows, 3)
    with house_style():
        figure, (axes,) = new_figure(title, caption, footer, size=size)
        axes.set_axis_off()
        axes.set_xlim(-0.05, max(columns, size[0] / _COLUMN_INCHES - 0.4))
        axes.set_ylim(max(rows, 3) - 0.5, -0.5)
        for key, node in shown.items():
            _edge(axes, at[key[:-1]], at[key], node)
        _box(axes, at[()], [names(account.root_token_id), "root"], "accepted")
        for key, node in shown.items():
            numbers = f"{node.reach:.3f}  (edge {node.edge_probability:.2f}, {node.gain:+.3f})"
            _box(axes, at[key], [f"{names(node.token_id)}", numbers], _state(node))
        return save_figure(figure, path)


def drawn_nodes(account: Explanation) -> dict[Key, NodeAccount]:
    """What is drawn, by path: the tree, the next candidates, the siblings beside the target's path; parents always there."""
    return {node.path: node for node in (*account.nodes, *account.left_out, *account.siblings)}


def layout(nodes: dict[Key, NodeAccount]) -> dict[Key, tuple[float, float]]:
    """(x, y) of every path, the root's () included: x its depth, y its row; leaves have rows of their own, best reach on top."""
    children: dict[Key, list[Key]] = {}
    for key in sorted(nodes, key=lambda key: -nodes[key].reach):
        children.setdefault(key[:-1], []).append(key)
    at: dict[Key, tuple[float, float]] = {}
    rows = 0

    def place(key: Key) -> float:
        nonlocal rows
        below = [place(child) for child in children.get(key, [])]
        if not below:
            below = [float(rows)]
            rows += 1
        at[key] = float(len(key)), below[0]  # level with its best child: the likeliest path is a straight line
        return below[0]

    place(())
    return at


def _state(node: NodeAccount) -> str:
    if node.slot is None:
        return "missed" if node.accepted else "left out"
    return "accepted" if node.accepted else "tree"


def _box(axes: Any, at: tuple[float, float], lines: list[str], state: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, edge = _FILLS[state]
    left, top = at[0], at[1] - _BOX_HEIGHT / 2
    dashed = "--" if state in ("left out", "missed") else "-"
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((left, top), _BOX_WIDTH, _BOX_HEIGHT, style, fc=fill, ec=edge, lw=1.1, ls=dashed, zorder=2,
                                  mutation_aspect=_COLUMN_INCHES / _ROW_INCHES))  # fmt: skip
    strong = state in ("accepted", "missed")
    middle = left + _BOX_WIDTH / 2
    axes.text(middle, at[1] - 0.15, plain(lines[0]), ha="center", va="center", size=9, color=INK,
              weight="bold" if strong else "normal", zorder=3)  # fmt: skip
    axes.text(middle, at[1] + 0.19, plain(lines[1]), ha="center", va="center", size=6.5, color=MUTED, zorder=3)


def _edge(axes: Any, start: tuple[float, float], end: tuple[float, float], node: NodeAccount) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    x0, y0, x1, y1 = start[0] + _BOX_WIDTH, start[1], end[0], end[1]
    bend = (x1 - x0) * 0.6
    points = [(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    colour = _FILLS[_state(node)][1]
    width = 0.7 + 3.5 * node.edge_probability
    dashed = "--" if node.slot is None else "-"
    axes.add_patch(PathPatch(curve, fc="none", ec=colour, lw=width, ls=dashed, alpha=0.75, zorder=1))
