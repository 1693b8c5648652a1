"""The profile: a JSON file of latencies with the identity of what was measured and where the numbers come from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from costmodel.cells import (
    Cell,
    StageCell,
    VerifyCell,
    cell_from_dict,
    cell_to_dict,
    cells_from_grid,
    cells_to_grids,
    pack_sizes,
    unpack_sizes,
)
from costmodel.errors import FileFormatError, ProfileError, UsageError
from costmodel.identity import Identity
from profiles.files import check_schema, read_json, write_atomic

SCHEMA = "treebudget.profile"
VERSION = 1
PROVENANCES = ("measured", "composed", "published", "estimated")
REQUEST_RULES = ("measured", "total_tokens")


@dataclass(frozen=True)
class Profile:
    """Latencies of one target, drafter, machine and engine.

    `requests_rule` says what a batch that was not measured costs: "measured" refuses, "total_tokens" prices r requests as
    one request with the same total of verify tokens. `executable_verify_tokens` lists the sizes a captured or padded
    engine runs; None means every measured size.
    """

    identity: Identity
    provenance: str
    source: str
    created: str
    verify: tuple[VerifyCell, ...]
    stages: tuple[StageCell, ...] = ()
    notes: tuple[str, ...] = ()
    requests_rule: str = "measured"
    executable_verify_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise ProfileError(f"provenance is {self.provenance!r}, expected one of {', '.join(PROVENANCES)}")
        if self.requests_rule not in REQUEST_RULES:
            raise ProfileError(f"requests_rule is {self.requests_rule!r}, expected one of {', '.join(REQUEST_RULES)}")
        if not self.verify:
            raise ProfileError("a profile needs at least one verify cell, found none")
        _check_unique(self.verify, ("verify_tokens", "context_tokens", "num_requests"))
        _check_unique(self.stages, ("stage", "size", "context_tokens", "num_requests"))

    @classmethod
    def from_points(
        cls,
        verify_tokens: ArrayLike,
        seconds: ArrayLike,
        context_tokens: ArrayLike = 0,
        num_requests: ArrayLike = 1,
        *,
        draft_seconds: float = 0.0,
        select_seconds: float = 0.0,
        commit_seconds: float = 0.0,
        identity: Identity | None = None,
        provenance: str = "measured",
        source: str = "points given by the caller",
    ) -> Profile:
        """A profile from arrays that broadcast against each other; stage seconds hold at every context and size.

        Raises ProfileError for sizes below 1, non-finite or non-positive seconds, and a shape given twice; UsageError for
        arrays that do not fit each other, fewer seconds than points, and what is no number.
        """
        try:
            measured = np.asarray(seconds, dtype=float)
            arrays = np.broadcast_arrays(verify_tokens, context_tokens, num_requests, measured)
        except (TypeError, ValueError) as error:
            raise UsageError(f"verify_tokens, seconds, context_tokens and num_requests do not fit each other: {error}") from error
        if measured.size != arrays[3].size:
            raise UsageError(f"seconds has {measured.size} values for {arrays[3].size} points")
        sizes, contexts, requests = (_whole(array) for array in arrays[:3])
        cells = tuple(
            VerifyCell(t, c, r, float(s)) for t, c, r, s in zip(sizes, contexts, requests, arrays[3].ravel(), strict=True)
        )
        given = {"draft": draft_seconds, "select": select_seconds, "commit": commit_seconds}
        stages = tuple(
            StageCell(stage, 1, 0, r, float(value)) for stage, value in given.items() for r in sorted(set(requests)) if value != 0
        )
        return cls(identity or Identity(), provenance, source, now_utc(), cells, stages)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file. Raises FileFormatError (not JSON, pickled, another schema) or ProfileError (bad content)."""
        return cls.from_dict(read_json(path, SCHEMA, VERSION), where=str(path))

    @classmethod
    def from_dict(cls, document: dict[str, Any], where: str = "profile") -> Profile:
        """Build from the JSON object of a profile file."""
        check_schema(document, SCHEMA, VERSION, where)
        try:
            verify = [cell_from_dict(VerifyCell, item) for item in document.get("verify", [])]
            for grid in document.get("verify_grid", []):
                verify += cells_from_grid(grid)
            return cls(
                identity=Identity.from_dict(document["identity"]),
                provenance=document["provenance"],
                source=str(document.get("source", "")),
                created=str(document.get("created", "")),
                verify=tuple(verify),
                stages=tuple(cell_from_dict(StageCell, item) for item in document.get("stages", [])),
                notes=tuple(str(item) for item in document.get("notes", [])),
                requests_rule=document.get("requests_rule", "measured"),
                executable_verify_tokens=unpack_sizes(document.get("executable_verify_tokens")),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise FileFormatError(f"{where}: malformed profile ({error!r})") from error
        except (ProfileError, UsageError) as error:
            raise ProfileError(f"{where}: {error}", hint=error.hint) from error

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this profile; cells without samples are packed into `verify_grid`."""
        bare = [cell for cell in self.verify if _is_bare(cell)]
        full = [cell for cell in self.verify if not _is_bare(cell)]
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "version": VERSION,
            "identity": {key: value for key, value in self.identity.to_dict().items() if value is not None},
            "provenance": self.provenance,
            "source": self.source,
            "created": self.created,
            "notes": list(self.notes),
            "requests_rule": self.requests_rule,
            "verify": [cell_to_dict(cell) for cell in full],
            "verify_grid": cells_to_grids(bare),
            "stages": [cell_to_dict(cell) for cell in self.stages],
        }
        if self.executable_verify_tokens is not None:
            document["executable_verify_tokens"] = pack_sizes(self.executable_verify_tokens)
        return document

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile as JSON, atomically; one line per cell so that files diff well."""
        return write_atomic(path, _lines(self.to_dict()))


def now_utc() -> str:
    """The present as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _is_bare(cell: VerifyCell) -> bool:
    return not cell.num_samples and not cell.flags and (cell.low_seconds is None) == (cell.high_seconds is None)


def _whole(array: np.ndarray) -> list[int]:
    try:
        values = np.asarray(array, dtype=float).ravel()
    except ValueError:
        values = np.array([np.nan])
    if not np.all(np.isfinite(values)) or np.any(values != np.floor(values)):
        raise UsageError("verify_tokens, context_tokens and num_requests must be whole numbers")
    return [int(value) for value in values]


def _check_unique(cells: Sequence[Cell], names: tuple[str, ...]) -> None:
    seen: set[tuple[Any, ...]] = set()
    for cell in cells:
        key = tuple(getattr(cell, name) for name in names)
        if key in seen:
            where = ", ".join(f"{name} {value}" for name, value in zip(names, key, strict=True))
            raise ProfileError(f"a shape is given twice: {where}")
        seen.add(key)


def _lines(document: dict[str, Any]) -> str:
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
            parts.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
