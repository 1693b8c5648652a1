"""Measured operator tables: products, attention and experts on GPUs, from the optional package aiconfigurator-core.

Apache-2.0, `pip install 'treebudget[ops]'`. Every latency there is one sample in milliseconds, without a spread. The grids
bracket tile edges in m, so between grid sizes latencies are interpolated linearly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import OpsNotInstalled, UsageError

Array = NDArray[np.float64]
PACKAGE = "aiconfigurator_core"
# The engine whose tables are used: the finest grid in m, and none of the stacks known to hold bad rows (trtllm on L40S
# and RTX PRO 6000 measures the L2 cache; sglang 0.5.6.post2 on H100 has experts ten times too slow).
DEFAULT_STACKS = {
    "a100_sxm": ("sglang", "0.5.10"), "h100_sxm": ("vllm", "0.24.0"), "h200_sxm": ("vllm", "0.24.0"), "l40s": ("vllm", "0.24.0"),
    "b200_sxm": ("vllm", "0.24.0"), "b300_sxm": ("vllm", "0.24.0"), "gb200": ("vllm", "0.24.0"), "gb300": ("vllm", "0.24.0"),
    "rtx_pro_6000_server": ("vllm", "0.24.0"),
}  # fmt: skip
BAD_STACKS = {("l40s", "trtllm"), ("rtx_pro_6000_server", "trtllm"), ("h100_sxm", "sglang/0.5.6.post2")}


def tables_folder() -> Path:
    """The folder of the installed tables. Raises OpsNotInstalled."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise OpsNotInstalled("the operator tables are not installed", hint="pip install 'treebudget[ops]' (82 MB, Apache-2.0)")
    return Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"


@dataclass(frozen=True)
class OperatorTables:
    """The tables of one GPU system and engine version; bfloat16 throughout, one GPU."""

    system: str
    engine: str
    version: str
    folder: Path

    @classmethod
    def find(cls, system: str, engine: str | None = None, version: str | None = None) -> OperatorTables:
        """The default stack of a system, or the one named. Raises OpsNotInstalled or UsageError listing what there is."""
        folder = tables_folder()
        if engine is None:
            if system not in DEFAULT_STACKS:
                raise UsageError(f"no operator tables for {system!r}", hint=f"there are: {', '.join(sorted(DEFAULT_STACKS))}")
            engine, default_version = DEFAULT_STACKS[system]
            version = version or default_version
        versions = sorted(path.name for path in (folder / system / "gemm" / engine).glob("*") if path.is_dir())
        if not versions or (version is not None and version not in versions):
            known = ", ".join(versions) or "none"
            raise UsageError(f"no {engine} {version or ''} tables for {system!r}", hint=f"versions: {known}")
        version = version or versions[-1]
        if (system, engine) in BAD_STACKS or (system, f"{engine}/{version}") in BAD_STACKS:
            raise UsageError(f"the {engine} {version} tables of {system} hold rows known to be wrong", hint="name another engine")
        return cls(system, engine, version, folder)

    @property
    def label(self) -> str:
        """For provenance: engine, version and package."""
        return f"{self.engine} {self.version} operator tables of aiconfigurator-core {package_version()} ({self.system})"

    @property
    def device(self) -> str:
        """The device name written in the tables."""
        return str(_read(self._path("gemm"), ("device",))["device"][0])

    def _path(self, family: str) -> Path:
        names = {"gemm": "gemm/{}/gemm_perf", "attention": "attention/{}/generation_attention_perf", "moe": "moe/{}/moe_perf"}
        path = self.folder / self.system / (names[family].format(f"{self.engine}/{self.version}") + ".parquet")
        if not path.is_file():
            raise UsageError(f"no {family} table of {self.engine} {self.version} for {self.system}", hint="name another engine")
        return path

    def product_seconds(self, rows: Any, outputs: int, inputs: int) -> Array:
        """Seconds of one product of (rows, inputs) by (inputs, outputs), of the shape of `rows`.

        Linear between grid sizes in each of the three, proportional beyond the largest outputs or inputs.
        """
        grid_m, grid_n, grid_k, seconds = _gemm(self._path("gemm"))
        low, high, share = _bracket(grid_n, outputs)
        parts = [_over_inputs(seconds[:, index, :], grid_k, inputs) for index in (low, high)]
        at_grid = (1 - share) * parts[0] + share * parts[1]
        at_grid = at_grid * max(outputs / grid_n[-1], 1.0)
        return _interpolate(np.asarray(rows, float), grid_m, at_grid)

    def attention_seconds(self, batch: Any, cached_tokens: Any, heads: int, kv_heads: int, head_dim: int) -> Array:
        """Seconds of one decode attention of `batch` queries, each over its own cache of `cached_tokens` (broadcast)."""
        batches, steps, seconds = _attention(self._path("attention"), heads, kv_heads, head_dim)
        batch, cached = np.broadcast_arrays(np.asarray(batch, float), np.asarray(cached_tokens, float))
        at_steps = [_interpolate(cached, steps[i], seconds[i]) for i in range(len(batches))]
        return _interpolate_rows(batch, np.array(batches, float), np.array(at_steps))

    def experts_seconds(self, rows: Any, hidden: int, intermediate: int, per_token: int, experts: int, routing: str) -> Array:
        """Seconds of the experts of one layer, linear between the token counts measured. Raises UsageError if unmeasured."""
        sizes, seconds = _experts(self._path("moe"), hidden, intermediate, per_token, experts, routing)
        return _interpolate(np.asarray(rows, float), sizes, seconds)

    def memory_facts(self) -> tuple[float, float, float, float]:
        """Bytes/s, the share of it memory-bound operations reach, seconds to start one, dense FLOP/s: from the system file."""
        import yaml  # type: ignore[import-untyped]  # comes with aiconfigurator-core

        gpu = yaml.safe_load((self.folder.parent / f"{self.system}.yaml").read_text())["gpu"]
        share, start = float(gpu["mem_bw_empirical_scaling_factor"]), float(gpu["mem_empirical_constant_latency"])
        return float(gpu["mem_bw"]), share, start, float(gpu["bfloat16_tc_flops"])


