"""`selector replay`: tokens per second of every policy, from a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table

from costmodel.clitools import check_output, emit_json, json_option, progress, quiet_option
from selector.commands.options import FILE, input_options, load_inputs, load_plan, table_console
from selector.plan import Plan
from selector.policies import Policy
from selector.registry import POLICY_NAMES
from selector.replaying.caveats import plan_notes, what_if_sentence
from selector.replaying.replay import DEFAULT_POLICIES, Replay
from selector.replaying.replay import replay as replay_trace


@click.command(epilog="Example: selector replay --profile here.json --trace trace.safetensors --policies exact,priced")
@input_options
@click.option(
    "--policies", default=",".join(DEFAULT_POLICIES), show_default=True, help=f"Comma-separated, of {', '.join(POLICY_NAMES)}."
)
@click.option(
    "--plan", "plan_path", type=FILE, help="Use this plan's scorer or calibration, sizes and prices, and replay its policy too."
)
@click.option("--figures", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Draw figures into DIR (PNG).")
@json_option
@quiet_option
def replay(
    profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str, max_nodes: int | None,
    policies: str, plan_path: Path | None, figures: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Tokens per second of every policy on a trace, without running a model.

    Beside the asked policies: plain decoding, the best chain, the best fixed budget, and two ceilings: an oracle that
    knows the text and verifies only what will be accepted (the limit of selection), and the same with every token of the
    text in the draft (the limit of drafting). "of gap" is how far a policy gets from the best fixed budget as drafted to
    the oracle. --figures draws ranks, coverage, the time of a round, throughput, and the gap.
    """
    cost, trace = load_inputs(profile, trace_path, target, drafter, dtype)
    plan = load_plan(plan_path, trace)
    calibration, scale, scorer = (plan.calibration, plan.reach_scale, plan.load_scorer()) if plan else (None, 1.0, None)
    scoring, price = (plan.scoring_seconds, plan.charge) if plan else (0.0, None)
    max_nodes = plan.max_nodes if plan is not None and max_nodes is None else max_nodes
    asked = asked_policies(policies, plan)
    check_output(None if figures is None else figures / "rank.png")
    with progress("replay", quiet=quiet):
        result = replay_trace(
            trace, cost, asked, max_nodes, calibration, price, scale, scorer=scorer, scoring_seconds=scoring
        )
    result = replace(result, notes=[*result.notes, *plan_notes(plan, trace.identity, cost)])
    document, drawn = result.to_dict(), {}
    if not as_json:
        print_replay(result)
    if figures is not None:
        from selector.figures import write_figures

        with progress("figures", quiet=quiet) as advance:
            drawn = write_figures(result, trace, cost, figures, calibration, scorer, scoring, advance=advance)
        document["figures"] = drawn
    if as_json:
        emit_json(document)
        return
    for figure in drawn.values():
        click.echo(f"figure: {figure['path']}")


def asked_policies(names: str, plan: Plan | None) -> list[str | Policy]:
    """Policies by name, the plan's own among them with the settings it was tuned to."""
    asked: list[str | Policy] = [name.strip() for name in names.split(",") if name.strip()]
    if plan is None:
        return asked
    own = plan.make_policy()
    listed = {plan.policy, own.name} & {str(name) for name in asked}
    return [own if name in listed else name for name in asked] + ([] if listed else [own])


def print_replay(result: Replay) -> None:
    """All rows as one table, and what to know of them below it."""
    table = Table(title=f"Replay of {result.num_texts} texts, {result.provenance} profile, at most {result.max_nodes} nodes")
    for name in ("policy", "tokens/s", "tokens/round", "nodes", "x plain", "95 %", "vs chain", "vs fixed", "of gap"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    following = [row.role for row in result.rows[1:]] + [""]
    for row, next_role in zip(result.rows, following, strict=True):
        low, high = row.speedup_interval
        interval = f"{low:.3f}-{high:.3f}" if result.num_texts > 1 else "-"  # one text says nothing of others
        table.add_row(
            row.name + ("" if row.role == "asked" else f" ({row.role})" if row.role != row.name else ""),
            f"{row.tokens_per_second:.2f}", f"{row.tokens_per_round:.2f}", f"{row.mean_nodes:.1f}",
            f"{row.speedup_over_plain:.3f}", interval,
            f"{row.gain_over_best_chain:+.1%}", f"{row.gain_over_best_fixed:+.1%}",
            "-" if row.share_of_gap is None else f"{row.share_of_gap:.1%}",
            end_section=row.role.startswith("best fixed") and next_role == "asked" or next_role == "limit of selection",
        )  # fmt: skip
    out = table_console()
    out.print(table)
    if result.what_if:
        out.print(what_if_sentence(result.what_if))
    for line in result.notes:
        out.print(line)
