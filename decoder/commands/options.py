"""What several commands share: which models to load, on what, and the files that price them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costmodel.clitools import note
from decoder.errors import UsageError
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET, default_plan_path, default_profile_path

if TYPE_CHECKING:
    from decoder.prompts import Prompt
    from decoder.target import Target

Command = Callable[..., Any]
FILE = click.Path(dir_okay=False, path_type=Path)
SEED = click.IntRange(0, 2**32 - 1)


@dataclass(frozen=True)
class ModelChoice:
    """Which target and drafter, and how they run."""

    target: str = DEFAULT_TARGET
    drafter: str = DEFAULT_DRAFTER
    dtype: str = DEFAULT_DTYPE
    device: str = "cpu"
    threads: int | None = None
    linear: str = "auto"

    def load_target(self) -> Target:
        """Set the threads and load the target."""
        import torch

        from decoder.target import Target

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Target.load(self.target, dtype=self.dtype, device=self.device, linear=self.linear)

    def load_drafter(self, target: Target) -> Any:
        """The drafter for a loaded target, or None for the name `none`."""
        if self.drafter == "none":
            return None
        from decoder.drafters.registry import load_drafter

        return load_drafter(self.drafter, target)


def model_options(dtype: str = DEFAULT_DTYPE) -> Callable[[Command], Command]:
    """Add --target, --drafter, --dtype, --device, --threads and --linear; the command gets one `models: ModelChoice`."""
    def decorate(function: Command) -> Command:
        def command(target: str, drafter: str, dtype: str, device: str, threads: int | None, linear: str, **rest: Any) -> Any:
            return function(models=ModelChoice(target, drafter, dtype, device, threads, linear), **rest)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
        options = [
            click.option("--target", default=DEFAULT_TARGET, show_default=True, help="A registered name, a folder or a hub id."),
            click.option("--drafter", default=DEFAULT_DRAFTER, show_default=True, help="A name, a folder, or `none`."),
            click.option("--dtype", default=dtype, show_default=True, help="float32, bfloat16 or float16."),
            click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:0 ..."),
            click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads.  [default: what torch chooses]"),
            click.option("--linear", default="auto", show_default=True, help="Linear layers: default, prepacked or auto."),
        ]
        for option in reversed(options):
            command = option(command)
        return command
    return decorate


def fitting_prompts(target: Target, prompts: list[Prompt], max_new_tokens: int, quiet: bool) -> list[Prompt]:
    """The prompts that the target's context holds with their new tokens; a note names the others. ContextError for none."""
    from decoder.prompts import leave_out_long

    kept, left_out = leave_out_long(target.tokenizer, prompts, max_new_tokens, target.max_context_tokens)
    if left_out:
        note(left_out, quiet)
    return kept


def load_cost(models: ModelChoice, target: Target, drafter: Any, profile: str | None) -> Any:
    """The cost model of `profile`, or of what this machine measured for these models; checked against what runs.

    Raises UsageError with the command that measures where there is none, IdentityMismatch where it is of something else.
    """
    from costmodel import load_profile
    from decoder.identity import target_identity

    path = profile if profile is not None else default_profile(models)
    if path is None:
        raise UsageError(f"no profile of {models.target} in {models.dtype} on this machine yet",
                         hint=f"measure one (2 minutes): {measuring_command(models)}")
    return load_profile(path, expect=target_identity(target, drafter))


def measuring_command(models: ModelChoice) -> str:
    """The command that measures these models, as far as they are not the defaults."""
    chosen = {"target": (models.target, DEFAULT_TARGET), "dtype": (models.dtype, DEFAULT_DTYPE), "device": (models.device, "cpu")}
    options = [f"--{name} {value}" for name, (value, default) in chosen.items() if value != default]
    return " ".join(["costmodel profile", *options])


def policy_names(policies: str) -> tuple[str, ...]:
    """Policies of a comma-separated list; UsageError for none."""
    names = tuple(name.strip() for name in policies.split(",") if name.strip())
    if not names:
        raise UsageError("--policies names no policy")
    return names


def default_profile(models: ModelChoice) -> Path | None:
    """Where this machine's profile of these models is, or None."""
    path = default_profile_path(models.target, models.dtype, models.device)
    return path if path.exists() else None


def load_plan(models: ModelChoice, target: Target, drafter: Any, plan: Path | None, quiet: bool = True) -> Any:
    """The plan at `plan`, or the one tuned for these models here, or None; checked against what runs."""
    from decoder.identity import target_identity
    from selector import Plan

    path = plan if plan is not None else default_plan_path(models.target, models.drafter, models.dtype)
    if plan is None and not path.exists():
        return None
    weights = {"target_sha256": target.weights_sha256}
    weights |= {} if drafter is None else {"drafter_sha256": drafter.identity().get("drafter_sha256")}
    loaded = Plan.load(path, expect=target_identity(target, drafter).to_dict() | weights)
    note(f"plan: {loaded.policy} ({path})", quiet)
    return loaded
