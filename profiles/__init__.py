"""Data only: shipped profiles, and the places where files of this machine live."""

from __future__ import annotations

from profiles.errors import FileFormatError, TreebudgetError, UsageError
from profiles.index import find, names
from profiles.paths import cache_dir, default_plan_path, default_profile_path, default_trace_path

__all__ = [
    "FileFormatError",
    "TreebudgetError",
    "UsageError",
    "cache_dir",
    "default_plan_path",
    "default_profile_path",
    "default_trace_path",
    "find",
    "names",
]
