"""The `costmodel` command line: profile, show, list, compose, estimate, whatif."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from costmodel.clicompose import compose, estimate
from costmodel.cliprofile import profile
from costmodel.clitools import TreebudgetGroup, emit_json, json_option, note, quiet_option
from costmodel.errors import UsageError
from costmodel.listing import list_profiles
from costmodel.loading import load_profile
from costmodel.planning.commands import whatif
from costmodel.report import plot_cost
from costmodel.show import describe, print_profile
from profiles.paths import default_profile_path


@click.group(cls=TreebudgetGroup, resumable=("profile",))
@click.version_option(package_name="treebudget")
def main() -> None:
    """Measure, compose or estimate what a target model's verification costs, and look at it."""


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
        print_profile(cost, Console(highlight=False, markup=False))


for _command in (profile, list_profiles, compose, estimate, whatif):
    main.add_command(_command)

if __name__ == "__main__":
    main()
