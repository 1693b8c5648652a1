"""`costmodel compose` and `costmodel estimate`: profiles for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import click

from costmodel.clitools import check_output, emit_json, json_option, note, quiet_option
from costmodel.compose import ROUTING, compose_profile
from costmodel.errors import UsageError
from costmodel.gpus import find_gpu
from costmodel.loading import load_profile
from costmodel.model import CostModel
from costmodel.operators import DEFAULT_STACKS, OperatorTables
from costmodel.profile import Profile
from costmodel.roofline import estimate_profile
from costmodel.shapes import find_shape
from costmodel.show import describe, diagnostic_lines
from profiles.paths import cache_dir, slug, target_slug

OUT = click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="File.  [default: cache folder]")
MODEL = click.option("--model", required=True, help="A shipped shape (Qwen/Qwen3-8B), a config.json, or its folder.")
GPU = click.option("--gpu", required=True, help="Such as h100; see the hint of a name that is not known.")


@click.command()
@GPU
@MODEL
@click.option("--engine", type=click.Choice(["vllm", "sglang", "trtllm"]), default=None, help="Whose kernels.")
@click.option("--engine-version", default=None, help="Version of that engine.  [default: the newest]")
@click.option("--routing", type=click.Choice(["power_law_1.2", "power_law_1.01", "balanced"]), default=ROUTING, show_default=True,
              help="How tokens spread over experts.")  # fmt: skip
@OUT
@json_option
@quiet_option
def compose(
    gpu: str, model: str, engine: str | None, engine_version: str | None, routing: str, out: Path | None, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Compose a profile from operator tables measured on that GPU (extra `ops`).

    Attention is priced with the cache read once per request (seconds) and once per token (the upper end of the interval).

    \b
    Example:
      costmodel compose --gpu h100 --model Qwen/Qwen3-8B --out h100.json
      costmodel compose --gpu b200 --model ./my-model/config.json
    """
    check_output(out)
    system = gpu if gpu in DEFAULT_STACKS else find_gpu(gpu).operator_tables
    if system is None:
        known = ", ".join(sorted(DEFAULT_STACKS))
        raise UsageError(f"there are no operator tables for {gpu}", hint=f"tables: {known}; or try `costmodel estimate`")
    profile = compose_profile(find_shape(model), OperatorTables.find(system, engine, engine_version), routing=routing)
    _finish(profile, gpu, model, out, as_json, quiet)


@click.command()
@GPU
@MODEL
@click.option("--calibrate", default=None, help="Profile (file or name) of this model on this GPU whose points are known.")
@OUT
@json_option
@quiet_option
def estimate(gpu: str, model: str, calibrate: str | None, out: Path | None, as_json: bool, quiet: bool) -> None:
    """Estimate a profile from datasheet rates: a roofline, calibrated by whatever points are known.

    \b
    Example:
      costmodel estimate --gpu rtx4090 --model Qwen/Qwen3-4B
      costmodel estimate --gpu a800 --model Qwen/Qwen3-8B --calibrate few-points.json
    """
    check_output(out)
    known = None if calibrate is None else load_profile(calibrate).profile
    _finish(estimate_profile(find_gpu(gpu), find_shape(model), known), gpu, model, out, as_json, quiet)


def _finish(profile: Profile, gpu: str, model: str, out: Path | None, as_json: bool, quiet: bool) -> None:
    """Save, and print the path or the document; the provenance stands on every line."""
    out = out or cache_dir() / "profiles" / f"{slug(gpu)}_{target_slug(model)}_{profile.provenance}.json"
    profile.save(out)
    cost = CostModel(profile)
    for line in [f"source: {profile.source}", *profile.notes, *diagnostic_lines(cost.diagnostics, most=8)]:
        note(f"{profile.provenance}: {line}", quiet)
    if as_json:
        emit_json({**describe(cost), "provenance": profile.provenance, "path": str(out)})
    else:
        click.echo(f"{profile.provenance}: {out}")
