"""GPU facts with their sources (profiles/gpus.json): dense rates, bandwidth, memory, and which operator tables fit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from costmodel.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense bfloat16 FLOP/s with float32 accumulation (never sparsity-doubled), bytes/s, bytes."""

    name: str
    aliases: tuple[str, ...]
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    operator_tables: str | None
    sources: tuple[str, ...]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|geforce|tesla", "", name.lower()))


@lru_cache(maxsize=1)
def known_gpus() -> tuple[Gpu, ...]:
    """All GPUs of the facts file."""
    document: dict[str, Any] = json.loads((files("profiles") / "gpus.json").read_text(encoding="utf-8"))
    return tuple(
        Gpu(
            item["name"], tuple(item["aliases"]), item["bf16_dense"] * 1e12, item["bw_gbs"] * 1e9, item["mem_gb"] * 1e9,
            item["operator_tables"], tuple(item["sources"]),
        )
        for item in document["gpus"]
    )  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """A GPU by name, alias or the device name a driver reports (as `torch.cuda.get_device_name` gives it).

    Case, spaces, dashes and the maker's name do not matter; beyond that the whole name must be known: an A10 is no A100,
    and an H100 NVL no H100. Raises UsageError that lists the aliases.
    """
    wanted = _plain(name)
    for gpu in known_gpus():
        if wanted in {_plain(gpu.name), *map(_plain, gpu.aliases)}:
            return gpu
    known = ", ".join(gpu.aliases[0] if gpu.aliases else gpu.name for gpu in known_gpus())
    raise UsageError(f"no facts about a GPU called {name!r}", hint=f"known: {known}")
