"""The `costmodel` command line: profile, show, list, compose, estimate."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from costmodel.clicompose import compose, estimate
from costmodel.cliprofile import profile
from costmodel.clitools import TreebudgetGroup, emit_json, json_option, note, quiet_option
from costmodel.errors import UsageError
from costmodel.loading import load_profile, measured_profiles
from costmodel.planning.commands import whatif
from costmodel.profile import Profile
from costmodel.report import plot_cost
from costmodel.show import describe, print_profile
from profiles import index
from profiles.paths import default_profile_path


@click.group(cls=TreebudgetGroup)
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
        print_profile(cost, Console(highlight=False))


@main.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the shipped profiles and those this machine has measured.

    \b
    Example:
      costmodel list --json
    """
    found = [(name, "shipped", index.find(name)) for name in index.names()]
    found += [(name, "this machine", path) for name, path in measured_profiles().items()]
    rows = [{"name": name, "where": where, "path": str(path), **_head(path)} for name, where, path in found]
    if as_json:
        emit_json({"schema": "treebudget.profile-list", "version": 1, "profiles": rows})
        return
    for row in rows:
        click.echo(f"{row['name']}  ({row['where']}; {row['provenance']}; {row['source']})")


def _head(path: Path) -> dict[str, str | None]:
    read = Profile.load(path)
    return {"provenance": read.provenance, "source": read.source, "device": read.identity.device, "target": read.identity.target}


for _command in (profile, compose, estimate, whatif):
    main.add_command(_command)

if __name__ == "__main__":
    main()
