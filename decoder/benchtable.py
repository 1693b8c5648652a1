"""Bench and check records as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from decoder.records import STAGES


def stdout_console() -> Console:
    """Stdout, as wide as the terminal, or 110 columns where it is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def bench_table(record: dict[str, Any]) -> Table:
    """One row per policy: rates, replay's prediction, speed-up with its interval, tokens and nodes per round, equal texts."""
    identity, settings = record["identity"], record["settings"]
    title = (f"{identity['target']}, {identity['dtype']}, {identity['device']}\n{record['prompts']['num_prompts']} prompts, "
             f"{settings['max_new_tokens']} tokens each")
    table = _table(title, ["policy", "tok/s", "predicted", "by profile", "x plain", "95 %", "tok/round", "nodes", "= plain"])
    for row in record["policies"]:
        interval = row["speedup_interval"]
        table.add_row(
            row["name"], _number(row["tokens_per_second"], 1), _number(row["predicted_tokens_per_second"], 1),
            _number(row["predicted_by_profile_alone"], 1), _number(row["speedup_over_plain"]),
            "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
            _number(row["tokens_per_round"]), _number(row["mean_nodes"], 1),
            f"{row['identical_to_plain']}/{record['prompts']['num_prompts']}")
    return table


def stage_table(record: dict[str, Any]) -> Table:
    """Milliseconds of a mean round by stage."""
    table = _table("milliseconds per round", ["policy", *STAGES, "round"])
    for row in record["policies"]:
        stages = row["stage_milliseconds"]
        table.add_row(row["name"], *(_number(stages[stage], 2) for stage in STAGES), _number(sum(stages.values()), 1))
    return table


def dataset_table(record: dict[str, Any]) -> Table:
    """Speed-up over plain decoding by data set, one column per policy, and the mean over data sets."""
    names = [row["name"] for row in record["policies"]]
    table = _table("times plain decoding, by data set", ["data set", "prompts", *names])
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["datasets"]:
        by_name.setdefault(row["dataset"], {})[row["name"]] = row
    for dataset, rows in by_name.items():
        if dataset == "mean":
            table.add_section()
        table.add_row(dataset, str(rows[names[0]]["num_prompts"]), *(_number(rows[name]["speedup_over_plain"]) for name in names))
    return table


def difference_lines(record: dict[str, Any]) -> list[str]:
    """One line per policy whose texts part from plain decoding's."""
    lines = []
    for row in record["policies"]:
        found = row["differences"]
        if found:
            ties = sum(difference["near_tie"] for difference in found)
            widest = max(abs(difference["gap"]) for difference in found)
            lines.append(f"{row['name']}: {len(found)} texts part from plain decoding, {ties} at a near-tie; "
                         f"widest logit gap {widest:.3g}")
    return lines


def print_bench(record: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables and what parts from plain decoding on stdout."""
    console = console or stdout_console()
    console.print(bench_table(record))
    console.print(stage_table(record))
    if record["datasets"]:
        console.print(dataset_table(record))
    for line in difference_lines(record):
        console.print(line)
    if record["prediction_note"]:
        console.print(f"no prediction: {record['prediction_note']}")
    if record["machine_speed"] is not None:
        console.print(f"reference shapes, timed in between, ran at {record['machine_speed']['speed']:.2f} times the profile's "
                      "speed; `predicted` is what replay says by the profile, times that")
    for row in record["selection"]:
        console.print(f"search for {row['num_nodes']:.0f} nodes: {row['search_microseconds']:.0f} us, "
                      f"{row['python_over_search']:.1f} times faster than plain Python on the same drafts")
    console.print(f"ceiling {record['ceiling_tokens_per_second']:.1f} tokens/s; profile {record['profile']['provenance']}; "
                  f"{record['seconds']:.0f} s in all")


def print_check(record: dict[str, Any], console: Console | None = None) -> None:
    """Print the check's table and its verdict on stdout."""
    console = console or stdout_console()
    table = _table(f"{record['identity']['target']}, {record['identity']['dtype']}", ["policy", "= plain", "tok/round", "nodes"])
    for row in record["policies"]:
        table.add_row(row["name"], f"{row['identical_to_plain']}/{row['num_prompts']}", _number(row["tokens_per_round"]),
                      _number(row["mean_nodes"], 1))
    console.print(table)
    for line in difference_lines(record):
        console.print(line)
    console.print("passed" if record["passed"] else "failed")
