"""`costmodel profile`: measure this machine, or say what is known about another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from costmodel.adaptive import AdaptivePlan
from costmodel.backend import create_backend
from costmodel.clitools import POSITIVE, FiniteRange, emit_json, json_option, note, progress, quiet_option
from costmodel.errors import MeasurementError, UsageError
from costmodel.measure import num_steps, profile_backend
from costmodel.model import CostModel
from costmodel.offer import has_gpu, offer_profile
from costmodel.plan import MeasurePlan
from costmodel.profile import Profile
from costmodel.show import describe, diagnostic_lines
from profiles.checks import LARGEST
from profiles.paths import DEFAULT_DRAFTER, DEFAULT_DTYPE, DEFAULT_TARGET, default_profile_path

GRID, CPU = MeasurePlan(), AdaptivePlan()
GPU = AdaptivePlan(max_verify_tokens=512, max_context_tokens=16384, min_context_tokens=0, max_seconds=180.0)


class Numbers(click.ParamType):
    """Whole numbers separated by commas; `a-b` is a run of them."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """`1-4,8` becomes (1, 2, 3, 4, 8)."""
        if isinstance(value, tuple):
            return value
        found: set[int] = set()
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
                self.fail(f"{value!r} is not a list such as 1-10,16,32", param, ctx)
            ends = int(first), int(last if dash else first)
            if ends[1] > LARGEST or ends[1] - ends[0] > 10**5:
                self.fail(f"{value!r} goes beyond {LARGEST:,}, or lists more than 100,000 numbers", param, ctx)
            found |= set(range(ends[0], ends[1] + 1))
        return tuple(sorted(found))


NUMBERS = Numbers()


@click.command()
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="Model to time: a name, a folder or a hub id.")
@click.option("--drafter", default=None, help=f"Drafter to time, or `none`.  [default: {DEFAULT_DRAFTER}]")
@click.option("--dtype", default=DEFAULT_DTYPE, show_default=True, help="float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:0 ...")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads.  [default: what the engine chooses]")
@click.option("--backend", "backend_name", default="transformers", show_default=True, help="Engine to time.")
@click.option("--linear", default=None, help="Form of the linear layers, if the engine has several.  [default: the engine's]")
@click.option("--random-weights", is_flag=True, help="Build the model from its configuration alone; nothing is downloaded.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks, under torchrun.")
@click.option("--mode", type=click.Choice(["eager", "captured"]), default="eager", show_default=True, help="Or in CUDA graphs.")
@click.option("--captured-sizes", type=NUMBERS, default=None, help="Sizes to capture.  [default: 1,2,4, then steps of 8 and 16]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="File.  [default: cache folder]")
@click.option("--error", type=FiniteRange(0, 1, min_open=True), default=CPU.error, show_default=True, help="Wanted error.")
@click.option("--max-seconds", type=POSITIVE, default=None, help="Time to spend, about.  [default: 100, on a GPU 180]")
@click.option("--max-verify-tokens", type=click.IntRange(1), default=None, help="Largest size.  [default: 64, on a GPU 512]")
@click.option("--max-context", type=click.IntRange(0), default=None, help="Largest context.  [default: 512, on a GPU 16384]")
@click.option("--requests", "--batch", "requests", type=NUMBERS, default="1", show_default=True, help="Requests in the batch.")
@click.option("--verify-tokens", type=NUMBERS, default=None, help="These sizes (root included) and no others; nothing is chosen.")
@click.option("--context", "contexts", type=NUMBERS, default=None, help="These contexts and no others; nothing is chosen.")
@click.option("--rounds", type=click.IntRange(1), default=GRID.max_rounds, show_default=True, help="Most samples of a shape.")
@click.option("--gpu", default=None, help="A GPU by name; where this machine has none, what is known about it.")
@click.option("--require-measured", is_flag=True, help="With --gpu: fail rather than offer anything but a measurement.")
@json_option
@quiet_option
def profile(
    gpu: str | None, require_measured: bool, target: str, drafter: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Time the target's forward over trees, and drafting, selecting and committing.

    Sizes, contexts and batches are chosen as it goes, always where least is known, until the wanted error or the time is
    reached; with --verify-tokens or --context a fixed grid is timed. Rounds are interleaved and warm-up is dropped. What
    was measured survives Ctrl-C and a kill: the same command goes on.

    \b
    Example:
      costmodel profile --dtype bfloat16 --out here.json
      costmodel profile --verify-tokens 1-8,16,32 --context 128,1024 --rounds 9
      costmodel profile --target Qwen/Qwen3-8B --random-weights --device cuda --mode captured --batch 1,4,16
      torchrun --no-python --nproc-per-node 2 costmodel profile --tp 2 --target Qwen/Qwen3-8B --device cuda
      costmodel profile --gpu a40 --target Qwen/Qwen3-8B
    """
    if require_measured and gpu is None:
        raise UsageError("--require-measured belongs to --gpu")
    if gpu is not None and not has_gpu(gpu):
        refuse_unheard(click.get_current_context(), gpu)
        _offer(gpu, target, require_measured, options["out"], as_json, quiet)
        return
    if gpu is not None and options["device"] == "cpu":
        options["device"] = "cuda"
    _measure(target, drafter, as_json, quiet, **options)


