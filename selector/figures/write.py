"""All figures of a replay written to a folder, and the numbers under them as one JSON document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selector.calibration import Calibration
from selector.figures import draw
from selector.figures.numbers import COVERAGE_BUDGETS, coverage, rank_shares, stage_seconds, sweep
from selector.figures.reliability import draw_reliability, reliability_numbers
from selector.figures.style import house_style, new_figure, picture_ending, provenance, save_figure
from selector.replaying.caveats import TUNED_ON_THESE
from selector.replaying.orders import build_orders
from selector.replaying.replay import Replay
from selector.replaying.rounds import build_curves
from selector.scoring import EdgeScorer
from selector.trace import Trace

ROW_FIELDS = (
    "name", "role", "tokens_per_second", "tokens_per_round", "mean_nodes", "acceptance_rate", "share_of_gap",
)  # fmt: skip
Advance = Callable[..., None]


def write_figures(
    result: Replay,
    trace: Trace,
    cost: Any,
    folder: str | Path,
    calibration: Calibration | None = None,
    scorer: EdgeScorer | None = None,
    scoring_seconds: float = 0.0,
    ending: str = "png",
    advance: Advance = lambda *_: None,
) -> dict[str, Any]:
    """Draw what a replay was about; returns {figure: {"path": file, "numbers": what it shows}}.

    Args:
        result: of `replay(trace, cost, ...)` with the same calibration, scorer and scoring_seconds. cost: a cost model.
        folder: made if need be; files in it are replaced one by one. ending: png, svg or pdf. advance: called after each.

    Raises FigureError for another ending.
    """
    picture_ending(f"x.{ending}")
    target, footer = Path(folder), provenance(trace.identity, cost, result.num_texts)
    if result.what_if:
        footer += "  |  a what-if: trace and profile differ in " + ", ".join(result.what_if)
    if TUNED_ON_THESE in result.notes:
        footer += "  |  tuned on these very texts"
    orders = build_orders(trace, result.max_nodes, calibration, scorer)
    scoring = scoring_seconds if scorer is not None else 0.0
    curves = build_curves(orders, cost).plus(scoring)
    rows = [{name: asdict(row)[name] for name in ROW_FIELDS} for row in result.rows]
    fixed, chain = sweep(orders, curves, "fixed"), sweep(orders, curves, "chain")
    wide = build_orders(trace, COVERAGE_BUDGETS[-1], calibration, scorer)
    numbers: dict[str, Any] = {
        "rank": rank_shares(trace),
        "coverage": coverage(wide),
        "round": {"stages": stage_seconds(cost, orders, scoring), "fixed": fixed, "chain": chain, "policies": rows},
        "throughput": {"policies": rows, "fixed": fixed, "chain": chain},
        "gap": {"policies": rows},
        "reliability": reliability_numbers(trace, calibration, scorer),
    }
    with house_style():
        drawn = {name: figure(numbers[name], footer, trace) for name, figure in _FIGURES.items()}  # all before any is written
        written = {}
        for name, picture in drawn.items():
            path = save_figure(picture, target / f"{name}.{ending}")
            written[name] = {"path": str(path), "numbers": numbers[name]}
            advance(1, name)
    return written


def _rank(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    places = numbers["places"][0] if numbers["places"] else 0
    caption = (
        f"Rank of the target's own token among the drafter's {trace.top_k} candidates of each depth, by the drafter's "
        f"probability, over all {places:,} places of the texts. What is not listed no selection can win."
    )
    figure, (axes,) = new_figure("Where the right token stands in the draft", caption, footer)
    draw.draw_ranks(axes, numbers)
    return figure


def _coverage(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    caption = (
        "How often the target's own continuation down to a depth is inside the tree of the n best nodes, over all places of "
        "the texts. In brackets: tokens of a round that starts anywhere (policies start where their last round ended)."
    )
    figure, (axes,) = new_figure("Coverage of the right tokens by depth, for node budgets 8 to 512", caption, footer)
    draw.draw_coverage(axes, numbers)
    return figure


def _round(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    caption = (
        f"Left: the stages of a round at {numbers['stages']['context_tokens']} context tokens (the trace's median), stacked. "
        "Right: verification efficiency, the share of verified nodes that are accepted; it falls as trees grow, also where "
        "they get faster."
    )
    title = "Where a round's time goes, and how much of what is verified is accepted"
    figure, (left, right) = new_figure(title, caption, footer, panels=2, size=(11.0, 4.8))
    draw.draw_stages(left, numbers["stages"])
    draw.draw_efficiency(right, numbers["fixed"], numbers["chain"], numbers["policies"])
    return figure


def _throughput(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    caption = (
        "Left: every policy replayed. Right: the same beside the ceilings. The oracle knows the text and verifies only what "
        "will be accepted (limit of selection); the oracle drafter also lists every token to the draft's depth (limit of "
        "drafting). Dotted: plain decoding."
    )
    title = "Tokens per second against tokens per round"
    figure, (left, right) = new_figure(title, caption, footer, panels=2, size=(11.0, 5.2))
    rows, sweeps = numbers["policies"], (numbers["fixed"], numbers["chain"])
    draw.draw_throughput(left, [row for row in rows if row["role"] not in draw.CEILING_MARKERS], *sweeps)
    draw.draw_throughput(right, rows, *sweeps, named=False)
    return figure


def _gap(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    caption = (
        "How much of the way from the best fixed budget to the oracle, which knows the text and verifies only what will be "
        "accepted, each policy goes in tokens per second."
    )
    height = 2.1 + 0.24 * len(numbers["policies"])
    figure, (axes,) = new_figure("What is left on the table", caption, footer, size=(7.6, height))
    draw.draw_gap(axes, numbers["policies"])
    return figure


def _reliability(numbers: dict[str, Any], footer: str, trace: Trace) -> Any:
    caption = (
        "How often candidates were accepted, by the chance they were given, over all prefixes that the text reached; dotted is "
        "honest. On chain: the parent is the root or the drafter's first candidate. Error: tokens misjudged per reached prefix."
    )
    if numbers["num_texts"] < numbers["num_texts_of_trace"]:
        caption += f" Of {numbers['num_texts']} of the texts, spread evenly."
    figure, panels = new_figure("Do the chances of acceptance come true?", caption, footer, panels=3, size=(11.0, 4.6))
    draw_reliability(panels, numbers)
    return figure


_FIGURES: dict[str, Callable[[dict[str, Any], str, Trace], Any]] = {
    "rank": _rank, "coverage": _coverage, "round": _round, "throughput": _throughput, "gap": _gap,
    "reliability": _reliability,
}  # fmt: skip
