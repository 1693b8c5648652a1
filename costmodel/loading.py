"""Finding profiles by name or path, and refusing those that describe something else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.errors import ProfileError
from costmodel.identity import Identity
from costmodel.model import CostModel
from costmodel.profile import Profile
from profiles import index
from profiles.paths import cache_dir


def load_profile(name_or_path: str | os.PathLike[str], expect: Identity | Mapping[str, Any] | None = None) -> CostModel:
    """The cost model of a shipped profile, of one this machine measured (by file name), or of a file.

    Raises ProfileError (nothing of that name), FileFormatError (not a profile file) or, where `expect` is given and a
    field that both know differs, IdentityMismatch naming the field.
    """
    profile = Profile.load(profile_path(name_or_path))
    if expect is not None:
        profile.identity.check(expect)
    return CostModel(profile)


def profile_path(name_or_path: str | os.PathLike[str]) -> Path:
    """The file that a name or path stands for. Raises ProfileError that lists what there is."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    name = os.fspath(name_or_path)
    if name in index.names():
        return index.find(name)
    measured = measured_profiles()
    if name in measured:
        return measured[name]
    known = [*index.names(), *measured]
    raise ProfileError(
        f"no profile file and no profile of this name: {name}",
        hint=f"known names: {', '.join(known)}; `costmodel profile` measures this machine",
    )


def measured_profiles() -> dict[str, Path]:
    """Profiles in the cache folder of this machine, by file name without its ending."""
    folder = cache_dir() / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.json"))} if folder.is_dir() else {}
