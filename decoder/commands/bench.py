"""`decoder bench`: policies against each other, live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from costmodel.clitools import check_output, emit_json, json_option, note, progress, quiet_option, to_jsonable, write_atomic
from decoder.commands.options import FILE, ModelChoice, fitting_prompts, load_cost, load_plan, model_options, policy_names

DEFAULT_POLICIES = "plain,chain,fixed:8,fixed:16,unimodal,exact,priced"


def save(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, whole or not at all."""
    write_atomic(path, json.dumps(to_jsonable(record), indent=2) + "\n")


def partial_path(out: Path) -> Path:
    """Where the record of a bench that goes on is kept."""
    return out.with_name(out.name + ".partial")


@click.command()
@model_options()
@click.option("--prompts", type=FILE, default=None, help="JSON lines.  [default: the package's own prompts]")
@click.option("--limit", type=click.IntRange(1), default=None, help="Only the first prompts.")
@click.option("--policies", default=DEFAULT_POLICIES, show_default=True, help="Comma-separated; `plan` for the plan's own.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens per prompt.")
@click.option("--max-nodes", type=click.IntRange(1), default=64, show_default=True, help="Largest tree of any policy.")
@click.option("--top-k", type=click.IntRange(1), default=16, show_default=True, help="Candidates per depth.")
@click.option("--profile", default=None, help="Profile name or file.  [default: the one measured here]")
@click.option("--plan", type=FILE, default=None, help="Plan for the policy `plan`.  [default: the one tuned here, if any]")
@click.option("--no-predict", is_flag=True, help="Leave replay's prediction out.")
@click.option("--out", type=FILE, default=None, help="Also write the JSON record here.")
@json_option
@quiet_option
def bench(models: ModelChoice, prompts: Path | None, limit: int | None, policies: str, max_new_tokens: int, max_nodes: int,
          top_k: int, profile: str | None, plan: Path | None, no_predict: bool, out: Path | None, as_json: bool,
          quiet: bool) -> None:
    """Decode every prompt with every policy, interleaved, and compare with plain decoding.

    Ctrl-C ends it and shows the prompts decoded so far; with --out, a kill leaves them beside it as OUT.partial.

    \b
    Example:
      decoder bench --prompts prompts.jsonl --dtype float32 --policies plain,chain,fixed:8,exact,priced --json
    """
    from decoder.bench import BenchResult, BenchSettings, bench_record, ceiling, run_bench
    from decoder.benchtable import print_bench
    from decoder.prompts import load_prompts

    names = policy_names(policies)
    check_output(out)
    settings = BenchSettings(names, max_new_tokens, max_nodes, top_k, predict=not no_predict)
    asked = load_prompts(prompts, limit)
    target = models.load_target()
    chosen = fitting_prompts(target, asked, max_new_tokens, quiet)
    drafter = models.load_drafter(target)
    cost = load_cost(models, target, drafter, profile)
    loaded_plan = load_plan(models, target, drafter, plan) if "plan" in names else None
    note(f"ceiling: {ceiling(cost, drafter):.1f} tokens per second if every draft were accepted whole, by the "
         f"{cost.provenance} profile", quiet)

    def keep(so_far: BenchResult) -> None:
        if out is not None:
            save(partial_path(out), bench_record(so_far, target, drafter, cost, chosen, settings))

    with progress("bench", (len(chosen) + 1) * len(settings.names), quiet) as advance:
        result = run_bench(target, drafter, cost, chosen, settings, plan=loaded_plan, progress=advance, after_prompt=keep)
    record = bench_record(result, target, drafter, cost, chosen, settings)
    if as_json:
        emit_json(record)
    else:
        print_bench(record)
    if out is not None:  # after printing: whatever the disk does, nothing that was measured is lost
        save(out, record)
        partial_path(out).unlink(missing_ok=True)
    if result.interrupted:
        raise KeyboardInterrupt
