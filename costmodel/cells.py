"""The measured points of a profile: one cell per shape that was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from costmodel.errors import ProfileError
from profiles.checks import LARGEST, is_number, is_whole

STAGES = ("draft", "select", "commit")


@dataclass(frozen=True)
class VerifyCell:
    """Seconds of one target forward over `verify_tokens` rows in all (roots included) at one context and batch.

    `seconds` is the median, or for a bimodal point the median of its larger mode; `low_seconds` and `high_seconds` are
    the 10th and 90th percentile, None where unknown. `num_samples` is 0 where nothing was sampled here (published tables).
    """

    verify_tokens: int
    context_tokens: int
    num_requests: int
    seconds: float
    low_seconds: float | None = None
    high_seconds: float | None = None
    num_samples: int = 0
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_cell(self, {"verify_tokens": 1, "context_tokens": 0, "num_requests": 1, "num_samples": 0})
        if not self.seconds > 0 or self.low_seconds == 0:
            raise ProfileError(f"verify cell has seconds {self.seconds!r}, expected a positive number")


@dataclass(frozen=True)
class StageCell:
    """Seconds of one draft, select or commit; `size` is the block size, the number of nodes or of committed tokens."""

    stage: str
    size: int
    context_tokens: int
    num_requests: int
    seconds: float
    low_seconds: float | None = None
    high_seconds: float | None = None
    num_samples: int = 0
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ProfileError(f"stage is {self.stage!r}, expected one of {', '.join(STAGES)}")
        _check_cell(self, {"size": 0, "context_tokens": 0, "num_requests": 1, "num_samples": 0})
        if not self.seconds >= 0:
            raise ProfileError(f"{self.stage} cell has seconds {self.seconds!r}, expected a number that is not negative")


Cell = TypeVar("Cell", VerifyCell, StageCell)


def _check_cell(cell: VerifyCell | StageCell, minimums: Mapping[str, int]) -> None:
    for name, least in minimums.items():
        value = getattr(cell, name)
        if not is_whole(value, least, LARGEST):
            raise ProfileError(f"cell has {name} {value!r}, expected an integer of at least {least}")
    for name in ("seconds", "low_seconds", "high_seconds"):
        value = getattr(cell, name)
        if value is None and name != "seconds":
            continue
        if not is_number(value, -1e9) or not (value == 0 or 1e-12 <= abs(value) <= 1e9):
            raise ProfileError(f"cell has {name} {value!r}, expected finite seconds, 0 or from 1e-12 to 1e9")
    low, high = cell.low_seconds, cell.high_seconds
    if (low is None) != (high is None):
        raise ProfileError(f"cell has low_seconds {low!r} and high_seconds {high!r}, which come together or not at all")
    if low is not None and high is not None and not 0 <= low <= cell.seconds * (1 + 1e-6) <= high * (1 + 2e-6):
        raise ProfileError(f"cell has seconds {cell.seconds!r} outside of low_seconds {low!r} to high_seconds {high!r}")


def cell_from_dict(kind: type[Cell], document: Mapping[str, Any]) -> Cell:
    """A cell from its JSON object. Raises ProfileError on unknown, missing or impossible fields."""
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ProfileError(f"cell has unknown fields: {', '.join(unknown)}")
    values = dict(document)
    values["flags"] = tuple(str(flag) for flag in values.get("flags", ()))
    try:
        return kind(**values)
    except TypeError as error:
        raise ProfileError(f"cell lacks fields: {error}") from error


def cell_to_dict(cell: VerifyCell | StageCell) -> dict[str, Any]:
    """The JSON object of a cell, without what is unknown or empty."""
    document = {field.name: getattr(cell, field.name) for field in fields(cell)}
    return {key: list(value) if key == "flags" else value for key, value in document.items() if value not in (None, ())}


def cells_to_grids(cells: list[VerifyCell]) -> list[dict[str, Any]]:
    """Cells without samples and flags, as one compact object per batch and set of sizes.

    `high_seconds_by_context_tokens` is there where cells carry an interval, and `low_...` where its lower end is not the
    seconds themselves.
    """
    rows: dict[tuple[int, int, bool], dict[int, VerifyCell]] = {}
    for cell in cells:
        rows.setdefault((cell.num_requests, cell.context_tokens, cell.high_seconds is not None), {})[cell.verify_tokens] = cell
    groups: dict[tuple[int, bool, tuple[int, ...]], dict[int, list[VerifyCell]]] = {}
    for (requests, context, bounded), row in sorted(rows.items()):
        sizes = tuple(sorted(row))
        groups.setdefault((requests, bounded, sizes), {})[context] = [row[size] for size in sizes]
    grids: list[dict[str, Any]] = []
    for (requests, bounded, sizes), lines in groups.items():
        grid: dict[str, Any] = {"num_requests": requests, "verify_tokens": list(sizes)}
        names = ["seconds"]
        if bounded:
            same = all(cell.low_seconds == cell.seconds for line in lines.values() for cell in line)
            names += ["high_seconds"] if same else ["low_seconds", "high_seconds"]
        for name in names:
            grid[f"{name}_by_context_tokens"] = {str(at): [getattr(cell, name) for cell in line] for at, line in lines.items()}
        grids.append(grid)
    return grids


def cells_from_grid(grid: Mapping[str, Any]) -> list[VerifyCell]:
    """The cells of one compact object. Raises ProfileError where lengths differ."""
    cells = []
    try:
        sizes, requests = grid["verify_tokens"], grid.get("num_requests", 1)
        rows = grid["seconds_by_context_tokens"]
        highs = grid.get("high_seconds_by_context_tokens", {})
        lows = grid.get("low_seconds_by_context_tokens", rows if highs else {})
        for context, seconds in rows.items():
            high = highs.get(context, [None] * len(sizes))
            low = lows.get(context, [None] * len(sizes))
            if not len(seconds) == len(high) == len(low) == len(sizes):
                raise ProfileError(f"verify_grid at context {context} has {len(seconds)} seconds for {len(sizes)} sizes")
            points = zip(sizes, seconds, low, high, strict=True)
            cells += [VerifyCell(size, int(context), requests, *values) for size, *values in points]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProfileError(f"verify_grid is malformed: {error!r}") from error
    return cells


def pack_sizes(sizes: Sequence[int]) -> list[int] | dict[str, int]:
    """A list of sizes, or {"first", "last"} where it is one run of whole numbers."""
    run = len(sizes) > 2 and list(sizes) == list(range(sizes[0], sizes[-1] + 1))
    return {"first": sizes[0], "last": sizes[-1]} if run else list(sizes)


def unpack_sizes(packed: Any) -> tuple[int, ...] | None:
    """The inverse of `pack_sizes`; None stays None."""
    if packed is None:
        return None
    found = (packed["first"], packed["last"]) if isinstance(packed, Mapping) else packed
    sizes = tuple(found) if isinstance(found, (list, tuple)) else ()
    whole = all(is_whole(size, 1, LARGEST) for size in sizes)
    if not sizes or not whole or (isinstance(packed, Mapping) and not 0 <= sizes[1] - sizes[0] <= 10**6):
        raise ProfileError(f"executable_verify_tokens is {packed!r}, expected whole numbers of at least 1, or first and last")
    return tuple(range(sizes[0], sizes[1] + 1)) if isinstance(packed, Mapping) else sizes
