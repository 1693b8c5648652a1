"""What every command line of this project shares: exit codes, JSON output, progress and notes on stderr."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from profiles.errors import TreebudgetError, UsageError
from profiles.files import write_atomic

__all__ = [
    "POSITIVE",
    "FiniteRange",
    "TreebudgetGroup",
    "check_output",
    "console",
    "emit_json",
    "json_option",
    "note",
    "progress",
    "quiet_option",
    "to_jsonable",
    "write_atomic",
]

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SPARSE_SECONDS = 15.0  # between two progress lines where stderr is no terminal

console = Console(stderr=True, highlight=False)


class TreebudgetGroup(click.Group):
    """A click group that turns library errors into messages on stderr and exit codes, without a traceback.

    `resumable` names the commands that go on where they were interrupted.
    """

    def __init__(self, *args: Any, resumable: Sequence[str] = (), **kwargs: Any) -> None:
        self.resumable = tuple(resumable)
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        kwargs["context_settings"] = {**settings, **kwargs.get("context_settings", {})}
        super().__init__(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; UsageError exits 2, any other library or file error 1, Ctrl-C 130."""
        try:
            with warnings_as_notes():
                return super().invoke(ctx)
        except TreebudgetError as error:
            _print_error(str(error), error.hint)
            code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
        except BrokenPipeError:
            raise
        except OSError as error:
            _print_error(str(error), None)
            code = EXIT_FAILED
        except KeyboardInterrupt:
            kept = "what was done is kept; run the same command again to go on"
            click.echo(f"\ninterrupted{': ' + kept if ctx.invoked_subcommand in self.resumable else ''}", err=True)
            code = EXIT_INTERRUPTED
        raise click.exceptions.Exit(code)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print what the libraries warn a user of as one line on stderr, without the place in the code."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if category is UserWarning:
                click.echo(f"warning: {message}", err=True)
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _print_error(message: str, hint: str | None) -> None:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


class FiniteRange(click.FloatRange):
    """A float range that takes neither NaN, which compares with nothing, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or wrong usage."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


POSITIVE = FiniteRange(0, 1e12, min_open=True)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` (parameter `as_json`): one JSON document on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def quiet_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--quiet` (parameter `quiet`): no progress and no notes on stderr."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")(function)


def note(message: str, quiet: bool = False) -> None:
    """Print one line on stderr unless `quiet`."""
    if not quiet:
        click.echo(message, err=True)


def check_output(path: Path | None) -> None:
    """Make the folder of a file that a long command will write at its end, and raise UsageError where it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written", hint="name a file in a folder that you may write to")


def to_jsonable(value: Any) -> Any:
    """`value` with numpy scalars and arrays, tuples and paths turned into plain JSON types; NaN and infinity become None."""
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return to_jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def emit_json(document: Any) -> None:
    """Print `document` as one JSON document on stdout."""
    click.echo(json.dumps(to_jsonable(document), indent=2, ensure_ascii=False))


class Advance(Protocol):
    """What `progress` hands out: call it after each step, with an optional short note."""

    def __call__(self, steps: float = 1, note: str = "") -> None:
        """Count `steps` more as done."""


@contextmanager
def progress(description: str, total: float | None = None, quiet: bool = False) -> Iterator[Advance]:
    """Show progress on stderr while the block runs; yields `advance(steps=1, note="")`.

    A bar on a terminal, a line every 15 seconds elsewhere, nothing when `quiet`.
    """
    if quiet:
        yield lambda steps=1, note="": None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
            task = bar.add_task(description, total=total, note="")
            yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)
    else:
        lines = _SparseLines(description, total)
        yield lines
        lines.finish()


class _SparseLines:
    """Progress for logs: one line every SPARSE_SECONDS and one at the end."""

    def __init__(self, description: str, total: float | None) -> None:
        self.description = description
        self.total = total
        self.done: float = 0
        self.started = self.printed = time.monotonic()
        click.echo(f"{description} ...", err=True)

    def __call__(self, steps: float = 1, note: str = "") -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.printed >= SPARSE_SECONDS:
            self.printed = now
            of = f"/{self.total:g}" if self.total else ""
            left = (now - self.started) * (self.total / self.done - 1) if self.total and self.done else 0.0
            about = f", about {left:.0f} s left" if left > 0 and " left" not in note else ""
            click.echo(f"{self.description}: {self.done:.4g}{of} {note}{about}".rstrip(), err=True)

    def finish(self) -> None:
        click.echo(f"{self.description}: done in {time.monotonic() - self.started:.1f} s", err=True)
