"""`decoder generate`: one prompt, text as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costmodel.clitools import FiniteRange, emit_json, json_option, note, quiet_option
from decoder.commands.options import (
    FILE,
    SEED,
    ModelChoice,
    default_profile,
    load_cost,
    load_plan,
    measuring_command,
    model_options,
)
from decoder.errors import UsageError

if TYPE_CHECKING:
    from decoder.records import Generation
    from decoder.target import Target


@click.command()
@click.argument("prompt")
@model_options()
@click.option("--plan", type=FILE, default=None, help="Plan of `selector tune`.  [default: the one tuned here, if any]")
@click.option("--profile", default=None, help="Profile name or file.  [default: the one measured here]")
@click.option("--policy", default=None, help="Policy instead of the plan's: plain, chain, fixed:8, unimodal, exact, priced ...")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(1), default=None, help="Sample among the k likeliest tokens.")
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=None, help="Sample within this probability mass.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the sampling.")
@click.option("--raw", is_flag=True, help="Continue the text itself: no chat template.")
@json_option
@quiet_option
def generate(models: ModelChoice, prompt: str, plan: Path | None, profile: str | None, policy: str | None, max_new_tokens: int,
             temperature: float, top_k: int | None, top_p: float | None, seed: int, raw: bool, as_json: bool,
             quiet: bool) -> None:
    """Continue PROMPT (`-` reads it from stdin) and stream the text to stdout.

    Without a profile of this machine it decodes plainly.

    \b
    Example:
      decoder generate --plan plan.json "Write a function that reverses a list."
    """
    from decoder.loop import Decoder
    from decoder.prompts import encode_prompt
    from decoder.streaming import TextStream

    text = _prompt_text(prompt)
    target = models.load_target()
    drafter, selector = _speculation(models, target, plan, profile, policy, quiet)
    prompt_ids = list(target.tokenizer(text).input_ids) if raw else encode_prompt(target.tokenizer, text)
    stream = TextStream(target.tokenizer, target.stop_ids)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    result = Decoder(target, drafter, selector).generate(
        prompt_ids, max_new_tokens, temperature=temperature, seed=seed, top_k=top_k, top_p=top_p,
        on_tokens=lambda tokens: show(stream.push(tokens)))
    show(stream.finish())
    name = selector.policy.name if selector is not None else "plain"
    if as_json:
        emit_json(_record(result, "".join(pieces), name))
        return
    click.echo()
    note(f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} per second, {result.tokens_per_round:.2f} per round, "
         f"policy {name}, ended by {result.finish_reason}", quiet)


def _prompt_text(prompt: str) -> str:
    """The prompt, from stdin for `-`; UsageError where it is no text in UTF-8."""
    from decoder.prompts import is_encodable

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not text in UTF-8: {error}") from error
    if not is_encodable(text):
        raise UsageError("the prompt is not text in UTF-8")
    return text


def _speculation(models: ModelChoice, target: Target, plan: Path | None, profile: str | None, policy: str | None,
                 quiet: bool) -> tuple[Any, Any]:
    """Drafter and selector, or (None, None) where nothing says what speculation would cost here."""
    from selector import TreeSelector

    if models.drafter == "none" and (plan is not None or policy not in (None, "plain")):
        raise UsageError("--plan and --policy need a drafter to draft with", hint="leave them or --drafter none out")
    if policy == "plain" or models.drafter == "none":
        return None, None
    if profile is None and default_profile(models) is None:
        if plan is None and policy is None:
            note(f"no profile of this machine yet, so this decodes plainly; measure one with: {measuring_command(models)}", quiet)
            return None, None
    drafter = models.load_drafter(target)
    cost = load_cost(models, target, drafter, profile)
    selector = TreeSelector(cost, policy=policy, plan=load_plan(models, target, drafter, plan, quiet))
    return (drafter, selector) if selector.drafts else (None, None)


def _record(result: Generation, text: str, policy: str) -> dict[str, Any]:
    return {
        "text": text, "token_ids": result.token_ids, "num_prompt_tokens": result.num_prompt_tokens, "policy": policy,
        "finish_reason": result.finish_reason, "tokens_per_second": result.tokens_per_second,
        "tokens_per_round": result.tokens_per_round, "mean_nodes": result.mean_nodes, "num_rounds": len(result.rounds),
        "prefill_seconds": result.prefill_seconds, "stage_seconds": result.stage_seconds(),
    }
