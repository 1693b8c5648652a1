"""`decoder check`: is speculation lossless on this machine?"""

from __future__ import annotations

from pathlib import Path

import click

from costmodel.clitools import emit_json, json_option, progress, quiet_option
from decoder.commands.options import FILE, ModelChoice, fitting_prompts, model_options, policy_names
from decoder.errors import CheckFailedError, UsageError


@click.command()
@model_options(dtype="float32")
@click.option("--prompts", type=FILE, default=None, help="JSON lines.  [default: the package's own prompts]")
@click.option("--limit", type=click.IntRange(1), default=4, show_default=True, help="Only the first prompts.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="Tokens per prompt.")
@click.option("--policies", default="chain,fixed:8,fixed:16,unimodal,exact,priced", show_default=True, help="Comma-separated.")
@json_option
@quiet_option
def check(models: ModelChoice, prompts: Path | None, limit: int, max_new_tokens: int, policies: str, as_json: bool,
          quiet: bool) -> None:
    """Decode a few prompts with every policy and compare each text with plain decoding, token for token.

    In float32 every text must be the same, and drafts must be accepted now and then. In other dtypes texts may part where
    two tokens nearly tie; anything else fails. Exit code 1 where a check fails.

    \b
    Example:
      decoder check --limit 8
    """
    from decoder.benchtable import print_check
    from decoder.check import check_settings, run_check
    from decoder.prompts import load_prompts

    settings = check_settings(policy_names(policies), max_new_tokens)
    if settings.names == ("plain",) or "plan" in settings.names:
        raise UsageError("check compares policies that draft with plain decoding, by name", hint="such as --policies chain,exact")
    asked = load_prompts(prompts, limit)
    target = models.load_target()
    chosen = fitting_prompts(target, asked, max_new_tokens, quiet)
    drafter = models.load_drafter(target)
    with progress("check", (len(chosen) + 1) * len(settings.names), quiet) as advance:
        record = run_check(target, drafter, chosen, settings, progress=advance)
    if as_json:
        emit_json(record)
    else:
        print_check(record)
    if not record["passed"]:
        raise CheckFailedError("; ".join(record["failures"]), hint="report it with the output of: decoder check --json")
