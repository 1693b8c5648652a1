"""`selector explain`: one round of a trace, node by node."""

from __future__ import annotations

from pathlib import Path

import click

from costmodel.clitools import FiniteRange, check_output, emit_json, json_option, progress, quiet_option
from selector.commands.options import FILE, input_options, load_inputs, load_plan, table_console
from selector.registry import POLICY_NAMES


@click.command(epilog="Example: selector explain --text 3 --round 4 --out tree.svg")
@input_options
@click.option("--plan", "plan_path", type=FILE, help="Use this plan's scorer or calibration, scale and price.")
@click.option("--policy", help=f"Of {', '.join(POLICY_NAMES)}.  [default: the plan's, or priced]")
@click.option("--text", default="0", show_default=True, metavar="KEY|INDEX", help="Which text of the trace.")
@click.option("--anchor", type=click.IntRange(0), help="Where the round starts: 0 is the first generated token.")
@click.option("--round", "round_number", type=click.IntRange(0), help="The n-th round of the policy, from 0.  [default: 0]")
@click.option("--price", type=FiniteRange(min=0, min_open=True), help="Tokens per second a second costs, for priced.")
@click.option("--tokenizer", metavar="TARGET|PATH", help="Spells the tokens.  [default: the trace's target, if it was pulled]")
@click.option("--out", type=FILE, help="Draw the round as well: .svg, .png or .pdf.")
@json_option
@quiet_option
def explain(
    profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str, max_nodes: int | None,
    plan_path: Path | None, policy: str | None, text: str, anchor: int | None, round_number: int | None,
    price: float | None, tokenizer: str | None, out: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Show one round: the tree, what every node was worth, what the target accepted, what was left out and why.

    Reach is the chance that the walk visits a node, edge the chance given its parent. Gain is the tokens a node is
    expected to bring less what the time it adds is worth at the price; for policies without a price, what the tree
    itself is expected to yield per second.
    """
    from selector.explain import explain as explain_round
    from selector.explain.picture import draw_explanation
    from selector.explain.terminal import print_explanation
    from selector.explain.tokens import load_names
    from selector.figures.style import picture_ending

    if out is not None:
        picture_ending(out)
        check_output(out)
    cost, trace = load_inputs(profile, trace_path, target, drafter, dtype)
    names = load_names(tokenizer, trace.identity.get("target"))
    plan = load_plan(plan_path, trace)
    chosen = policy or (plan.policy if plan else "priced")
    with progress("explain", quiet=quiet):
        account = explain_round(trace, cost, chosen, text, anchor, round_number, plan, price, max_nodes)
    path = draw_explanation(account, names, out) if out is not None else None
    if as_json:
        spelled = {str(token): names(token) for token in sorted(account.token_ids)}
        emit_json({**account.to_dict(), "tokens": spelled, "path": None if path is None else str(path)})
        return
    print_explanation(account, names, table_console())
    if path is not None:
        click.echo(f"figure: {path}")
