"""Write docs/cli.md: every command's --help, so that the reference cannot drift from the programs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click
from click.testing import CliRunner

PROGRAMS = ("costmodel", "selector", "decoder")
WIDTH = 120


def helps(program: click.Group, command: click.Command, path: tuple[str, ...]) -> list[str]:
    """The help of a command and of everything below it, in Markdown, as the program prints it."""
    result = CliRunner().invoke(program, [*path[1:], "--help"], prog_name=path[0], terminal_width=WIDTH, max_content_width=WIDTH)
    parts = [f"## `{' '.join(path)}`\n\n```\n{result.output}```\n"]
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            parts += helps(program, child, (*path, name))
    return parts


def page() -> str:
    """The whole page."""
    parts = ["# Command lines\n\nWritten by `make docs` from `--help`. Exit codes: 0 done, 1 failed, 2 wrong usage.\n"]
    for program in PROGRAMS:
        main = importlib.import_module(f"{program}.cli").main
        parts += helps(main, main, (program,))
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/cli.md").write_text(page(), "utf-8")
