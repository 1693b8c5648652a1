"""Where speculation stops paying: plain decoding, the best uniform budget and merged budgets at batch 1 to 256.

A simulation. Acceptance is traced on the small target that the trace names; the cost of a round is what each profile
says of its own target and GPU (the shipped ones are composed from measured operator tables; batches above the largest
they hold are estimated). All requests advance in lockstep under one forward, each along a text of its own, the next one
when it ends. Every drafting round pays for drafting. What is played:
  plain     one token per request and step
  uniform   the same number of nodes for every request, the best such number
  merged    the nodes of all requests in one order by reach, as many in all as one price allows (selector.batch)
Intervals are by resampling the trace's texts; nothing is timed, so it does not matter what else the machine does.

Example: python benchmarks/load_study.py --trace eval.safetensors --picture docs/load_study.png --json > load_study.json
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from costmodel import load_profile
from costmodel.clitools import emit_json, note
from costmodel.pictures import blank_figure, write_figure
from profiles.paths import default_trace_path
from selector import Trace
from selector.load.study import BATCHES, LoadRow, LoadStudy, study_load

PROFILES = ("a100-qwen3-8b", "h100-qwen3-8b")
LINES = (("uniform", "C0", "o"), ("merged", "C3", "s"))
NAMES = {"uniform": "best uniform budget", "merged": "merged budgets, one price"}


def draw(studies: list[LoadStudy], path: Path) -> Path:
    """One panel per profile: throughput relative to plain decoding against batch, with 95 % bands."""
    figure = blank_figure((5.2 * len(studies), 4.6))
    panels = figure.subplots(1, len(studies), sharey=True, squeeze=False)[0]
    for axes, study in zip(panels, studies, strict=True):
        draw_panel(axes, study)
    panels[0].set_ylabel("tokens per second, relative to plain decoding")
    panels[0].legend(loc="lower left")
    drawn = studies[0]
    traced = drawn.what_if.get("target", ["the traced target"])[0]
    figure.suptitle(f"Simulated load: acceptance traced on {traced} ({drawn.num_texts} texts), round cost as each profile says",
                    fontsize=10)
    return write_figure(figure, path)


def draw_panel(axes: Any, study: LoadStudy) -> None:
    """The lines of one profile; budgets as small numbers, estimated batches shaded."""
    batches = [row.num_requests for row in study.rows]
    axes.axhline(1.0, color="black", linewidth=1.2, label="plain decoding")
    for name, colour, marker in LINES:
        values = [getattr(row, f"{name}_speedup") for row in study.rows]
        low, high = np.array([getattr(row, f"{name}_speedup_interval") for row in study.rows]).T
        axes.fill_between(batches, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(batches, values, color=colour, marker=marker, markersize=4, label=NAMES[name])
    for row in study.rows:
        axes.annotate(f"{row.uniform_nodes}", (row.num_requests, row.uniform_speedup), xytext=(0, -13),
                      textcoords="offset points", ha="center", fontsize=7, color="C0")
        axes.annotate(f"{row.merged_nodes:.1f}", (row.num_requests, row.merged_speedup), xytext=(0, 8),
                      textcoords="offset points", ha="center", fontsize=7, color="C3")
    estimated = [row.num_requests for row in study.rows if row.provenance == "estimated"]
    if estimated:
        axes.axvspan(min(estimated) / 2**0.5, max(estimated) * 2**0.5, color="grey", alpha=0.12, linewidth=0,
                     label="cost estimated beyond the profile's batches")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in the batch")
    axes.set_title(f"{study.profile} ({study.profile_provenance}); numbers: nodes per request", fontsize=9)
    axes.grid(alpha=0.25)


def show(study: LoadStudy) -> None:
    """One table per profile."""
    what_if = "; ".join(f"{name} {traced} -> {here}" for name, (traced, here) in study.what_if.items())
    click.echo(f"\n{study.profile} ({study.profile_provenance}); what-if: {what_if or 'none'}")
    click.echo("| batch | plain tok/s | uniform nodes | x plain | merged nodes | x plain | 95 % | over uniform | 95 % | price |")
    click.echo("| --- " * 10 + "|")
    for row in study.rows:
        click.echo(line(row))
    for name in ("uniform", "merged"):
        stop = getattr(study, f"stops_paying_at_{name}")
        click.echo(f"{name}: " + (f"plain decoding is as fast from batch {stop} on" if stop else "pays at every batch played"))


def line(row: LoadRow) -> str:
    """One row of the table."""
    low, high = row.merged_speedup_interval
    gain_low, gain_high = row.merged_gain_over_uniform_interval
    mark = " (estimated)" if row.provenance == "estimated" else ""
    return (f"| {row.num_requests}{mark} | {row.plain_tokens_per_second:,.0f} | {row.uniform_nodes} | {row.uniform_speedup:.2f} "
            f"| {row.merged_nodes:.1f} | {row.merged_speedup:.2f} | {low:.2f}-{high:.2f} | {row.merged_gain_over_uniform:+.1%} "
            f"| {gain_low:+.1%} to {gain_high:+.1%} | {row.price:,.0f} |")


@click.command(context_settings={"help_option_names": ["-h", "--help"]},
               epilog="Example: python benchmarks/load_study.py --trace eval.safetensors --picture docs/load_study.png")
@click.option("--trace", "trace_path", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="From decoder trace.  [default: the default models' trace in the cache folder]")
@click.option("--profile", "profiles", multiple=True, default=PROFILES, show_default=True, help="May be repeated.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=BATCHES, show_default=True,
              help="May be repeated.")
@click.option("--context", type=click.IntRange(0), default=None, help="Tokens charged in every round.  [default: the trace's]")
@click.option("--bootstrap", type=click.IntRange(1), default=100, show_default=True, help="Resamples of the texts.")
@click.option("--seed", default=0, show_default=True, help="Of the order of texts and the resamples.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Draw a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record on stdout.")
def main(trace_path: Path | None, profiles: tuple[str, ...], batches: tuple[int, ...], context: int | None, bootstrap: int,
         seed: int, picture: Path | None, as_json: bool) -> None:
    """Simulate a server at every batch size from a trace and shipped profiles."""
    trace = Trace.load(trace_path or default_trace_path())
    studies = []
    for name in profiles:
        note(f"{name}: {len(batches)} batch sizes, {len(trace.texts)} texts, {bootstrap} resamples")
        studies.append(study_load(trace, load_profile(name), name, sorted(batches), context, num_bootstrap=bootstrap, seed=seed))
        if not as_json:
            show(studies[-1])
    if picture is not None:
        note(f"picture: {draw(studies, picture)}")
    if as_json:
        identity = {name: value for name, value in trace.identity.items() if name != "prompt_sha256s"}
        emit_json({"schema": "treebudget.benchmark.load_study", "version": 1, "kind": "simulation", "unit": "tokens per second",
                   "trace": identity, "studies": [asdict(study) for study in studies]})


if __name__ == "__main__":
    main()
