"""Every so-manieth prompt of a file, written `6:5`: how train leaves prompts out and trace takes those very ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """The prompts whose number i in the file, counted from 0, has i % every == rest."""

    every: int
    rest: int

    def __str__(self) -> str:
        return f"{self.every}:{self.rest}"

    def of(self, items: Sequence[Item]) -> list[Item]:
        """The items of this share, in order."""
        return list(items[self.rest :: self.every])


class ShareType(click.ParamType):
    """Reads EVERY:REST."""

    name = "EVERY:REST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Share:
        """`6:5` as a Share; anything else is wrong usage."""
        if isinstance(value, Share):
            return value
        every, _, rest = str(value).partition(":")
        if not (every.isdecimal() and rest.isdecimal() and int(rest) < int(every)):
            self.fail(f"{value!r} is not EVERY:REST with REST below EVERY, such as 6:5 for every sixth prompt", param, ctx)
        return Share(int(every), int(rest))


SHARE = ShareType()
