"""What the commands of `selector` share: which profile and trace to read, and a console for tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from costmodel import load_profile
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET, default_profile_path, default_trace_path
from selector.errors import TraceError
from selector.plan import SCORER_FIELDS, Plan
from selector.trace import Trace

FILE = click.Path(dir_okay=False, path_type=Path)


def input_options(function: Any) -> Any:
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


def load_inputs(profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str) -> tuple[Any, Trace]:
    """The cost model and the trace that were asked for; raises TraceError with the next step where there is none."""
    where = default_profile_path(target, dtype)
    if profile is None and not where.exists():
        raise TraceError(f"this machine has no profile of {target} in {dtype} ({where})", hint="make one with: costmodel profile")
    trace = Trace.load(trace_path or default_trace_path(target, drafter, dtype))
    return load_profile(profile if profile is not None else where), trace


def load_plan(path: Path | None, trace: Trace) -> Plan | None:
    """The plan that was asked for, if any; raises PlanError for one of another target, drafter or block size than the trace's."""
    return None if path is None else Plan.load(path, expect={name: trace.identity.get(name) for name in SCORER_FIELDS})


def table_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False, markup=False)  # names and paths may hold brackets
    return console if console.is_terminal else Console(highlight=False, markup=False, width=140)
