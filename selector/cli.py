"""The command `selector`: tune, replay, explain and show."""

from __future__ import annotations

import click

from costmodel.clitools import TreebudgetGroup
from selector.commands.explain import explain
from selector.commands.replay import replay
from selector.commands.show import show
from selector.commands.tune import tune


@click.group(cls=TreebudgetGroup, resumable=("tune",))
def main() -> None:
    """Pick the draft trees that yield the most tokens per second."""


for _command in (tune, replay, explain, show):
    main.add_command(_command)
