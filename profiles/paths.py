"""Where files of this machine live: the cache folder and the default names in it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import platformdirs

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "smollm2-135m-dflash"
DEFAULT_DTYPE = "bfloat16"


def cache_dir() -> Path:
    """The user's cache folder: the environment variable TREEBUDGET_CACHE, or the platform's usual place (not created)."""
    moved = os.environ.get("TREEBUDGET_CACHE")
    return Path(moved).expanduser() if moved else Path(platformdirs.user_cache_dir("treebudget"))


def slug(name: str) -> str:
    """`name` in lower case with every run of characters unfit for a file name turned into one dash."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "unnamed"


def target_slug(target: str) -> str:
    """The file-name part of a target or drafter: its name, or the last folder of a path or hub id."""
    return slug(Path(target.rstrip("/")).name or target)


def cpu_name() -> str:
    """The processor's model name and the number of logical processors, such as `AMD EPYC 7B13 x2`."""
    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            name = next((line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")), "")
    except OSError:
        pass
    name = name or platform.processor() or platform.machine() or "cpu"
    return f"{name} x{os.cpu_count() or 1}"


def device_slug(device: str = "cpu") -> str:
    """The file-name part of a device; `cpu` stands for this machine's processor."""
    return slug(cpu_name() if device == "cpu" else device)


def default_profile_path(target: str = DEFAULT_TARGET, dtype: str = DEFAULT_DTYPE, device: str = "cpu") -> Path:
    """Where a profile of this machine is kept unless told otherwise."""
    return cache_dir() / "profiles" / f"{device_slug(device)}_{target_slug(target)}_{slug(dtype)}.json"


def default_trace_path(target: str = DEFAULT_TARGET, drafter: str = DEFAULT_DRAFTER, dtype: str = DEFAULT_DTYPE) -> Path:
    """Where a trace of this pair is kept unless told otherwise."""
    return cache_dir() / "traces" / f"{target_slug(target)}_{target_slug(drafter)}_{slug(dtype)}.safetensors"


def default_plan_path(target: str = DEFAULT_TARGET, drafter: str = DEFAULT_DRAFTER, dtype: str = DEFAULT_DTYPE) -> Path:
    """Where a plan of this pair is kept unless told otherwise."""
    return cache_dir() / "plans" / f"{target_slug(target)}_{target_slug(drafter)}_{slug(dtype)}.json"