def refuse_unheard(context: click.Context, gpu: str) -> None:
    """UsageError for options of a measurement where the GPU is not here, so that nothing asked for is passed over in silence."""
    heard = ("gpu", "require_measured", "target", "out", "as_json", "quiet")
    given = [name for name in context.params if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    unheard = [option.opts[0] for option in context.command.params if option.name in given and option.name not in heard]
    if unheard:
        raise UsageError(f"no {gpu} in this machine, so nothing is measured and {', '.join(unheard)} would not be heard",
                         hint="leave them out, or run on a machine with that GPU")


def _offer(gpu: str, target: str, require_measured: bool, out: Path | None, as_json: bool, quiet: bool) -> None:
    """Say what is known about a GPU that is not here; its provenance stands on every line."""
    offer = offer_profile(gpu, target, require_measured)
    found = offer.profile
    path = offer.path if out is None else found.save(out)
    if as_json:
        cost = CostModel(found)
        where = None if path is None else str(path)
        emit_json({**describe(cost), "provenance": found.provenance, "how": offer.how, "path": where})
        return
    lines = [f"no {gpu} in this machine: nothing was measured", offer.how, f"source: {found.source}", *found.notes]
    for line in lines:
        note(f"{found.provenance}: {line}", quiet)
    cost = CostModel(found)
    context = min((row.context_tokens for row in cost.table.rows), key=lambda item: abs(item - 1024))
    for tokens in (size for size in (1, 8, 32, 64, 128, 256, 512) if size <= cost.max_verify_tokens):
        seconds = float(cost.verify_seconds(tokens, context))
        low, high = cost.verify_interval(tokens, context)
        click.echo(
            f"{found.provenance}: {tokens} verify tokens at context {context}: {seconds * 1e3:.2f} ms "
            f"({low * 1e3:.2f}-{high * 1e3:.2f})"
        )
    if path is not None:
        click.echo(f"{found.provenance}: {path}")


def _measure(
    target: str, drafter: str | None, as_json: bool, quiet: bool, *, dtype: str, device: str, threads: int | None,
    backend_name: str, linear: str | None, random_weights: bool, tp: int, mode: str, captured_sizes: tuple[int, ...] | None,
    out: Path | None, rounds: int, **extent: Any,
) -> None:  # fmt: skip
    """Measure this machine and save the profile."""
    if captured_sizes is not None and mode != "captured":
        raise UsageError("--captured-sizes belongs to --mode captured")
    out = out or own_path(default_profile_path(target, dtype, device), mode, tp)
    if drafter is None and target == DEFAULT_TARGET and not random_weights:
        drafter = DEFAULT_DRAFTER
    plan = make_plan(device != "cpu", rounds, **extent)
    options: dict[str, Any] = {"target": target, "drafter": None if drafter == "none" else drafter, "dtype": dtype}
    options |= {"device": device, "threads": threads}
    if linear is not None:
        options["linear"] = linear
    if random_weights:
        options["random_weights"] = True
    if tp > 1:
        options["tensor_parallel"] = tp
    if mode != "eager":
        options |= {"mode": mode} | ({} if captured_sizes is None else {"captured_sizes": captured_sizes})
    if os.environ.get("RANK", "0") == "0":
        note(f"loading {target} with the {backend_name} backend", quiet)
    backend = _create(backend_name, options)
    if getattr(backend, "rank", 0) > 0:  # rank 0 decides, times and writes
        backend.follow()
        return
    partial = out.with_name(out.name + ".partial.jsonl")
    blocks = len(getattr(backend, "draft_block_sizes", ()))
    total = num_steps(plan, blocks) if isinstance(plan, MeasurePlan) else plan.max_seconds
    with leading(backend, tp) as leader, progress("profiling", total, quiet) as advance:
        measured = profile_backend(leader, plan, partial_path=partial, progress=advance)
    save_measured(measured, out, partial, as_json, quiet)


@contextmanager
def leading(backend: Any, tp: int) -> Iterator[Any]:
    """The backend that rank 0 times: its own, or the one that takes the other ranks along and lets them go at the end."""
    if tp == 1 or not hasattr(backend, "lead"):
        yield backend
        return
    leader = backend.lead()
    try:
        yield leader
    finally:
        leader.close()


def own_path(path: Path, mode: str, tp: int) -> Path:
    """The default file of a captured or tensor-parallel profile, beside the one of an eager one on one device."""
    suffix = ("" if mode == "eager" else f"_{mode}") + ("" if tp == 1 else f"_tp{tp}")
    return path.with_name(path.stem + suffix + path.suffix)


def _create(backend_name: str, options: dict[str, Any]) -> Any:
    """The backend; one that does not know an option says so instead of failing with a traceback."""
    try:
        return create_backend(backend_name, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise MeasurementError(f"the {backend_name} backend cannot do this: {error}", hint="leave that option out") from error


def make_plan(
    on_gpu: bool, rounds: int, *, error: float, max_seconds: float | None, max_verify_tokens: int | None, max_context: int | None,
    requests: tuple[int, ...], verify_tokens: tuple[int, ...] | None, contexts: tuple[int, ...] | None,
) -> MeasurePlan | AdaptivePlan:  # fmt: skip
    """The plan the options ask for: a grid where sizes or contexts were given, else adaptive."""
    base = GPU if on_gpu else CPU
    seconds = base.max_seconds if max_seconds is None else max_seconds
    if verify_tokens is not None or contexts is not None:
        if max_verify_tokens is not None or max_context is not None:
            raise UsageError("--max-verify-tokens and --max-context belong to the adaptive choice, not to a given grid")
        return MeasurePlan(
            verify_tokens=verify_tokens or GRID.verify_tokens, context_tokens=contexts or GRID.context_tokens,
            num_requests=requests, max_rounds=rounds, min_rounds=min(rounds, GRID.min_rounds), max_seconds=seconds,
        )  # fmt: skip
    return AdaptivePlan(
        error=error, max_verify_tokens=max_verify_tokens or base.max_verify_tokens,
        max_context_tokens=base.max_context_tokens if max_context is None else max_context,
        min_context_tokens=base.min_context_tokens if max_context is None else min(base.min_context_tokens, max_context),
        num_requests=requests, samples=min(base.samples, rounds), min_samples=min(base.min_samples, rounds), max_samples=rounds,
        max_seconds=seconds,
    )  # fmt: skip


def save_measured(measured: Profile, out: Path, partial: Path, as_json: bool, quiet: bool) -> None:
    """Write the profile, forget the samples, and show what was found."""
    measured.save(out)
    partial.unlink(missing_ok=True)
    cost = CostModel(measured)
    for line in [*diagnostic_lines(cost.diagnostics), *measured.notes]:
        note(line, quiet)
    if as_json:
        emit_json({**describe(cost), "path": str(out)})
    else:
        click.echo(str(out))
