"""The outcome of tuning: which policy, with which scorer, calibration, prices and sizes, for what, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from profiles.checks import is_number, is_whole
from profiles.errors import FileFormatError
from profiles.files import file_sha256, read_json, write_atomic
from selector.calibration import Calibration
from selector.errors import PlanError, PolicyError
from selector.policies import Policy
from selector.price import PriceRange
from selector.registry import parse_policy
from selector.scoring import EdgeScorer
from selector.smart import Smart
from selector.taps import Taps

SCHEMA, VERSION = "treebudget.plan", 2
# In which a scorer must fit what it is used for
SCORER_FIELDS = ("target", "drafter", "block_size", "target_sha256", "drafter_sha256")
_NOT_WRITTEN = ("folder", "attached")
_KINDS = {
    "policy": str, "provenance": str, "reason": str, "gains": dict, "identity": dict, "policy_settings": dict, "fallback": dict,
    "rows": list, "prices": list, "notes": list,
}  # fmt: skip


@dataclass(frozen=True)
class ScorerFile:
    """A scorer beside its plan: the file's name, its sha256, and what it was trained for."""

    file: str
    sha256: str
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the file lies beside the plan; raises PlanError."""
        if not isinstance(self.file, str) or Path(self.file).name != self.file or self.file in ("", ".."):
            raise PlanError(f"a plan's scorer lies beside it, {self.file!r} is no plain file name", field="scorer")
        if not isinstance(self.sha256, str) or not isinstance(self.identity, dict):
            raise PlanError(f"a plan's scorer has sha256 and identity, got {self.sha256!r}, {self.identity!r}", field="scorer")


@dataclass(frozen=True)
class Plan:
    """Settings of a selector and the evidence for them.

    Attributes:
        policy: a name `parse_policy` understands; "plain" where drafting does not pay. policy_settings: what the name
            leaves open, by field of the policy.
        price: tokens per second, the long-run throughput replay found; None where it is not needed or unknown.
        prices: the same by range of contexts.
        calibration: per-depth temperature and scale, or None. With a scorer it is what drafts fall back to.
        scorer: the file of path-conditioned chances of acceptance beside the plan, or None.
        scoring_seconds: of one round, as measured where it was tuned; part of what a round costs.
        fallback: in words, what happens on drift, in a pause and outside the traced contexts.
        reach_scale: accepted nodes over expected ones that is left after calibration.
        top_k, max_nodes: of the trellis and the tree.
        gains: what replay says of the chosen policy, JSON types (see `tune`).
        rows: one record per candidate that was compared.
        identity: what the plan is for: target, drafter, block_size, dtype, device, mode, ...; None is not compared.
            `context_tokens` is [smallest, largest] context of the traced rounds.
        provenance: of the profile: measured, composed, published or estimated.
        reason: in words, why this policy. notes: what else is to be known of the tuning.
        folder: where the plan was read from. attached: a scorer in memory, written beside the plan by `save`. Neither is
            part of the file.
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
    policy_settings: dict[str, Any] = field(default_factory=dict)
    prices: list[PriceRange] = field(default_factory=list)
    scorer: ScorerFile | None = None
    scoring_seconds: float = 0.0
    fallback: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = field(default=None, compare=False, repr=False)
    attached: EdgeScorer | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check; raises PolicyError or PlanError."""
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"plan: {name} must be a {kind.__name__}, got {getattr(self, name)!r}", field=name)
        self.make_policy()
        for name, lowest in (("top_k", 1), ("max_nodes", 0)):
            value = getattr(self, name)
            if not is_whole(value, lowest):
                raise PlanError(f"plan: {name} must be a whole number of at least {lowest}, got {value!r}", field=name)
        prices = [("price", self.price)] if self.price is not None else []
        for name, value in (*prices, *(("prices", item.price) for item in self.prices), ("reach_scale", self.reach_scale)):
            if not is_number(value, 0.0) or value == 0:
                raise PlanError(f"plan: {name} must be a positive number, got {value!r}", field=name)
        if not is_number(self.scoring_seconds, 0.0):
            raise PlanError(f"plan: scoring_seconds must not be negative, got {self.scoring_seconds!r}", field="scoring_seconds")
        ranges = [("prices", [item.context_low, item.context_high]) for item in self.prices]
        for name, pair in (*ranges, ("identity", self.identity.get("context_tokens"))):
            if pair is not None and not _is_range(pair):
                raise PlanError(f"plan: contexts in {name} must be two whole numbers, the lower first, got {pair!r}", field=name)

    def make_policy(self) -> Policy:
        """The policy with the plan's settings; raises PolicyError or PlanError."""
        policy = parse_policy(self.policy)
        known = {item.name: type(item.default) for item in fields(policy)} if isinstance(policy, Taps | Smart) else {}
        for name, value in self.policy_settings.items():
            if name not in known or not (is_whole if known[name] is int else is_number)(value, -1e300):
                raise PlanError(
                    f"plan: policy {self.policy} has no such settings: allowed are numbers for {', '.join(known) or 'nothing'}, "
                    f"got {value!r} for {name}",
                    field="policy_settings",
                )
        return replace(policy, **self.policy_settings) if self.policy_settings else policy  # type: ignore[type-var]

    @property
    def charge(self) -> float | Sequence[PriceRange] | None:
        """What replay is to charge `priced`: the prices found for it; None, which has replay find one, where it is of another."""
        return (self.prices or self.price) if self.policy == "priced" else None

    @property
    def has_scorer(self) -> bool:
        """Whether edges are scored, by a file beside the plan or a scorer in memory."""
        return self.scorer is not None or self.attached is not None

    @property
    def context_range(self) -> tuple[int, int] | None:
        """Smallest and largest context of the rounds the plan was tuned on, None if unknown."""
        found = self.identity.get("context_tokens")
        return None if found is None else (int(found[0]), int(found[1]))

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise PlanError naming the first field known on both sides that differs, in the plan or its scorer."""
        for name, value in expected.items():
            _refuse(name, self.identity.get(name), value, "the plan")
        for name in SCORER_FIELDS if self.scorer is not None else ():
            assert self.scorer is not None
            _refuse(name, self.scorer.identity.get(name), expected.get(name), "the plan's scorer")

    def load_scorer(self) -> EdgeScorer | None:
        """The plan's scorer, read from beside the plan and checked; None if it has none.

        Raises PlanError if the file is missing or another one than was written with the plan, ScorerError if it is no
        scorer or was trained for another target, drafter or block size than the plan.
        """
        found = self.attached
        if found is None and self.scorer is not None:
            from selector.scorer import Scorer  # compiled code: loaded only where a plan has one

            found = Scorer.load(self._scorer_path())
        if found is not None:
            found.check({name: self.identity.get(name) for name in SCORER_FIELDS})
        return found

    def _scorer_path(self) -> Path:
        """The scorer's file beside the plan, checked; raises PlanError."""
        assert self.scorer is not None
        path = (self.folder or Path()) / self.scorer.file
        if not path.exists():
            hint = "keep the scorer's file beside the plan, or run selector tune again"
            raise PlanError(f"the plan's scorer is missing: {path}", hint=hint, field="scorer")
        if file_sha256(path) != self.scorer.sha256:
            hint = "run selector tune again: plan and scorer belong together"
            raise PlanError(f"{path} is not the scorer that was written with the plan", hint=hint, field="scorer")
        return path

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        bare = replace(self, folder=None, attached=None)  # a scorer in memory is no JSON
        document = {"schema": SCHEMA, "version": VERSION, **asdict(bare)}
        document["calibration"] = self.calibration.to_dict() if self.calibration else None
        return {key: value for key, value in document.items() if key not in _NOT_WRITTEN}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; raises PlanError for unknown or malformed fields."""
        values = {key: value for key, value in document.items() if key not in ("schema", "version")}
        unknown = sorted(set(values) - {item.name for item in fields(cls)} | set(values) & set(_NOT_WRITTEN))
        if unknown:
            raise PlanError(f"plan has unknown fields: {', '.join(unknown)}", hint="update treebudget")
        if "policy" not in values:
            raise PlanError("plan names no policy", field="policy")
        try:
            if values.get("calibration") is not None:
                values["calibration"] = Calibration.from_dict(values["calibration"])
            if values.get("scorer") is not None:
                values["scorer"] = ScorerFile(**values["scorer"])
            values["prices"] = [PriceRange(**item) for item in values.get("prices") or []]
            return cls(**values)
        except PolicyError as error:
            raise PlanError(f"plan: {error}", field="policy") from error
        except (TypeError, ValueError, KeyError) as error:
            raise PlanError(f"plan is malformed: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan, whole or not at all, and before it its scorer as `<plan>.scorer.safetensors` beside it.

        Raises PlanError if the scorer of a plan that was read from a file is no longer there, or another one.
        """
        target, plan = Path(path), self
        beside = target.with_name(target.stem + ".scorer.safetensors")
        if self.attached is not None:
            beside.parent.mkdir(parents=True, exist_ok=True)
            self.attached.save(beside)
            plan = replace(self, scorer=ScorerFile(beside.name, file_sha256(beside), dict(self.attached.identity)))
        elif self.scorer is not None and self.folder is not None:
            data = self._scorer_path().read_bytes()  # before anything is written: it may be the file of that name
            plan = replace(self, scorer=replace(self.scorer, file=write_atomic(beside, data).name))
        return write_atomic(target, json.dumps(plan.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: Mapping[str, Any] | None = None) -> Plan:
        """Read a plan; raises PlanError if it is none or, with `expect`, if a field of its identity differs."""
        try:
            plan = replace(cls.from_dict(read_json(path, SCHEMA, VERSION)), folder=Path(path).parent)
        except FileNotFoundError as error:
            raise PlanError(f"no plan at {path}", hint="make one with: selector tune --out PLAN") from error
        except FileFormatError as error:
            raise PlanError(str(error), hint=error.hint) from error
        if expect is not None:
            plan.check(expect)
        return plan


def _is_range(pair: Any) -> bool:
    """Whether a value is a pair of whole numbers, at least 0, the lower first."""
    return (
        isinstance(pair, list | tuple) and len(pair) == 2 and all(is_whole(end) for end in pair) and pair[0] <= pair[1]
    )


def _refuse(name: str, found: Any, expected: Any, what: str) -> None:
    if expected is not None and found is not None and found != expected:
        raise PlanError(
            f"plan does not fit: {name} is {found!r} in {what}, expected {expected!r}",
            hint="run selector tune again for what you decode with",
            field=name,
        )

