"""The command `selector`: tune, replay and show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from costmodel import load_profile
from costmodel.clitools import TreebudgetGroup, emit_json, json_option, progress, quiet_option
from profiles.paths import (
    DEFAULT_DRAFTER,
    DEFAULT_DTYPE,
    DEFAULT_TARGET,
    default_plan_path,
    default_profile_path,
    default_trace_path,
)
from selector.errors import TraceError
from selector.plan import Plan
from selector.registry import POLICY_NAMES
from selector.replay import DEFAULT_POLICIES, Replay, replay
from selector.trace import Trace
from selector.tune import CANDIDATES, tune


@click.group(cls=TreebudgetGroup)
def main() -> None:
    """Pick the draft trees that yield the most tokens per second."""


def _input_options(function: Any) -> Any:
    """Which profile and trace: given, or what this machine has measured for a target, drafter and dtype."""
    options = (
        click.option("--profile", "profile", metavar="NAME|FILE", help="A shipped name or a file. Default: this machine's."),
        click.option("--trace", "trace_path", type=click.Path(path_type=Path), help="Trace file. Default: this machine's."),
        click.option("--target", default=DEFAULT_TARGET, show_default=True, help="Names the default files."),
        click.option("--drafter", default=DEFAULT_DRAFTER, show_default=True, help="Names the default files."),
        click.option("--dtype", default=DEFAULT_DTYPE, show_default=True, help="Names the default files."),
        click.option("--max-nodes", type=click.IntRange(1), help="Largest tree. Default: as the profile measured, at most 256."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _load(profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str) -> tuple[Any, Trace]:
    where = default_profile_path(target, dtype)
    if profile is None and not where.exists():
        raise TraceError(f"this machine has no profile of {target} in {dtype} ({where})", hint="make one with: costmodel profile")
    trace = Trace.load(trace_path or default_trace_path(target, drafter, dtype))
    return load_profile(profile if profile is not None else where), trace


@main.command("replay", epilog="Example: selector replay --profile here.json --trace trace.safetensors --policies exact,priced")
@_input_options
@click.option(
    "--policies", default=",".join(DEFAULT_POLICIES), show_default=True, help=f"Comma-separated, of {', '.join(POLICY_NAMES)}."
)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Use the calibration of this plan.")
@json_option
@quiet_option
def replay_command(
    profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str, max_nodes: int | None,
    policies: str, plan_path: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Tokens per second of every policy on a trace, without running a model.

    Beside the asked policies: plain decoding, the best chain and the best fixed budget.
    """
    cost, trace = _load(profile, trace_path, target, drafter, dtype)
    plan = Plan.load(plan_path) if plan_path else None
    names = [name for name in policies.split(",") if name.strip()]
    calibration, scale = (plan.calibration, plan.reach_scale) if plan else (None, 1.0)
    with progress("replay", quiet=quiet):
        result = replay(trace, cost, names, max_nodes, calibration, reach_scale=scale)
    emit_json(result.to_dict()) if as_json else _print_replay(result, quiet)


@main.command("tune", epilog="Example: selector tune --profile here.json --trace trace.safetensors --out plan.json")
@_input_options
@click.option("--out", type=click.Path(path_type=Path), help="Plan file to write. Default: this machine's.")
@json_option
@quiet_option
def tune_command(
    profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str, max_nodes: int | None,
    out: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Find the fastest policy for a trace and a profile and write a plan.

    Everything fitted is judged on texts it was not fitted on. Where drafting does not pay the plan says plain.
    """
    cost, trace = _load(profile, trace_path, target, drafter, dtype)
    with progress("tune", total=2 * len(CANDIDATES), quiet=quiet) as advance:
        plan = tune(trace, cost, max_nodes, advance=lambda: advance(1))
    path = plan.save(out or default_plan_path(target, drafter, dtype))
    emit_json({**plan.to_dict(), "path": str(path)}) if as_json else _print_plan(plan, path)


@main.command("show", epilog="Example: selector show plan.json")
@click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))
@json_option
def show_command(plan_path: Path, as_json: bool) -> None:
    """Print a plan: what it does, why, and what it was compared with."""
    plan = Plan.load(plan_path)
    emit_json(plan.to_dict()) if as_json else _print_plan(plan, plan_path)


def _stdout() -> Console:
    """A console for tables: as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _print_replay(result: Replay, quiet: bool) -> None:
    table = Table(title=f"Replay of {result.num_texts} texts, {result.provenance} profile, at most {result.max_nodes} nodes")
    for name in ("policy", "tokens/s", "tokens/round", "nodes", "x plain", "95 %", "vs chain", "vs fixed"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in result.rows:
        low, high = row.speedup_interval
        table.add_row(
            row.name + ("" if row.role == "asked" else f" ({row.role})" if row.role != row.name else ""),
            f"{row.tokens_per_second:.2f}", f"{row.tokens_per_round:.2f}", f"{row.mean_nodes:.1f}",
            f"{row.speedup_over_plain:.3f}", f"{low:.3f}-{high:.3f}",
            f"{row.gain_over_best_chain:+.1%}", f"{row.gain_over_best_fixed:+.1%}",
        )  # fmt: skip
    out = _stdout()
    out.print(table)
    if result.what_if:
        pairs = "; ".join(f"{name} {pair[0]!r} traced, {pair[1]!r} profiled" for name, pair in result.what_if.items())
        out.print(f"A what-if: trace and profile differ ({pairs}).")
    if not quiet:
        for line in result.notes:
            out.print(line)


def _print_plan(plan: Plan, path: Path) -> None:
    out = _stdout()
    table = Table(title="Judged on texts that were not fitted on")
    for name in ("candidate", "policies", "tokens/s", "tokens/round", "nodes", "x plain", "vs fixed"):
        table.add_column(name, justify="left" if name in ("candidate", "policies") else "right", no_wrap=True)
    for row in plan.rows:
        table.add_row(
            row["name"], " / ".join(dict.fromkeys(row["policies"])), f"{row['tokens_per_second']:.2f}",
            f"{row['tokens_per_round']:.2f}", f"{row['mean_nodes']:.1f}", f"{row['speedup_over_plain']:.3f}",
            f"{row['gain_over_best_fixed']:+.1%}",
        )  # fmt: skip
    if plan.rows:
        out.print(table)
    price = "-" if plan.price is None else f"{plan.price:.2f} tokens per second"
    calibrated = "calibrated" if plan.calibration else "not calibrated"
    out.print(f"policy {plan.policy}, {calibrated}, price {price}, {plan.provenance} profile")
    out.print(f"why: {plan.reason or 'no reason recorded'}")
    out.print(f"plan: {path}", soft_wrap=True)
