"""`decoder trace`: record what replay and tuning need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costmodel.clitools import emit_json, json_option, note, progress, quiet_option
from decoder.commands.options import FILE, ModelChoice, fitting_prompts, model_options
from decoder.commands.taking import SHARE, Share
from decoder.errors import UsageError
from profiles.paths import default_trace_path

if TYPE_CHECKING:
    from selector import Trace


def chosen_prompts(prompts: list[Any], take: Share | None, limit: int | None) -> list[Any]:
    """The share of the prompts that is asked for, then the first `limit` of it; UsageError where none is left."""
    chosen = (prompts if take is None else take.of(prompts))[:limit]
    if not chosen:  # a file without prompts was refused before
        raise UsageError(f"--take {take} leaves none of {len(prompts)} prompts")
    return chosen


@click.command()
@model_options()
@click.option("--prompts", type=FILE, default=None, help="JSON lines.  [default: the package's own prompts]")
@click.option("--take", type=SHARE, default=None, help="Only prompts i (from 0) with i % EVERY == REST, before --limit.")
@click.option("--limit", type=click.IntRange(1), default=None, help="Only the first prompts.")
@click.option("--out", type=FILE, default=None, help="File.  [default: cache folder]")
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens per prompt.")
@click.option("--top-k", type=click.IntRange(1), default=16, show_default=True, help="Candidates kept per depth.")
@click.option("--rows", "num_rows", type=click.IntRange(1), default=16, show_default=True, help="Prompts decoded at once.")
@json_option
@quiet_option
def trace(models: ModelChoice, prompts: Path | None, take: Share | None, limit: int | None, out: Path | None,
          max_new_tokens: int, top_k: int, num_rows: int, as_json: bool, quiet: bool) -> None:
    """Decode every prompt once and record, at every place, what the drafter would have proposed.

    What was recorded survives Ctrl-C and a kill: the same command goes on. Prompts to tune a selector on should be
    ones that the drafter was not trained on: take those that `decoder train` left out (every sixth, 6:5).

    \b
    Example:
      decoder trace --prompts prompts.jsonl --take 6:5 --out trace.safetensors
    """
    from decoder.prompts import encode_prompts, load_prompts
    from decoder.seen import prompts_seen_by
    from decoder.tracing import record_trace

    path = out or default_trace_path(models.target, models.drafter, models.dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = models.load_target()
    drafter = models.load_drafter(target)
    if drafter is None:
        raise UsageError("a trace needs a drafter")
    asked = chosen_prompts(load_prompts(prompts), take, limit)
    chosen = encode_prompts(target.tokenizer, fitting_prompts(target, asked, max_new_tokens, quiet))
    with progress("trace", len(chosen), quiet) as advance:
        done = 0

        def count(num_texts: int) -> None:
            nonlocal done
            advance(num_texts - done)
            done = num_texts

        recorded = record_trace(target, drafter, chosen, path, max_new_tokens=max_new_tokens, top_k=top_k,
                                num_rows=num_rows, seen=prompts_seen_by(models.drafter), progress=count)
    print_recorded(recorded, path, as_json, quiet)


def print_recorded(recorded: Trace, path: Path, as_json: bool, quiet: bool) -> None:
    """Say where the trace is and what is in it, and warn of prompts that the drafter was trained on."""
    saw = recorded.identity["drafter_saw"]
    if saw:
        note(f"the drafter was trained on {saw} of these {len(recorded.texts)} prompts: its drafts are better here than in life, "
             "so do not tune on this trace; --take chooses prompts that were left out of training", quiet)
    num_tokens = sum(len(text.token_ids) - text.num_prompt_tokens for text in recorded.texts)
    if as_json:
        identity = {name: value for name, value in recorded.identity.items() if name != "prompt_sha256s"}  # one per prompt: long
        emit_json({"path": str(path), "num_texts": len(recorded.texts), "num_tokens": num_tokens, "identity": identity})
    else:
        note(f"{len(recorded.texts)} texts, {num_tokens} tokens", quiet)
        click.echo(str(path))
