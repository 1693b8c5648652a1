"""Parameter types of `costmodel whatif`, and the one acceptance that its options must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from costmodel.errors import UsageError
from costmodel.planning import acceptance as forms
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.errors import AcceptanceMissing
from profiles.checks import LARGEST

NAMES = (
    "--survival", "--conditional", "--acceptance-length", "--acceptance-rate", "--acceptance-lengths", "--acceptance", "--trace",
)  # fmt: skip


class Decimals(click.ParamType):
    """Decimal numbers separated by commas."""

    name = "x,x,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """`.9,.7` becomes (0.9, 0.7)."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list such as 0.85,0.7,0.5", param, ctx)


class WholeNumbers(click.ParamType):
    """Whole numbers separated by commas."""

    name = "n,n,..."

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """`1,8` becomes (1, 8)."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list such as 1,8,64", param, ctx)
        if min(found) < self.least:
            self.fail(f"{value!r} has a number below {self.least}", param, ctx)
        if max(found) > LARGEST:
            self.fail(f"a number is above {LARGEST}", param, ctx)
        return found


def given_acceptance(
    survival: Sequence[float] | None, conditional: Sequence[float] | None, length: float | None, rate: float | None,
    lengths: Sequence[float] | None, file: Path | None, trace: Path | None, drafted: int | None,
    siblings: Sequence[float] | None, tree: bool, max_nodes: int,
) -> Acceptance:  # fmt: skip
    """The acceptance of exactly one form. Raises AcceptanceMissing, UsageError (two forms) or ImpossibleAcceptance."""
    from costmodel.planning.acceptfile import read_acceptance, read_trace

    makers: list[tuple[str, Any, Callable[[Any], Acceptance]]] = [
        ("--survival", survival, lambda value: forms.from_survival(value, max_nodes)),
        ("--conditional", conditional, lambda value: forms.from_conditional(value, max_nodes)),
        ("--acceptance-length", length, lambda value: forms.from_length(value, _drafted(drafted, "--acceptance-length"))),
        ("--acceptance-rate", rate, lambda value: forms.from_rate(value, _drafted(drafted, "--acceptance-rate"))),
        ("--acceptance-lengths", lengths, forms.from_lengths),
        ("--acceptance", file, read_acceptance),
        ("--trace", trace, read_trace),
    ]
    chosen = [item for item in makers if item[1] is not None]
    if not chosen:
        raise AcceptanceMissing("acceptance is not given, and it is never assumed", hint=f"give one of {', '.join(NAMES)}")
    if len(chosen) > 1:
        raise UsageError(f"acceptance is given twice: {', '.join(name for name, _, _ in chosen)}", hint="give one of them")
    name, value, make = chosen[0]
    found = make(value)
    if siblings:
        return replace(found, siblings=tuple(siblings))
    if tree and not found.siblings:
        raise UsageError("--tree needs to know how often the second, third ... candidate is right", hint="give --siblings")
    return found if tree or name == "--acceptance" else replace(found, siblings=())


def _drafted(drafted: int | None, name: str) -> int:
    if drafted is None:
        raise UsageError(f"{name} says nothing without the number of drafted tokens", hint="add --drafted K (root excluded)")
    return drafted


def prices_of(given: Sequence[str], profiles: Sequence[str]) -> list[float | None]:
    """Prices per hour by profile from `2.5` (all) or `NAME=2.5`. Raises UsageError."""
    common: float | None = None
    named: dict[str, float] = {}
    for item in given:
        name, equals, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise UsageError(f"--price {item!r} is no price", hint="use --price 2.5 or --price a100-qwen3-8b=1.8") from error
        if not 0 < value < float("inf"):
            raise UsageError(f"--price {item!r} must be positive")
        if not equals:
            common = value
        elif name in profiles:
            named[name] = value
        else:
            raise UsageError(f"--price names {name!r}, which is no --profile of this question")
    return [named.get(name, common) for name in profiles]