def package_version() -> str:
    """The version of the installed tables."""
    from importlib.metadata import version

    return version("aiconfigurator-core")


def _read(path: Path, columns: tuple[str, ...]) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    present = set(parquet.read_schema(path).names)
    table = parquet.read_table(path, columns=[name for name in columns if name in present])
    return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}


@lru_cache(maxsize=8)
def _gemm(path: Path) -> tuple[Array, Array, Array, Array]:
    """Grids of m, n, k and seconds (M, N, K), NaN where unmeasured."""
    table = _read(path, ("gemm_dtype", "m", "n", "k", "latency"))
    chosen = table["gemm_dtype"] == "bfloat16"
    axes, places = zip(*(np.unique(table[name][chosen], return_inverse=True) for name in ("m", "n", "k")), strict=True)
    seconds = np.full(tuple(axis.size for axis in axes), np.nan)
    seconds[places] = table["latency"][chosen] / 1e3
    return axes[0].astype(float), axes[1].astype(float), axes[2].astype(float), seconds


@lru_cache(maxsize=16)
def _attention(path: Path, heads: int, kv_heads: int, head_dim: int) -> tuple[list[int], list[Array], list[Array]]:
    """Batches, and per batch the cached tokens and seconds measured."""
    names = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size", "latency")
    table = _read(path, names)
    chosen = (table["num_heads"] == heads) & (table["num_key_value_heads"] == kv_heads) & (table["head_dim"] == head_dim)
    chosen &= table["kv_cache_dtype"] == "bfloat16"
    if "window_size" in table:
        chosen &= table["window_size"] == 0
    if not chosen.any():
        known = sorted(set(zip(*(table[name].tolist() for name in names[2:5]), strict=True)))
        raise UsageError(f"attention of {heads} heads, {kv_heads} for keys, size {head_dim} was not measured", hint=_near(known))
    batches = [int(size) for size in np.unique(table["batch_size"][chosen])]
    steps, seconds = [], []
    for size in batches:
        rows = chosen & (table["batch_size"] == size)
        order = np.argsort(table["step"][rows])
        steps.append(table["step"][rows][order] + 1.0)  # the query's own key counts
        seconds.append(table["latency"][rows][order] / 1e3)
    return batches, steps, seconds


@lru_cache(maxsize=16)
def _experts(path: Path, hidden: int, intermediate: int, per_token: int, experts: int, routing: str) -> tuple[Array, Array]:
    wanted = {"hidden_size": hidden, "inter_size": intermediate, "topk": per_token, "num_experts": experts, "moe_tp_size": 1,
              "moe_ep_size": 1, "distribution": routing, "moe_dtype": "bfloat16"}  # fmt: skip
    table = _read(path, (*wanted, "num_tokens", "latency"))
    chosen = np.logical_and.reduce([table[name] == value for name, value in wanted.items()])
    if not chosen.any():
        raise UsageError(f"{experts} experts of {hidden} x {intermediate}, {per_token} a token, were not measured on this GPU")
    sizes = np.unique(table["num_tokens"][chosen])
    best = [table["latency"][chosen & (table["num_tokens"] == size)].min() / 1e3 for size in sizes]
    return sizes.astype(float), np.array(best)


def _near(known: list[tuple[int, ...]]) -> str:
    return f"measured are {json.dumps(known[:12])} ..."


def _bracket(grid: Array, value: float) -> tuple[int, int, float]:
    """Indices around a value and its share between them; clipped at both ends."""
    high = int(np.clip(np.searchsorted(grid, value), 1, grid.size - 1))
    share = (value - grid[high - 1]) / (grid[high] - grid[high - 1])
    return high - 1, high, float(np.clip(share, 0.0, 1.0))


def _over_inputs(seconds: Array, grid_k: Array, inputs: int) -> Array:
    """Seconds (M,) at an input size; the measured part of the grid only."""
    known = np.isfinite(seconds).all(axis=0)
    if known.sum() < 2:
        raise UsageError("this table has holes where the model's products lie", hint="name another engine or version")
    grid, values = grid_k[known], seconds[:, known]
    low, high, share = _bracket(grid, inputs)
    return ((1 - share) * values[:, low] + share * values[:, high]) * max(inputs / grid[-1], 1.0)


def _interpolate(at: Array, grid: Array, values: Array) -> Array:
    """Linear between grid points; beyond the last along the line of the last two."""
    inside = np.interp(at, grid, values)
    if grid.size < 2:
        return inside
    slope = max(float((values[-1] - values[-2]) / (grid[-1] - grid[-2])), 0.0)
    return inside + np.maximum(at - grid[-1], 0.0) * slope


def _interpolate_rows(at: Array, grid: Array, rows: Array) -> Array:
    """As `_interpolate`, with other values at every place: rows (G, *at.shape)."""
    low = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, grid.size - 2)
    share = (at - grid[low]) / (grid[low + 1] - grid[low])
    first = np.take_along_axis(rows, low[None], 0)[0]
    second = np.take_along_axis(rows, low[None] + 1, 0)[0]
    return first + np.maximum(share, 0.0) * (second - first)
