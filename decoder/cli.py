"""The `decoder` command line: pull, trace, train, generate, bench, check."""

from __future__ import annotations

import click

from costmodel.clitools import TreebudgetGroup
from decoder.commands.bench import bench
from decoder.commands.check import check
from decoder.commands.generate import generate
from decoder.commands.pull import pull
from decoder.commands.trace import trace
from decoder.commands.train import train


@click.group(cls=TreebudgetGroup, resumable=("trace", "train"))
@click.version_option(package_name="treebudget")
def main() -> None:
    """Decode with draft trees chosen by what this machine measured, losslessly; and record, train, bench and check.

    \b
    Example:
      decoder generate "Write a function that reverses a list."
    """


for _command in (pull, trace, train, generate, bench, check):
    main.add_command(_command)


if __name__ == "__main__":
    main()
