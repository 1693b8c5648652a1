"""`decoder train`: a DFlash drafter for any small target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from costmodel.clitools import FiniteRange, emit_json, json_option, note, quiet_option
from decoder.commands.options import FILE, SEED, ModelChoice, model_options
from decoder.commands.taking import SHARE, Share
from decoder.errors import UsageError
from profiles.paths import cache_dir, target_slug


def refuse_shape_beside_start(context: click.Context) -> None:
    """A drafter to start from has a shape of its own: UsageError where another one is asked for beside it."""
    asked = [name for name in ("layers", "block_size", "mask_token")
             if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if context.params.get("start_from") is not None and asked:
        options = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise UsageError(f"{options} cannot be chosen with --start-from, whose drafter has its own", hint="leave one of them out")


@click.command()
@model_options()
@click.option("--prompts", type=FILE, required=True, help="JSON lines.")
@click.option("--leave-out", type=SHARE, default="6:5", show_default=True,
              help="Prompts i (from 0) with i % EVERY == REST are kept from the drafter.")
@click.option("--start-from", default=None, metavar="DRAFTER",
              help="Shape and weights to start from: a name or folder.  [default: the target's last layers]")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder.  [default: cache folder]")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Layers of the drafter.")
@click.option("--block-size", type=click.IntRange(2), default=8, show_default=True, help="Root and drafted positions.")
@click.option("--mask-token", type=click.IntRange(0), default=16, show_default=True, help="A token id texts do not contain.")
@click.option("--passes", type=click.IntRange(1), default=2, show_default=True, help="Texts per prompt.")
@click.option("--max-new-tokens", type=click.IntRange(16), default=256, show_default=True, help="Tokens per text.")
@click.option("--steps", type=click.IntRange(1), default=12000, show_default=True, help="Optimiser steps.")
@click.option("--minutes", type=FiniteRange(0, min_open=True), default=None, help="End by the clock instead.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything random.")
@json_option
@quiet_option
def train(models: ModelChoice, prompts: Path, leave_out: Share, start_from: str | None, work: Path | None, layers: int,
          block_size: int, mask_token: int, passes: int, max_new_tokens: int, steps: int, minutes: float | None, seed: int,
          as_json: bool, quiet: bool) -> None:
    """Let the target write texts, then train a block-diffusion drafter on them. Every stage goes on after a kill.

    Beside the drafter, prompts_seen.json says which prompts it was trained on, so that traces of them are told apart.

    \b
    Example:
      decoder train --target ./my-model --prompts prompts.jsonl --minutes 60 --work ./drafter
    """
    from decoder.drafters.registry import find_drafter
    from decoder.prompts import encode_prompt, load_prompts
    from decoder.training.run import CorpusSettings, DrafterShape, TrainingRun, run_training
    from decoder.training.train import TrainSettings

    refuse_shape_beside_start(click.get_current_context())
    folder = work or cache_dir() / "training" / target_slug(models.target)
    corpus = CorpusSettings(passes=passes, max_new_tokens=max_new_tokens, seed=seed, heldout_every=leave_out.every,
                            heldout_rest=leave_out.rest, heldout_tokens=min(max_new_tokens, CorpusSettings.heldout_tokens))
    run = TrainingRun(folder, DrafterShape(num_layers=layers, block_size=block_size, mask_token_id=mask_token),
                      corpus, TrainSettings(steps=steps, minutes=minutes, seed=seed),
                      None if start_from is None else find_drafter(start_from))
    chosen = load_prompts(prompts)
    target = replace(models, linear="default" if models.linear == "auto" else models.linear).load_target()

    def report(line: dict[str, Any]) -> None:
        note(", ".join(f"{name} {value}" for name, value in line.items()), quiet)

    record = run_training(run, target, [encode_prompt(target.tokenizer, prompt.text) for prompt in chosen], report)
    if as_json:
        emit_json(record)
    else:
        click.echo(str(folder))
