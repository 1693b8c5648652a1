"""What-if answers as text tables and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 1 << 30


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The what-if rows; brackets hold the 90 % interval, `from` is the provenance of every figure of the line."""
    head = [
        "profile", "context", "batch", "budget", "tok/round", "ms/token", "tok/s/user", "tok/s/GPU", "vs plain", "cost/Mtok",
        "weights+cache GiB", "fits up to", "stops paying at", "verdict", "from",
    ]  # fmt: skip
    return _columns([head, *(_cells(row) for row in rows)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    ends = row["interval"]
    stops = row["stops_paying_at_batch"]
    memory = "?" if row["weights_bytes"] is None else f"{row['weights_bytes'] / GIB:.1f}+{row['cache_bytes'] / GIB:.2f}"
    fits = "?" if row["largest_batch"] is None else str(row["largest_batch"])
    return [
        row["profile"], str(row["context_tokens"]), str(row["batch"]), str(row["budget"]),
        with_ends(row["tokens_per_round"], ends["tokens_per_round"]), with_ends(row["ms_per_token"], ends["ms_per_token"]),
        with_ends(row["tokens_per_second_per_user"], ends["tokens_per_second_per_user"]),
        with_ends(row["tokens_per_second_per_gpu"], ends["tokens_per_second_per_gpu"]),
        with_ends(row["speedup_over_plain"], ends["speedup_over_plain"]),
        "no price" if row["cost_per_million_tokens"] is None
        else with_ends(row["cost_per_million_tokens"], ends["cost_per_million_tokens"]),
        memory, fits if row["fits"] in (True, None) else f"{fits} (does not fit)",
        f"none up to {row['searched_to_batch']}" if stops is None else str(stops), row["verdict"], row["provenance"],
    ]  # fmt: skip


def with_ends(value: float, ends: Sequence[float]) -> str:
    """`5.9 [5.5, 7.2]`, or the value alone where nothing is uncertain about it."""
    if abs(ends[1] - ends[0]) <= 1e-9 * abs(value):
        return short(value)
    return f"{short(value)} [{short(ends[0])}, {short(ends[1])}]"


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def slo_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Largest batch within a latency, per profile and context."""
    head = ["profile", "context", "ms/token allowed", "largest batch", "budget", "ms/token", "limited by", "from"]
    body = [
        [row["profile"], str(row["context_tokens"]), short(row["slo_ms_per_token"]), str(row["largest_batch"]),
         str(row.get("budget", "-")),
         with_ends(row["ms_per_token"], row["interval"]["ms_per_token"]) if row["largest_batch"] else "-",
         row["limited_by"], row["provenance"]]
        for row in rows
    ]  # fmt: skip
    return _columns([head, *body])


def break_even_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Acceptance at which speculation pays, per shape and chain length."""
    head = ["profile", "context", "batch", "length", "tok/round needed", "rate", "each position", "from"]
    body = []
    for row in rows:
        p, ends = row["conditional_acceptance"], row["interval"]["conditional_acceptance"]
        known = [f"{end:.3f}" if end is not None else "never" for end in ends]
        body.append([
            row["profile"], str(row["context_tokens"]), str(row["batch"]), str(row["budget"]),
            with_ends(row["acceptance_length"], row["interval"]["acceptance_length"]),
            "never" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}",
            f"{'never' if p is None else f'{p:.3f}'} [{known[0]}, {known[1]}]", row["provenance"],
        ])  # fmt: skip
    return _columns([head, *body])


def fleet_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """GPUs that carry a load, per shape."""
    head = ["profile", "context", "batch", "budget", "requests in flight", "GPUs", "from"]
    body = [
        [row["profile"], str(row["context_tokens"]), str(row["batch"]), str(row["budget"]), short(row["requests_in_flight"]),
         "does not fit" if row["gpus"] is None else _range(row["gpus"], row["interval"]["gpus"]), row["provenance"]]
        for row in rows
    ]  # fmt: skip
    return _columns([head, *body])


def _range(value: int, ends: Sequence[int]) -> str:
    return f"{value} [{ends[0]}, {ends[1]}]"


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """All figures of the rows as CSV; every interval as two columns `<figure>_low` and `<figure>_high`."""
    flat = [_flat(row) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: "; ".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
    del plain["interval"]
    for key, ends in row["interval"].items():
        plain[f"{key}_low"], plain[f"{key}_high"] = ends or (None, None)
    return plain


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
