"""What learned acceptance is worth on prompts that neither drafter nor scorer saw, and whether the drift alarm helps.

Everything is fitted on the train trace (scorer, calibration, budgets, prices) and judged on the eval trace:
  reliability  log-loss and expected calibration error by depth and by where the parent is, on every prefix that was reached
  budgets      tokens per round at equal numbers of nodes
  throughput   replayed tokens per second on the profile, scoring charged (timed here: keep the machine quiet)
  drift        scorers trained on one kind of prompt and run on another: rounds until the alarm, what falling back costs or
               saves, and how often a scorer trained on all kinds is put aside; and a control whose token tables are
               shuffled, which the alarm has to find
each for the drafter's own probabilities, those with a calibration per depth, and the scorer's. Intervals are 95 %, by
resampling the eval trace's texts. At most --seconds of training, and about two minutes more for 150 texts.

Example: python benchmarks/scorer.py --train tune.safetensors --eval eval.safetensors --embedding TARGET --profile here.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from numpy.typing import NDArray

from costmodel import load_profile
from costmodel.clitools import emit_json, json_option, note, quiet_option
from profiles.errors import TreebudgetError
from selector import Trace
from selector.calibration import Calibration
from selector.commands.tune import load_embedding
from selector.drift.alarm import DriftSettings
from selector.drift.study import (
    ALL,
    KINDS,
    NUM_ORDERS,
    SHUFFLED,
    DriftCell,
    by_kind,
    held_out_exponent,
    shuffled,
    study_drift,
)  # fmt: skip
from selector.edges import DRAFTED, SCORED
from selector.errors import TraceError
from selector.reliability import Reliability
from selector.replaying.caveats import what_if
from selector.replaying.replay import largest_replayable
from selector.scorer import Scorer, ScorerSettings, train_scorer
from selector.scorer.preparing import split_texts
from selector.scorer.study import EDGES, BudgetRow, ThroughputRow, judge_on, make_parts, study_budgets, study_throughput
from selector.scorer.training import MIN_TEXTS
from selector.scoring import measure_scoring_seconds
from selector.tuning.parts import Part, fit_calibration_on

TRAINING_SECONDS = 160.0  # of all trainings: half for all kinds, half for the kinds by their number of tokens


def check_disjoint(train: Trace, judged: Trace) -> None:
    """Raise TraceError if a prompt is in both traces."""
    prompts = [{text.token_ids[: text.num_prompt_tokens].tobytes() for text in trace.texts} for trace in (train, judged)]
    both = len(prompts[0] & prompts[1])
    if both:
        raise TraceError(
            f"{both} prompts are in both traces: what is fitted on one must be judged on other prompts",
            hint="record a trace of prompts kept aside: decoder trace",
        )


def train_within(trace: Trace, embedding: NDArray[Any], seconds: float, name: str, quiet: bool) -> Scorer:
    """Train on a trace for at most so many seconds."""
    found = train_scorer(trace, embedding, replace(ScorerSettings(), max_seconds=seconds))
    about, late = found.training, ", stopped by the clock" if found.training["out_of_time"] else ""
    losses = about["held_out_log_loss"]
    note(
        f"scorer on {name}: {len(trace.texts)} texts, {about['epochs']} epochs in {about['seconds']:.0f} s{late}, held-out "
        f"log-loss {losses[0]:.3f} as drafted, {losses[about['best_epoch']]:.3f} trained", quiet,
    )  # fmt: skip
    return found


def train_kinds(
    trace: Trace, part: Part, embedding: NDArray[Any], seconds: float, quiet: bool
) -> dict[str, tuple[Scorer, Calibration]]:
    """A scorer and a calibration per kind of prompt; kinds of too few texts are left out."""
    made: dict[str, tuple[Scorer, Calibration]] = {}
    groups = by_kind(trace, KINDS)
    for kind, texts in groups.items() if len(groups) > 1 else ():
        if len(texts) < MIN_TEXTS:
            note(f"{kind}: {len(texts)} texts are too few to train a scorer on", quiet)
            continue
        own = trace.select(texts)
        share = seconds * own.num_generated_tokens / trace.num_generated_tokens
        made[kind] = train_within(own, embedding, share, kind, quiet), fit_calibration_on(part.select(texts))
    return made


def run(
    train: Trace, judged: Trace, cost: Any, embedding: NDArray[Any], scorer: Scorer | None, seconds: float,
    num_orders: int, num_bootstrap: int, seed: int, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """The whole record."""
    began = time.monotonic()
    check_disjoint(train, judged)
    best = scorer or train_within(train, embedding, seconds / 2, "all kinds", quiet)
    best.check(judged.identity)
    aside = split_texts(train, ScorerSettings())[1] if scorer is None else list(range(len(train.texts)))
    max_nodes = largest_replayable(cost)
    drafted = Part.of(train, cost, max_nodes)
    calibration = fit_calibration_on(drafted)
    anchors = drafted.orders.anchors
    scoring = measure_scoring_seconds(best, anchors.token_ids, anchors.log_edges, anchors.root_token_ids)
    fit_on = dict(make_parts(train, cost, max_nodes, calibration, best, scoring))
    fit_on[SCORED] = fit_on[SCORED].select(aside)  # what it did not learn from
    run_on = make_parts(judged, cost, max_nodes, calibration, best, scoring)
    note(f"scoring takes {1e3 * scoring:.3f} ms a round ({time.monotonic() - began:.0f} s); replaying", quiet)
    reliability = judge_on(judged, calibration, best)
    budgets = study_budgets(run_on, num_bootstrap=num_bootstrap, seed=seed)
    throughput, plain = study_throughput(fit_on, run_on, num_bootstrap, seed)
    kinds = train_kinds(train, drafted, embedding, seconds / 2, quiet)
    note(f"drift: {len(kinds) + 2} scorers, {num_orders} orders of the texts ({time.monotonic() - began:.0f} s)", quiet)
    every = {ALL: (best, calibration), **kinds, SHUFFLED: (shuffled(best, seed), calibration)}
    exponent = None if scorer is not None else held_out_exponent(drafted.select(aside), best, scoring)
    cells = study_drift(run_on[DRAFTED], every, KINDS, scoring, num_orders, num_bootstrap, seed)
    record = {
        "schema": "treebudget.benchmark.scorer", "version": 1, "kind": "replay",
        "train": about_trace(train), "eval": about_trace(judged), "what_if": what_if(judged.identity, cost),
        "profile_provenance": getattr(cost, "provenance", "measured"), "scoring_seconds": scoring,
        "scorer_given": scorer is not None, "training": {name: pair[0].training for name, pair in every.items()},
        "reliability": reliability.to_dict(), "budgets": [asdict(row) for row in budgets],
        "throughput": [asdict(row) for row in (*plain, *throughput)],
        "drift": {
            "settings": asdict(DriftSettings()), "held_out_exponent": exponent, "num_orders": num_orders,
            "kinds": {kind: list(labels) for kind, labels in KINDS.items()},
            "cells": [asdict(cell) for cell in cells],
        },
        "wall_seconds": time.monotonic() - began,
    }  # fmt: skip
    if not quiet:
        show(reliability, budgets, [*plain, *throughput], cells)
    return record


def about_trace(trace: Trace) -> dict[str, Any]:
    """Identity and sizes of a trace."""
    identity = {name: value for name, value in trace.identity.items() if name != "prompt_sha256s"}
    sizes = {kind: len(texts) for kind, texts in by_kind(trace, KINDS).items()}
    return {"identity": identity, "num_texts": len(trace.texts), "num_generated_tokens": trace.num_generated_tokens,
            "texts_by_kind": sizes, "has_targets": trace.has_targets}  # fmt: skip


def show(reliability: Reliability, budgets: Sequence[BudgetRow], rates: Sequence[ThroughputRow], cells: list[DriftCell]) -> None:
    """Tables for people, on stderr so that --json has stdout to itself."""
    head = [f"{edges} {what}" for what in ("log-loss", "error") for edges in EDGES]
    lines = []
    for split, depth in dict.fromkeys((row.split, row.depth) for row in reliability.rows):
        rows = [reliability.row(edges, depth, split) for edges in EDGES]
        values = [f"{row.log_loss:.3f}" for row in rows] + [f"{row.ece:.3f}" for row in rows]
        lines.append([split, "all" if depth is None else str(depth), str(rows[0].num_groups), *values])
    table("Reliability (nats; tokens per reached parent)", ["split", "depth", "prefixes", *head], lines)
    lines = [[str(b.num_nodes), b.edges, f"{b.tokens_per_round:.3f}", f"{b.gain:+.1%}", span(b.gain_interval)] for b in budgets]
    table("Tokens per round at equal nodes; gain over drafted", ["nodes", "edges", "tokens/round", "gain", "95 %"], lines)
    lines = [
        [r.policy, r.edges, f"{r.tokens_per_second:.1f}", f"{r.interval[0]:.1f} to {r.interval[1]:.1f}",
         f"{r.tokens_per_round:.2f}", f"{r.mean_nodes:.1f}", f"{r.gain:+.1%} ({span(r.gain_interval)})",
         f"{r.gain_over_drafted:+.1%} ({span(r.gain_over_drafted_interval)})"] for r in rates
    ]  # fmt: skip
    head = ["policy", "edges", "tokens/s", "95 %", "tokens/round", "nodes", "over best fixed as drafted", "over as drafted"]
    table("Replayed throughput, scoring charged", head, lines)
    lines = [
        [c.trained_on, c.run_on, str(c.num_rounds), f"{c.nats_per_round:+.3f}", f"{c.nats_over_calibrated:+.3f}",
         f"{c.share_alarmed:.0%}", "-" if c.rounds_until_alarm is None else f"{c.rounds_until_alarm:.0f}",
         f"{c.share_scored:.1%}", f"{c.scorer:.1f}", f"{c.alarm:.1f}", f"{c.drafted:.1f}", f"{c.calibrated:.1f}",
         f"{c.scorer_over_drafted:+.1%} ({span(c.scorer_over_drafted_interval)})",
         f"{c.alarm_over_scorer:+.1%} ({span(c.alarm_over_scorer_interval)})"] for c in cells
    ]  # fmt: skip
    head = ["trained on", "run on", "rounds", "nats/round", "over calibrated", "alarmed", "until", "scored", "scorer tok/s",
            "alarm", "drafted", "calibrated", "scorer over drafted", "alarm over scorer"]  # fmt: skip
    table("Drift: `exact`, scorer always, with the alarm, and without a scorer", head, lines)


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A Markdown table on stderr."""
    click.echo(f"\n{title}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}", err=True)
    for line in lines:
        click.echo(f"| {' | '.join(line)} |", err=True)


