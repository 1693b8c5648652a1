"""The `costmodel` command line: profile, show, list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from costmodel.backend import create_backend
from costmodel.clitools import TreebudgetGroup, emit_json, json_option, note, progress, quiet_option
from costmodel.errors import UsageError
from costmodel.loading import load_profile, measured_profiles
from costmodel.measure import num_steps, profile_backend
from costmodel.model import CostModel
from costmodel.plan import MeasurePlan
from costmodel.report import plot_cost
from costmodel.show import describe, diagnostic_lines, print_profile
from profiles import index
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET, default_profile_path

PLAN = MeasurePlan()


class Numbers(click.ParamType):
    """Whole numbers separated by commas; `a-b` is a run of them."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """`1-4,8` becomes (1, 2, 3, 4, 8)."""
        if isinstance(value, tuple):
            return value
        found: set[int] = set()
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
                self.fail(f"{value!r} is not a list such as 1-10,16,32", param, ctx)
            found |= set(range(int(first), int(last if dash else first) + 1))
        return tuple(sorted(found))


NUMBERS = Numbers()


def _text(values: tuple[int, ...]) -> str:
    return ",".join(str(value) for value in values)


@click.group(cls=TreebudgetGroup)
@click.version_option(package_name="treebudget")
def main() -> None:
    """Measure what a target model's verification costs on this machine, and look at what was measured."""


@main.command()
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="Model to time: a name, a folder or a hub id.")
@click.option("--drafter", default=None, help=f"Drafter to time, or `none`.  [default: {DEFAULT_DRAFTER}]")
@click.option("--dtype", default=DEFAULT_DTYPE, show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:0 ...")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads.  [default: what the engine chooses]")
@click.option("--backend", "backend_name", default="transformers", show_default=True, help="Engine to time.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="File.  [default: cache folder]")
@click.option("--verify-tokens", type=NUMBERS, default=_text(PLAN.verify_tokens), show_default=True, help="Sizes, root included.")
@click.option("--context", "contexts", type=NUMBERS, default=_text(PLAN.context_tokens), show_default=True, help="Cached tokens.")
@click.option("--requests", type=NUMBERS, default=_text(PLAN.num_requests), show_default=True, help="Requests in the batch.")
@click.option("--rounds", type=click.IntRange(1), default=PLAN.max_rounds, show_default=True, help="Samples of every shape.")
@click.option("--max-seconds", type=float, default=PLAN.max_seconds, show_default=True, help="Time to spend, about.")
@json_option
@quiet_option
def profile(
    target: str, drafter: str | None, dtype: str, device: str, threads: int | None, backend_name: str, out: Path | None,
    verify_tokens: tuple[int, ...], contexts: tuple[int, ...], requests: tuple[int, ...], rounds: int, max_seconds: float,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Time the target's forward over trees, and drafting, selecting and committing.

    Interleaved rounds, warm-up dropped. What was measured survives Ctrl-C and a kill: the same command goes on.

    \b
    Example:
      costmodel profile --dtype bfloat16 --out here.json
      costmodel profile --verify-tokens 1-8,16,32 --context 128,1024 --rounds 9
    """
    out = out or default_profile_path(target, dtype, device)
    if drafter is None and target == DEFAULT_TARGET:
        drafter = DEFAULT_DRAFTER
    plan = replace(
        PLAN, verify_tokens=verify_tokens, context_tokens=contexts, num_requests=requests, max_rounds=rounds,
        min_rounds=min(rounds, PLAN.min_rounds), max_seconds=max_seconds,
    )  # fmt: skip
    chosen = None if drafter in (None, "none") else drafter
    note(f"loading {target} with the {backend_name} backend", quiet)
    backend = create_backend(backend_name, target=target, drafter=chosen, dtype=dtype, device=device, threads=threads)
    partial = out.with_name(out.name + ".partial.jsonl")
    with progress("profiling", num_steps(plan), quiet) as advance:
        measured = profile_backend(backend, plan, partial_path=partial, progress=advance)
    measured.save(out)
    partial.unlink(missing_ok=True)
    cost = CostModel(measured)
    for line in diagnostic_lines(cost.diagnostics):
        note(line, quiet)
    if as_json:
        emit_json({**describe(cost), "path": str(out)})
    else:
        click.echo(str(out))


@main.command()
@click.argument("name_or_path", metavar="PROFILE", required=False)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Draw it: png, svg or pdf.")
@json_option
@quiet_option
def show(name_or_path: str | None, plot: Path | None, as_json: bool, quiet: bool) -> None:
    """Show a profile: cells, diagnostics, where it comes from. PROFILE is a file or a name of `costmodel list`.

    Without PROFILE, what this machine measured with the default target.

    \b
    Example:
      costmodel show a800-qwen3-8b --plot curve.png
    """
    default = default_profile_path()
    if name_or_path is None and not default.is_file():
        raise UsageError(
            "no PROFILE given and this machine has measured none", hint="see `costmodel profile` and `costmodel list`"
        )
    cost = load_profile(name_or_path or default)
    if plot is not None:
        plot_cost(cost, plot)
        note(f"picture: {plot}", quiet)
    if as_json:
        emit_json({**describe(cost), "plot": None if plot is None else str(plot)})
    else:
        print_profile(cost, Console(highlight=False))


@main.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the shipped profiles and those this machine has measured.

    \b
    Example:
      costmodel list --json
    """
    rows = [{"name": name, "where": "shipped", "path": str(index.find(name))} for name in index.names()]
    rows += [{"name": name, "where": "this machine", "path": str(path)} for name, path in measured_profiles().items()]
    if as_json:
        emit_json({"schema": "treebudget.profile-list", "version": 1, "profiles": rows})
        return
    for row in rows:
        click.echo(f"{row['name']}  ({row['where']})")


if __name__ == "__main__":
    main()
