"""`selector show`: a plan for people."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from costmodel.clitools import emit_json, json_option
from selector.commands.options import table_console
from selector.errors import PlanError
from selector.plan import Plan
from selector.replaying.caveats import what_if_sentence


@click.command(epilog="Example: selector show plan.json")
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@json_option
def show(plan_path: Path, as_json: bool) -> None:
    """Print a plan: what it does, why, and what it was compared with."""
    plan = Plan.load(plan_path)
    emit_json(plan.to_dict()) if as_json else print_plan(plan, plan_path)


def print_plan(plan: Plan, path: Path) -> None:
    """The candidates a plan was chosen from as a table, and below it what was chosen and why."""
    out = table_console()
    table = Table(title="Judged on texts that were not fitted on")
    for name in ("candidate", "policies", "tokens/s", "tokens/round", "nodes", "x plain", "vs fixed"):
        table.add_column(name, justify="left" if name in ("candidate", "policies") else "right", no_wrap=True)
    for place, row in enumerate(plan.rows):
        try:
            table.add_row(
                row["name"], " / ".join(dict.fromkeys(row["policies"])), f"{row['tokens_per_second']:.2f}",
                f"{row['tokens_per_round']:.2f}", f"{row['mean_nodes']:.1f}", f"{row['speedup_over_plain']:.3f}",
                f"{row['gain_over_best_fixed']:+.1%}",
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"plan: row {place} is malformed: {error!r}", field="rows") from error
    if plan.rows:
        out.print(table)
    for line in plan_lines(plan):
        out.print(line)
    out.print(f"plan: {path}", soft_wrap=True)


def plan_lines(plan: Plan) -> list[str]:
    """What a plan does and why, a sentence a line."""
    price = "-" if plan.price is None else f"{plan.price:.2f} tokens per second"
    settings = "".join(f" {name}={value}" for name, value in plan.policy_settings.items())
    calibrated = "scored" if plan.has_scorer else "calibrated" if plan.calibration else "not calibrated"
    lines = [f"policy {plan.policy}{settings}, {calibrated}, price {price}, {plan.provenance} profile"]
    if plan.scorer is not None:
        lines.append(f"scorer: {plan.scorer.file}, {1e3 * plan.scoring_seconds:.3f} ms a round")
    if len(plan.prices) > 1:
        parts = (f"{item.price:.2f} at {item.context_low}-{item.context_high}" for item in plan.prices)
        lines.append(f"price by context tokens: {', '.join(parts)}")
    lines += [f"fallback ({when}): {what}" for when, what in plan.fallback.items()]
    lines.append(f"why: {plan.reason or 'no reason recorded'}")
    differing = plan.identity.get("what_if")
    if isinstance(differing, dict) and differing:
        lines.append(what_if_sentence(differing))
    return lines + [f"note: {text}" for text in plan.notes]