def span(interval: tuple[float, float]) -> str:
    """An interval of gains."""
    return f"{interval[0]:+.1%} to {interval[1]:+.1%}"


FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: python benchmarks/scorer.py --train tune.safetensors --eval eval.safetensors --embedding TARGET --profile P",
)
@click.option("--train", "train_path", type=FILE, required=True, help="Trace to fit everything on.")
@click.option("--eval", "eval_path", type=FILE, required=True, help="Trace of other prompts to judge on.")
@click.option("--embedding", metavar="FILE[:TENSOR]", required=True, help="The target's embedding: a safetensors file or folder.")
@click.option("--profile", required=True, help="A profile's name or file.")
@click.option("--scorer", "scorer_path", type=FILE, help="A scorer trained on the train trace.  [default: train one]")
@click.option("--seconds", type=click.FloatRange(1), default=TRAINING_SECONDS, show_default=True, help="Most training, in all.")
@click.option("--orders", type=click.IntRange(1), default=NUM_ORDERS, show_default=True, help="Of texts the alarm is played on.")
@click.option("--bootstrap", type=click.IntRange(1), default=1000, show_default=True, help="Resamples of the texts.")
@click.option("--seed", default=0, show_default=True, help="Of the orders and the resamples.")
@json_option
@quiet_option
def main(
    train_path: Path, eval_path: Path, embedding: str, profile: str, scorer_path: Path | None, seconds: float, orders: int,
    bootstrap: int, seed: int, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Judge learned acceptance on an eval trace: calibration, tokens per round, throughput, and drift."""
    try:
        scorer = Scorer.load(scorer_path) if scorer_path is not None else None
        vectors = load_embedding(embedding, "")
        assert vectors is not None  # asked for by name
        inputs = Trace.load(train_path), Trace.load(eval_path), load_profile(profile), vectors, scorer
        record = run(*inputs, seconds, orders, bootstrap, seed, quiet)
    except TreebudgetError as error:
        raise click.ClickException(f"{error}" + (f"\nhint: {error.hint}" if error.hint else "")) from error
    if as_json:
        emit_json(record)


if __name__ == "__main__":
    main()
