"""The figures themselves: each takes numbers and axes, and draws; nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selector.figures.labels import Spot, label_points
from selector.figures.style import BLUE, GREEN, GREY, INK, MUTED, ORANGE, PURPLE, RED, SKY, STAGE_COLOURS, plain

CEILING_MARKERS = {"limit of selection": ("*", GREEN), "limit of drafting": ("D", PURPLE)}
_LOWEST_SHARE = -30.0  # of the gap, in percent: what lies below is cut off and says so
ROLE_COLOURS = {"plain": INK, "best chain": ORANGE, "best fixed": SKY, "best fixed as drafted": SKY, "asked": BLUE}


def draw_ranks(axes: Any, numbers: dict[str, Any]) -> None:
    """Stacked bars by depth: shares of the ranks of the target's own token, unlisted ones on top."""
    import matplotlib

    depths, labels = numbers["depths"], numbers["ranks"]
    colours = matplotlib.colormaps["viridis_r"]
    base = [0.0] * len(depths)
    for index, label in enumerate(labels):
        shares = [100 * row[index] for row in numbers["shares"]]
        last = index == len(labels) - 1
        colour = "#e3e3e3" if last else colours(0.12 + 0.85 * (1 - index / max(len(labels) - 2, 1)))
        axes.bar(depths, shares, bottom=base, width=0.78, color=colour, edgecolor="white", lw=0.6, label=label)
        for depth, share, low in zip(depths, shares, base, strict=True):
            if share >= 4.5:
                shade = "white" if index < (len(labels) - 1) / 2 else INK
                axes.text(depth, low + share / 2, f"{share:.0f}", ha="center", va="center", size=8, color=shade)
        base = [low + share for low, share in zip(base, shares, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_xticks(depths)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("depth in the draft (tokens after the root)")
    axes.set_ylabel("places of the texts (%)")
    handles, names = axes.get_legend_handles_labels()
    options = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "title": "rank of the\ntarget's token"}
    axes.legend(handles[::-1], names[::-1], alignment="left", **options)


def draw_coverage(axes: Any, numbers: dict[str, Any]) -> None:
    """One line per node budget: how often the path is in the tree, by depth; dashed: all candidates in the tree."""
    import matplotlib

    budgets, depths = numbers["budgets"], numbers["depths"]
    colours = matplotlib.colormaps["viridis_r"]
    axes.plot(depths, [100 * share for share in numbers["listed"]], "--", color=GREY, lw=1.4, label="all candidates")
    for index in range(len(budgets) - 1, -1, -1):
        share = [100 * value for value in numbers["shares"][index]]
        label = f"{budgets[index]} nodes ({1 + numbers['accepted_nodes'][index]:.2f})"
        colour = colours(0.15 + 0.85 * index / max(len(budgets) - 1, 1))
        axes.plot(depths, share, "o-", ms=4, lw=1.7, color=colour, label=label)
    axes.set_ylim(0, 100)
    axes.set_xticks(depths)
    axes.set_xlabel("depth in the draft (tokens after the root)")
    axes.set_ylabel("right path in the tree (% of places)")
    axes.legend(loc="upper right", title="tree (tokens a round)", alignment="left")


def draw_stages(axes: Any, numbers: dict[str, Any]) -> None:
    """Stacked milliseconds of a round's stages against its number of nodes, and a plain step for comparison."""
    nodes = numbers["nodes"]
    names = [name for name in STAGE_COLOURS if name in numbers["seconds"]]
    stacked = [[1e3 * value for value in numbers["seconds"][name]] for name in names]
    colours = [STAGE_COLOURS[name] for name in names]
    labels = [f"{name} ({_span(values)} ms)" for name, values in zip(names, stacked, strict=True)]
    axes.stackplot(nodes, stacked, labels=labels, colors=colours, alpha=0.9, lw=0)
    axes.axhline(1e3 * numbers["plain"], color=INK, lw=1.2, ls=":", label=f"a plain step ({1e3 * numbers['plain']:.1f} ms)")
    axes.set_xlim(0, max(nodes[-1], 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes of the tree")
    axes.set_ylabel("time of one round (ms)")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left")


def _span(values: Sequence[float]) -> str:
    """The lowest and the highest value, or one of them where they look the same."""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def draw_efficiency(axes: Any, fixed: dict[str, Any], chain: dict[str, Any], policies: Sequence[dict[str, Any]]) -> None:
    """Accepted nodes per verified one against the budget: fixed trees, chains, and where each policy lies on average."""
    axes.plot(fixed["nodes"], _percent(fixed), "-", color=SKY, lw=1.8, label="fixed: best n nodes")
    axes.plot(chain["nodes"], _percent(chain), "-", color=ORANGE, lw=1.8, label="chain of n nodes")
    asked = [row for row in policies if row["role"] == "asked" and not row["name"].startswith(("fixed", "chain", "plain"))]
    points = [row for row in asked if row["acceptance_rate"] is not None]  # the others verified nothing
    for row in points:
        axes.plot([row["mean_nodes"]], [100 * row["acceptance_rate"]], "o", ms=6, color=BLUE, mec="white", mew=0.8)
    spots = [Spot(row["mean_nodes"], 100 * row["acceptance_rate"], row["name"], BLUE) for row in points]
    axes.set_xscale("log", base=2)
    ticks = [2**k for k in range(12) if 2**k <= max(fixed["nodes"][-1], 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes of the tree (mean, log scale)")
    axes.set_ylabel("nodes accepted per node verified (%)")
    axes.legend(loc="upper right")
    label_points(axes, spots, [(columns["nodes"], _percent(columns)) for columns in (fixed, chain)])


def _percent(columns: dict[str, Any]) -> list[float]:
    return [100 * value for value in columns["accepted_per_verified"]]


def draw_throughput(
    axes: Any, rows: Sequence[dict[str, Any]], fixed: dict[str, Any], chain: dict[str, Any], named: bool = True
) -> None:
    """Tokens per second against tokens per round: sweeps as lines, policies as points, ceilings as stars.

    `named` writes every name; otherwise only those of plain decoding, the fastest policy and the ceilings.
    """
    axes.plot(fixed["tokens_per_round"], fixed["tokens_per_second"], "-", color=SKY, lw=1.3, zorder=1, label="fixed, by budget")
    lengths = chain["tokens_per_round"], chain["tokens_per_second"]
    axes.plot(*lengths, "-", color=ORANGE, lw=1.3, zorder=1, label="chain, by length")
    fastest = max((row["tokens_per_second"] for row in rows if row["role"] not in CEILING_MARKERS), default=0.0)
    spots = []
    for row in rows:
        x, y = row["tokens_per_round"], row["tokens_per_second"]
        marker, colour = _marker(row)
        axes.plot([x], [y], marker, ms=14 if marker == "*" else 7, color=colour, mec="white", mew=0.8, zorder=3)
        if named or row["role"] in ("plain", *CEILING_MARKERS) or y == fastest:
            spots.append(Spot(x, y, _name(row), colour))
    if rows and rows[0]["role"] == "plain":
        axes.axhline(rows[0]["tokens_per_second"], color=MUTED, lw=0.9, ls=":")
    axes.margins(0.13, 0.13)
    axes.set_xlabel("tokens per round (accepted nodes and the bonus token)")
    axes.set_ylabel("tokens per second")
    axes.legend(loc="lower right")  # plain decoding lies lower left
    label_points(axes, spots, [(columns["tokens_per_round"], columns["tokens_per_second"]) for columns in (fixed, chain)])


def _marker(row: dict[str, Any]) -> tuple[str, str]:
    if row["role"] == "asked" and row["name"].startswith(("fixed", "chain")):
        return "o", SKY if row["name"].startswith("fixed") else ORANGE
    return CEILING_MARKERS.get(row["role"], ("o", ROLE_COLOURS.get(row["role"], BLUE)))


def _name(row: dict[str, Any]) -> str:
    return row["name"] if row["role"] in ("asked", row["name"]) else f"{row['name']} ({row['role']})"


def draw_gap(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars: how much of the gap between the best fixed budget and the oracle each policy closes."""
    known = [row for row in rows if row["share_of_gap"] is not None and row["role"] not in ("plain", *CEILING_MARKERS)]
    known.sort(key=lambda row: row["share_of_gap"])
    shares = [100 * row["share_of_gap"] for row in known]
    names = [_name(row) for row in known]
    colours = [GREEN if share > 0 else (GREY if share == 0 else RED) for share in shares]
    axes.barh(range(len(known)), shares, color=colours, height=0.62, alpha=0.85)
    axes.set_yticks(range(len(known)), [plain(name) for name in names], color=INK)
    reach = max([abs(share) for share in shares if share >= _LOWEST_SHARE] + [1.0])
    for index, share in enumerate(shares):
        side, gap = ("left", 0.02) if share >= 0 else ("right", -0.02)
        cut = share < _LOWEST_SHARE  # one bad policy would press all others flat
        at = _LOWEST_SHARE * 0.99 if cut else share + gap * reach
        text = f"\u25c2 {share:+.1f}" if cut else f"{share:+.1f}"
        axes.text(at, index, text, ha="left" if cut else side, va="center", size=8, color="white" if cut else INK)
    axes.axvline(0, color=INK, lw=0.9)
    low = min([*shares, 0])
    axes.set_xlim(_LOWEST_SHARE if low < _LOWEST_SHARE else low - 0.25 * reach, max([*shares, 0]) + 0.25 * reach)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of the gap from the best fixed budget (0) to the oracle (100), %")
