"""The outcome of tuning: which policy, with which price, calibration and sizes, for what, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from profiles.errors import FileFormatError
from profiles.files import read_json, write_atomic
from selector.calibration import Calibration
from selector.errors import PlanError
from selector.registry import parse_policy

SCHEMA, VERSION = "treebudget.plan", 1


@dataclass(frozen=True)
class Plan:
    """Settings of a selector and the evidence for them.

    Attributes:
        policy: a name `parse_policy` understands; "plain" where drafting does not pay.
        price: tokens per second, the long-run throughput replay found; None where it is not needed or unknown.
        calibration: per-depth temperature and scale, or None.
        reach_scale: accepted nodes over expected ones that is left after calibration.
        top_k, max_nodes: of the trellis and the tree.
        gains: what replay says of the chosen policy, JSON types (see `tune`).
        rows: one record per candidate that was compared.
        identity: what the plan is for: target, drafter, block_size, dtype, device, mode, ...; None is not compared.
        provenance: of the profile: measured, composed, published or estimated.
        reason: in words, why this policy.
    """

    policy: str = "priced"
    price: float | None = None
    calibration: Calibration | None = None
    reach_scale: float = 1.0
    top_k: int = 16
    max_nodes: int = 256
    gains: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    provenance: str = "measured"
    reason: str = ""

    def __post_init__(self) -> None:
        """Check; raises PolicyError or PlanError."""
        parse_policy(self.policy)
        if self.top_k < 1 or self.max_nodes < 0:
            raise PlanError(f"top_k must be at least 1 and max_nodes at least 0, got {self.top_k} and {self.max_nodes}")

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise PlanError naming the first field known on both sides that differs."""
        for name, value in expected.items():
            found = self.identity.get(name)
            if value is not None and found is not None and found != value:
                raise PlanError(
                    f"plan does not fit: {name} is {found!r} in the plan, expected {value!r}",
                    hint="run selector tune again for what you decode with",
                    field=name,
                )

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        document = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        document["calibration"] = self.calibration.to_dict() if self.calibration else None
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; raises PlanError for unknown or malformed fields."""
        values = {key: value for key, value in document.items() if key not in ("schema", "version")}
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            raise PlanError(f"plan has unknown fields: {', '.join(unknown)}", hint="update treebudget")
        try:
            if values.get("calibration") is not None:
                values["calibration"] = Calibration.from_dict(values["calibration"])
            return cls(**values)
        except (TypeError, ValueError, KeyError) as error:
            raise PlanError(f"plan is malformed: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan, whole or not at all."""
        return write_atomic(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: Mapping[str, Any] | None = None) -> Plan:
        """Read a plan; raises PlanError if it is none or, with `expect`, if a field of its identity differs."""
        try:
            plan = cls.from_dict(read_json(path, SCHEMA, VERSION))
        except FileNotFoundError as error:
            raise PlanError(f"no plan at {path}", hint="make one with: selector tune --out PLAN") from error
        except FileFormatError as error:
            raise PlanError(str(error), hint=error.hint) from error
        if expect is not None:
            plan.check(expect)
        return plan
