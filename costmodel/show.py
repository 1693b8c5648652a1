"""A profile as text and as a JSON document: cells, stages, diagnostics, where the numbers come from."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from costmodel.cells import VerifyCell
from costmodel.diagnostics import Diagnostics
from costmodel.model import CostModel

MAX_ROWS = 40


def describe(cost: CostModel) -> dict[str, Any]:
    """The JSON document of `costmodel show --json`."""
    return {
        "schema": "treebudget.profile-report",
        "version": 1,
        "profile": cost.profile.to_dict(),
        "max_verify_tokens": cost.max_verify_tokens,
        "context_tokens": [row.context_tokens for row in cost.table.rows],
        "diagnostics": cost.diagnostics.to_dict(),
    }


def print_profile(cost: CostModel, console: Console) -> None:
    """Print cells, stages, diagnostics and provenance as tables."""
    profile = cost.profile
    identity = ", ".join(f"{key} {value}" for key, value in profile.identity.to_dict().items() if value is not None)
    console.print(Text.assemble((profile.provenance, "bold"), f": {profile.source} ({profile.created})"), soft_wrap=True)
    console.print(identity or "identity unknown", soft_wrap=True, markup=False)
    console.print(_verify_table(cost))
    if profile.stages:
        console.print(_stage_table(cost))
    for line in diagnostic_lines(cost.diagnostics, most=12):
        console.print(line, soft_wrap=True, markup=False)
    for line in profile.notes:
        console.print(f"note: {line}", soft_wrap=True, markup=False)


def _verify_table(cost: CostModel) -> Table:
    """Medians in milliseconds with p10-p90 and flags; rows are verify tokens, columns contexts (first batch size)."""
    requests = min(cell.num_requests for cell in cost.profile.verify)
    cells = {(cell.verify_tokens, cell.context_tokens): cell for cell in cost.profile.verify if cell.num_requests == requests}
    contexts = sorted({context for _, context in cells})
    sizes = sorted({size for size, _ in cells})
    step = -(-len(sizes) // MAX_ROWS)
    title = "target forward, ms: median (p10-p90)" + (f", every {step}th size" if step > 1 else "")
    table = Table(title=title, title_justify="left")
    table.add_column("verify tokens", justify="right")
    for context in contexts:
        table.add_column(f"context {context}", justify="right")
    shown = sizes[::step] + ([sizes[-1]] if (len(sizes) - 1) % step else [])
    for size in shown:
        table.add_row(str(size), *(_cell_text(cells.get((size, context))) for context in contexts))
    return table


def _cell_text(cell: VerifyCell | None) -> str:
    if cell is None:
        return "-"
    text = f"{cell.seconds * 1e3:.1f}"
    if cell.low_seconds is not None and cell.high_seconds is not None:
        text += f" ({cell.low_seconds * 1e3:.1f}-{cell.high_seconds * 1e3:.1f})"
    return text + "".join(f" {flag}!" for flag in cell.flags)


def _stage_table(cost: CostModel) -> Table:
    table = Table(title="other stages, ms", title_justify="left")
    for name in ("stage", "size", "context", "median", "p10-p90", "flags"):
        table.add_column(name, justify="left" if name in ("stage", "flags") else "right")
    for cell in cost.profile.stages:
        known = cell.low_seconds is not None and cell.high_seconds is not None
        spread = f"{cell.low_seconds * 1e3:.2f}-{cell.high_seconds * 1e3:.2f}" if known else "-"  # type: ignore[operator]
        median = f"{cell.seconds * 1e3:.2f}"
        table.add_row(cell.stage, str(cell.size), str(cell.context_tokens), median, spread, " ".join(cell.flags))
    return table


def diagnostic_lines(found: Diagnostics, most: int | None = None) -> list[str]:
    """The diagnostics in words, one finding a line; of cliffs and of concave stretches the `most` largest."""
    lines = [f"status: {found.status}" + (f" ({found.degenerate_reason})" if found.degenerate_reason else "")]
    if found.largest_gap is not None:
        gap = found.largest_gap
        lines.append(
            f"convex against table: {found.mean_relative_gap:.1%} apart on average, most at {gap.verify_tokens} tokens, "
            f"context {gap.context_tokens}: {gap.relative_gap:+.1%}"
        )
    for cliff in sorted(found.cliffs, key=lambda item: -item.relative_jump)[:most]:
        lines.append(
            f"cliff at context {cliff.context_tokens}: {cliff.from_verify_tokens} -> {cliff.to_verify_tokens} tokens "
            f"costs {cliff.jump_seconds * 1e3:+.1f} ms ({cliff.relative_jump:+.0%})"
        )
    for stretch in sorted(found.concave_stretches, key=lambda item: -item.relative_gap)[:most]:
        lines.append(
            f"not convex at context {stretch.context_tokens}, {stretch.from_verify_tokens} to {stretch.to_verify_tokens} tokens: "
            f"up to {stretch.relative_gap:.0%} above the minorant"
        )
    if found.suspect_cells:
        kinds = sorted({flag for cell in found.suspect_cells for flag in cell.flags})
        lines.append(f"suspect cells: {len(found.suspect_cells)} ({', '.join(kinds)})")
    return lines + [f"note: {flag}" for flag in found.flags]
