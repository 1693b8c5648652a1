"""What was measured: the fields that must agree before a profile may price a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from costmodel.errors import IdentityMismatch, ModeMismatch, UsageError
from profiles.checks import is_whole

MODES = ("eager", "captured", "padded")
TEXTS = ("device", "target", "dtype", "quantization", "attention", "engine", "engine_version", "drafter")
COUNTS = ("tensor_parallel", "num_threads", "block_size")


@dataclass(frozen=True)
class Identity:
    """The identity of a measurement; a field that is None is unknown and is not compared.

    `model_shape` holds layers, hidden, heads, kv_heads, vocab and the like. `mode` is eager, captured (graphs of fixed
    sizes) or padded. `engine_version` is recorded and compared only when asked for by name.
    """

    device: str | None = None
    target: str | None = None
    model_shape: dict[str, Any] | None = None
    dtype: str | None = None
    quantization: str | None = None
    attention: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    mode: str | None = None
    tensor_parallel: int | None = None
    num_threads: int | None = None
    drafter: str | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"mode is {self.mode!r}, expected one of {', '.join(MODES)}")
        for name in TEXTS:
            if not isinstance(getattr(self, name), str | None):
                raise UsageError(f"identity: {name} must be text, got {getattr(self, name)!r}")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise UsageError(f"identity: {name} must be a whole number of at least 1, got {value!r}")
        shape = self.model_shape
        if shape is not None and not (isinstance(shape, dict) and all(isinstance(value, int | None) for value in shape.values())):
            raise UsageError(f"identity: model_shape must hold whole numbers by name, got {shape!r}")

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Identity:
        """Build from a mapping; an unknown key raises UsageError."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(document) - known)
        if unknown:
            raise UsageError(f"identity has unknown fields: {', '.join(unknown)}", hint=f"known: {', '.join(sorted(known))}")
        return cls(**dict(document))

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary, unknown ones as None."""
        return asdict(self)

    def check(self, expected: Identity | Mapping[str, Any], fields: Iterable[str] | None = None, what: str = "profile") -> None:
        """Raise IdentityMismatch (ModeMismatch for `mode`) naming the first field in which this identity differs from `expected`.

        `fields` limits the comparison; by default all but `engine_version` are compared. Two targets of other names but
        known, equal shapes cost the same, so `target` is compared only where a shape is missing.
        """
        other = expected.to_dict() if isinstance(expected, Identity) else Identity.from_dict(expected).to_dict()
        mine = self.to_dict()
        names = tuple(fields) if fields is not None else self._compared(other)
        for name in names:
            if name not in mine:
                raise UsageError(f"identity has no field {name!r}")
            if name == "model_shape":
                _check_shape(mine[name], other[name], what)
            elif mine[name] is not None and other[name] is not None and mine[name] != other[name]:
                raise (ModeMismatch if name == "mode" else IdentityMismatch)(name, other[name], mine[name], what)

    def _compared(self, other: Mapping[str, Any]) -> tuple[str, ...]:
        skipped = {"engine_version"}
        if self.model_shape and other["model_shape"]:
            skipped.add("target")
        return tuple(field.name for field in fields(self) if field.name not in skipped)


def _check_shape(mine: Mapping[str, Any] | None, other: Mapping[str, Any] | None, what: str) -> None:
    for key in sorted(set(mine or {}) & set(other or {})):
        if mine[key] is not None and other[key] is not None and mine[key] != other[key]:  # type: ignore[index]
            raise IdentityMismatch(f"model_shape.{key}", other[key], mine[key], what)  # type: ignore[index]
