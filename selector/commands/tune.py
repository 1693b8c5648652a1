"""`selector tune`: the fastest policy for a trace and a profile, as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from numpy.typing import NDArray

from costmodel.clitools import FiniteRange, check_output, emit_json, json_option, note, progress, quiet_option
from profiles.paths import default_plan_path
from selector.commands.options import input_options, load_inputs
from selector.commands.show import print_plan
from selector.embedding import find_embedding, read_embedding
from selector.plan import SCORER_FIELDS, Plan
from selector.scoring import EdgeScorer
from selector.trace import Trace
from selector.tune import TRAINING_SECONDS, candidates
from selector.tune import tune as tune_plan
from selector.tuning.keeping import forget
from selector.tuning.training import TRAIN


@click.command(epilog="Example: selector tune --profile here.json --trace trace.safetensors --out plan.json")
@input_options
@click.option("--out", type=click.Path(path_type=Path), help="Plan file to write. Default: this machine's.")
@click.option(
    "--scorer", metavar="train|none|FILE", default="train", show_default=True,
    help="Path-conditioned acceptance, used where it pays: trained on the trace (needs torch and the target's embedding), a "
    "trained one from a file, or none.",
)  # fmt: skip
@click.option(
    "--embedding", metavar="FILE[:TENSOR]",
    help="Safetensors file or folder with the target's embedding. Default: the target's on this machine.",
)  # fmt: skip
@click.option(
    "--training-seconds", type=FiniteRange(1), default=TRAINING_SECONDS, show_default=True,
    help="Limit of all scorer training together.",
)  # fmt: skip
@click.option("--allow-overlap", is_flag=True, help="Tune although the drafter was trained on prompts of the trace.")
@json_option
@quiet_option
def tune(
    profile: str | None, trace_path: Path | None, target: str, drafter: str, dtype: str, max_nodes: int | None,
    out: Path | None, scorer: str, embedding: str | None, training_seconds: float, allow_overlap: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Find the fastest policy for a trace and a profile and write a plan, with its scorer beside it.

    Everything fitted is judged on texts it was not fitted on. Where drafting does not pay the plan says plain. Trained
    scorers survive Ctrl-C and a kill: the same command goes on.
    """
    path = out or default_plan_path(target, drafter, dtype)
    check_output(path)
    keep = path.with_name(path.name + ".partial")
    cost, trace = load_inputs(profile, trace_path, target, drafter, dtype)
    given = load_given_scorer(scorer, trace)
    table = load_embedding(embedding, str(trace.identity.get("target", target))) if given == TRAIN else None
    with progress("tune", total=2 * len(candidates(given not in (None, TRAIN) or table is not None)), quiet=quiet) as advance:
        plan = tune_plan(
            trace, cost, max_nodes, advance=lambda name: advance(1, name), scorer=given, embedding=table,
            training_seconds=training_seconds, allow_overlap=allow_overlap, keep=keep,
        )  # fmt: skip
    plan.save(path)
    forget(keep)
    saved = Plan.load(path)
    for line in saved.notes:
        note(line, quiet)
    emit_json({**saved.to_dict(), "path": str(path)}) if as_json else print_plan(saved, path)


def load_given_scorer(asked: str, trace: Trace) -> EdgeScorer | str | None:
    """What `tune` takes for `--scorer`: "train", None for none, or the scorer of a file.

    Raises ScorerError if the file is no scorer, or is one for another target, drafter or block size than the trace's.
    """
    if asked in (TRAIN, "none"):
        return TRAIN if asked == TRAIN else None
    from selector.scorer import Scorer

    scorer = Scorer.load(asked)
    scorer.check({name: trace.identity.get(name) for name in SCORER_FIELDS})
    return scorer


def load_embedding(asked: str | None, target: str) -> NDArray[Any] | None:
    """The embedding that was asked for as FILE or FILE:TENSOR, or the one of the target on this machine, None if not here.

    Raises ScorerError for a file that was asked for and cannot be read.
    """
    if asked is None:
        folder = find_embedding(target)
        return read_embedding(folder) if folder is not None else None
    file, colon, name = asked.rpartition(":")
    if colon and not Path(asked).exists():
        return read_embedding(file, name)
    return read_embedding(asked)
