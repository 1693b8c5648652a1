"""The index of shipped profiles: names to files inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from profiles.errors import UsageError


def names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    folder = files("profiles") / "shipped"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def find(name: str) -> Path:
    """The file of the shipped profile `name`. Raises UsageError that lists the names there are."""
    known = names()
    if name not in known:
        raise UsageError(f"no shipped profile is called {name!r}", hint=f"shipped profiles: {', '.join(known) or 'none'}")
    return Path(str(files("profiles") / "shipped" / f"{name}.json"))
