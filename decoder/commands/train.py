"""`decoder train`: a DFlash drafter for any small target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from costmodel.clitools import emit_json, json_option, note, quiet_option
from decoder.commands.options import FILE, ModelChoice, model_options
from profiles.paths import cache_dir, target_slug


@click.command()
@model_options()
@click.option("--prompts", type=FILE, required=True, help="JSON lines; every sixth prompt is held out.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder.  [default: cache folder]")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Layers of the drafter.")
@click.option("--block-size", type=click.IntRange(2), default=8, show_default=True, help="Root and drafted positions.")
@click.option("--mask-token", type=click.IntRange(0), default=16, show_default=True, help="A token id texts do not contain.")
@click.option("--passes", type=click.IntRange(1), default=2, show_default=True, help="Texts per prompt.")
@click.option("--max-new-tokens", type=click.IntRange(16), default=256, show_default=True, help="Tokens per text.")
@click.option("--steps", type=click.IntRange(1), default=12000, show_default=True, help="Optimiser steps.")
@click.option("--minutes", type=float, default=None, help="End by the clock instead.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@json_option
@quiet_option
def train(models: ModelChoice, prompts: Path, work: Path | None, layers: int, block_size: int, mask_token: int, passes: int,
          max_new_tokens: int, steps: int, minutes: float | None, seed: int, as_json: bool, quiet: bool) -> None:
    """Let the target write texts, then train a block-diffusion drafter on them. Every stage goes on after a kill.

    \b
    Example:
      decoder train --target ./my-model --prompts prompts.jsonl --minutes 60 --work ./drafter
    """
    from decoder.prompts import encode_prompt, load_prompts
    from decoder.training.run import CorpusSettings, DrafterShape, TrainingRun, run_training
    from decoder.training.train import TrainSettings

    folder = work or cache_dir() / "training" / target_slug(models.target)
    run = TrainingRun(folder, DrafterShape(num_layers=layers, block_size=block_size, mask_token_id=mask_token),
                      CorpusSettings(passes=passes, max_new_tokens=max_new_tokens, seed=seed),
                      TrainSettings(steps=steps, minutes=minutes, seed=seed))
    chosen = load_prompts(prompts)
    target = models.load_target()

    def report(line: dict[str, Any]) -> None:
        note(", ".join(f"{name} {value}" for name, value in line.items()), quiet)

    record = run_training(run, target, [encode_prompt(target.tokenizer, prompt.text) for prompt in chosen], report)
    if as_json:
        emit_json(record)
    else:
        click.echo(str(folder))
