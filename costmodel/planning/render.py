"""What-if answers as text tables and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

Lines = list[list[str]]
GIB = 1 << 30


ANSWERS = {"rows": "what-if", "slo": "slo", "break_even": "break-even", "fleet": "fleet"}
HEAD = (
    "profile", "context", "batch", "budget", "tok/round", "ms/token", "tok/s/user", "tok/s/GPU", "vs plain", "vs fixed",
    "cost/Mtok", "weights+cache GiB", "fits up to", "stops paying at", "verdict", "from",
)  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The what-if rows; brackets hold the 90 % interval, `from` is the provenance of every figure of the line."""
    return columns(lines_of(rows))


def lines_of(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Head and cells of the what-if rows, as text."""
    return [list(HEAD), *(_cells(row) for row in rows)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    ends = row["interval"]
    memory = "?" if row["weights_bytes"] is None else f"{row['weights_bytes'] / GIB:.1f}+{row['cache_bytes'] / GIB:.2f}"
    fits = "?" if row["largest_batch"] is None else str(row["largest_batch"])
    gain, gains = row["gain_over_fixed"], ends["gain_over_fixed"]
    return [
        row["profile"], str(row["context_tokens"]), str(row["batch"]), counted(row["budget"], ends["budget"]),
        with_ends(row["tokens_per_round"], ends["tokens_per_round"]), with_ends(row["ms_per_token"], ends["ms_per_token"]),
        with_ends(row["tokens_per_second_per_user"], ends["tokens_per_second_per_user"]),
        with_ends(row["tokens_per_second_per_gpu"], ends["tokens_per_second_per_gpu"]),
        with_ends(row["speedup_over_plain"], ends["speedup_over_plain"]),
        f"{gain:+.1%}" + ("" if gains[0] == gains[1] == gain else f" [{gains[0]:+.0%}, {gains[1]:+.0%}]"),
        "no price" if row["cost_per_million_tokens"] is None
        else with_ends(row["cost_per_million_tokens"], ends["cost_per_million_tokens"]),
        memory, fits if row["fits"] in (True, None) else f"{fits} (does not fit)", _stops(row), row["verdict"], row["provenance"],
    ]  # fmt: skip


def _stops(row: Mapping[str, Any]) -> str:
    found, (first, last) = row["stops_paying_at_batch"], row["interval"]["stops_paying_at_batch"]
    limit = f"none up to {row['searched_to_batch']}"
    ends = [limit if end is None else str(end) for end in (first, last)]
    return (limit if found is None else str(found)) + ("" if first == last else f" [{ends[0]}, {ends[1]}]")


def with_ends(value: float, ends: Sequence[float]) -> str:
    """`5.9 [5.5, 7.2]`, or the value alone where nothing is uncertain about it."""
    if abs(ends[1] - ends[0]) <= 1e-9 * abs(value):
        return short(value)
    return f"{short(value)} [{short(ends[0])}, {short(ends[1])}]"


def counted(value: int, ends: Sequence[int]) -> str:
    """A whole number with its ends, or alone where both are the same."""
    return str(value) if ends[0] == ends[1] else f"{value} [{ends[0]}, {ends[1]}]"


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def inverse_tables(document: Mapping[str, Any]) -> list[tuple[str, Lines]]:
    """Title and lines of every question that was asked backwards, in the order in which they are answered."""
    makers = (
        ("slo", "Largest batch within a latency", _slo_lines),
        ("break_even", "Acceptance at which speculation pays", _break_even_lines),
        ("fleet", "GPUs that carry the load", _fleet_lines),
    )
    return [(title, make(document[key])) for key, title, make in makers if key in document]


def _slo_lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    head = ["profile", "context", "ms/token allowed", "largest batch", "budget", "ms/token", "limited by", "from"]
    body = [
        [row["profile"], str(row["context_tokens"]), short(row["slo_ms_per_token"]),
         counted(row["largest_batch"], row["interval"]["largest_batch"]),
         counted(row["budget"], row["interval"]["budget"]) if row["largest_batch"] else "-",
         with_ends(row["ms_per_token"], row["interval"]["ms_per_token"]) if row["largest_batch"] else "-",
         row["limited_by"], row["provenance"]]
        for row in rows
    ]  # fmt: skip
    return [head, *body]


def _break_even_lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    head = ["profile", "context", "batch", "length", "tok/round needed", "rate", "each position", "from"]
    body = [
        [row["profile"], str(row["context_tokens"]), str(row["batch"]), str(row["budget"]),
         with_ends(row["acceptance_length"], row["interval"]["acceptance_length"]),
         _or_never(row, "acceptance_rate"), _or_never(row, "conditional_acceptance"), row["provenance"]]
        for row in rows
    ]  # fmt: skip
    return [head, *body]


def _or_never(row: Mapping[str, Any], key: str) -> str:
    value, low, high = ("never" if item is None else f"{item:.3f}" for item in (row[key], *row["interval"][key]))
    return f"{value} [{low}, {high}]"


def _fleet_lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    head = ["profile", "context", "batch", "budget", "requests in flight", "GPUs", "from"]
    body = [
        [row["profile"], str(row["context_tokens"]), str(row["batch"]), str(row["budget"]),
         with_ends(row["requests_in_flight"], row["interval"]["requests_in_flight"]),
         "does not fit" if row["gpus"] is None else counted(row["gpus"], row["interval"]["gpus"]), row["provenance"]]
        for row in rows
    ]  # fmt: skip
    return [head, *body]


def to_csv(document: Mapping[str, Any]) -> str:
    """Every answer as CSV; the column `answer` says which question a line answers, and columns it does not have are empty.

    Every interval is two columns, `<figure>_low` and `<figure>_high`.
    """
    flat = [_flat(name, row) for key, name in ANSWERS.items() for row in document.get(key, ())]
    stream = io.StringIO()
    names = list(dict.fromkeys(column for row in flat for column in row))
    writer = csv.DictWriter(stream, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(answer: str, row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: "; ".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
    del plain["interval"]
    for key, ends in row["interval"].items():
        plain[f"{key}_low"], plain[f"{key}_high"] = ends or (None, None)
    return {"answer": answer, **plain}


def columns(lines: Lines) -> str:
    """Lines of cells as text whose columns line up."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
