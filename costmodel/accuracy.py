"""How far off the curves are, against tables measured by others: `python -m costmodel.accuracy DATA_FOLDER`.

Prints the tables of docs/accuracy.md. DATA_FOLDER holds published/ and composed/ (see docs/accuracy.md for the sources).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from costmodel.cells import VerifyCell
from costmodel.compose import Operators, attention_bounds, forward_without_attention, operators_of
from costmodel.crosschecks import crossed, unseen
from costmodel.errors import OpsNotInstalled, UsageError
from costmodel.gpus import find_gpu
from costmodel.identity import Identity
from costmodel.loading import load_profile
from costmodel.model import CostModel
from costmodel.operators import OperatorTables
from costmodel.profile import Profile
from costmodel.roofline import Roofline, calibrate
from costmodel.sampler import sample_table
from costmodel.shapes import find_shape

Array = NDArray[np.float64]
Rows = Iterable[Sequence[object]]
SAMPLED_POINTS = 50
LOOKED_AT = ("a800-qwen3-4b", "a800-qwen3-8b", "a100-qwen3-8b", "h100-qwen3-8b", "l40s-llama-3.1-8b")  # while intervals were made
NOT_LOOKED_AT = ("a100-llama-3.1-8b", "h100-llama-3.1-8b", "h200-qwen3-4b", "b200-qwen3-8b", "l40s-qwen3-4b", "a40-qwen3-8b")
A800 = {"a800_qwen3_4b": "Qwen/Qwen3-4B", "a800_qwen3_8b": "Qwen/Qwen3-8B"}
GPUS = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "l40s": "l40s", "b200_sxm": "b200"}
MOE_IDENTITY = Identity(model_shape={"experts": 128, "experts_per_token": 8})


def published(folder: Path, name: str) -> tuple[list[int], Array, Array]:
    """Contexts (C,), sizes (T,) from 1 and seconds (C, T) of one published table."""
    document = json.loads((folder / "published" / f"{name}.json").read_text())
    contexts = [int(context) for context in document["context_tokens"]]
    seconds = np.array([document["verify_seconds"][str(context)] for context in contexts])
    skip = 1 - int(document["first_verify_tokens"])
    return contexts, np.arange(1, seconds.shape[1] + 1 - skip), seconds[:, skip:]


def errors_of(cost: CostModel, contexts: list[int], sizes: Array, seconds: Array, form: str = "table") -> Array:
    """Relative errors (C, T), signed."""
    predicted = [cost.verify_seconds(sizes, context, form=form) for context in contexts]  # type: ignore[arg-type]
    return np.array(predicted) / seconds - 1.0


def _summary(errors: Array) -> list[str]:
    size = np.abs(errors)
    return [f"{size.mean():.2%}", f"{np.quantile(size, 0.95):.2%}", f"{size.max():.1%}"]


def sampled(folder: Path) -> Rows:
    """The published tables from few points: table, convex form, and rooflines calibrated to them or to the other model's."""
    gpu = find_gpu("a800")
    given = {model: published(folder, name) for name, model in A800.items()}
    profiles = {model: _sampled_profile(*table) for model, table in given.items()}
    lines = {model: calibrate(gpu, find_shape(model), profile.verify)[0] for model, profile in profiles.items()}
    for model, table in given.items():
        cost = CostModel(profiles[model])
        for form in ("table", "convex"):
            yield [model, f"{form}, {len(cost.profile.verify)} points", *_summary(errors_of(cost, *table, form))]
        other = next(name for name in lines if name != model)
        for how, line in (("calibrated to the same points", lines[model]), (f"calibrated to {other}'s points", lines[other]),
                          ("uncalibrated", Roofline())):  # fmt: skip
            yield [model, f"`estimate`, {how}", *_summary(_line_errors(line, model, *table))]
        composed = CostModel(load_profile(f"a100-{model.split('/')[-1].lower()}").profile)
        yield [model, "`compose` for A100 (kernels without host)", *_summary(errors_of(composed, *table))]


def _sampled_profile(contexts: list[int], sizes: Array, seconds: Array) -> Profile:
    def read(tokens: int, context: int) -> float:
        return float(seconds[contexts.index(context), tokens - 1])

    return sample_table(read, sizes.tolist(), contexts, SAMPLED_POINTS)


def _line_errors(line: Roofline, model: str, contexts: list[int], sizes: Array, seconds: Array) -> Array:
    tokens, places = np.broadcast_arrays(sizes.astype(float), np.array(contexts, float)[:, None])
    predicted = line.verify_seconds(find_gpu("a800"), find_shape(model), tokens, places, np.ones(tokens.shape))
    return predicted / seconds - 1.0


def composed_rows(folder: Path) -> dict[tuple[str, ...], dict[str, Array]]:
    """Per (system, engine, version): sizes, contexts and seconds of qwen3_8b_verify.csv."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with open(folder / "composed" / "qwen3_8b_verify.csv", newline="") as stream:
        for row in csv.DictReader(stream):
            found.setdefault((row["system"], row["backend"], row["gemm_ver"]), []).append(row)
    names = {"tokens": "n", "contexts": "ctx", "base": "T_gemm_elt_ms", "once": "T_seq_ms", "each": "T_tok_ms"}
    return {
        key: {name: np.array([float(row[column] or "nan") for row in rows]) for name, column in names.items()}
        for key, rows in found.items()
    }


def fine_rows(folder: Path) -> dict[tuple[str, ...], tuple[Array, Array]]:
    """Per stack: sizes and seconds at context 1024 of the fine tables, and of the tables without attention."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for name, column, keys in (
        ("qwen3_8b_verify_fine", "T_seq_ms", ("system", "backend", "ver")),
        ("qwen3_8b_verify_a40_a100_h100_no_attention", "T_noattn_ms", ("system",)),
    ):
        with open(folder / "composed" / f"{name}.csv", newline="") as stream:
            for row in csv.DictReader(stream):
                key = tuple(row[item] for item in keys) if len(keys) > 1 else (row["system"], "vidur", "no attention")
                found.setdefault(key, []).append((float(row["n"]), float(row[column]) / 1e3))
    return {key: (*np.array(sorted(set(points))).T,) for key, points in found.items()}  # type: ignore[misc]


def tables(folder: Path) -> Rows:
    """Every composed stack: error of the table form at measured sizes, the convex form's largest gap, the cliffs."""
    everything = {key: (rows["tokens"], rows["contexts"], rows["once"] / 1e3) for key, rows in composed_rows(folder).items()}
    everything |= {(*key, "fine"): (tokens, 1024 + 0 * tokens, seconds) for key, (tokens, seconds) in fine_rows(folder).items()}
    for key, (tokens, contexts, seconds) in sorted(everything.items()):
        cost = CostModel.from_points(tokens, seconds, contexts)
        found = cost.diagnostics
        worst = max(
            float(np.abs(cost.verify_seconds(tokens[contexts == c], c) / seconds[contexts == c] - 1).max()) for c in set(contexts)
        )
        cliffs = sorted(found.cliffs, key=lambda cliff: -cliff.relative_jump)
        named = {f"{c.from_verify_tokens}->{c.to_verify_tokens} {c.relative_jump:+.0%}": None for c in cliffs}
        gap = found.largest_gap
        where = "-" if gap is None else f"{gap.relative_gap:+.1%} at {gap.verify_tokens}"
        yield [" ".join(key), tokens.size, f"{worst:.2%}", where, ", ".join(list(named)[:4]) or "none"]


def composition(folder: Path) -> Rows:
    """Our composition of Qwen3-8B against the composed tables, for every stack whose operator tables are installed."""
    shape = find_shape("Qwen/Qwen3-8B")
    for key, rows in sorted(composed_rows(folder).items()):
        try:
            operators = operators_of(OperatorTables.find(*key), shape)
            found = _composition_errors(replace(operators, flops_per_second=None), rows)
        except UsageError:  # that version, or a part of its tables, is not in the package
            continue
        yield [" ".join(key), rows["tokens"].size, *found]


def _composition_errors(operators: Operators, rows: dict[str, Array]) -> list[str]:
    shape = find_shape("Qwen/Qwen3-8B")
    base = forward_without_attention(shape, operators, rows["tokens"])
    once, each = np.empty(base.size), np.empty(base.size)
    for index, (tokens, context) in enumerate(zip(rows["tokens"], rows["contexts"], strict=True)):
        bounds = attention_bounds(shape, operators, np.array([tokens]), float(context), 1)
        once[index], each[index] = bounds[0][0], bounds[1][0]
    found = []
    for mine, theirs in ((base, rows["base"]), (base + once, rows["once"]), (base + each, rows["each"])):
        wrong = np.abs(1e3 * mine / theirs - 1)[np.isfinite(theirs)]
        found.append(f"{wrong.mean():.2%} / {wrong.max():.1%}")
    return found


def rooflines(folder: Path) -> Rows:
    """The roofline, uncalibrated and calibrated to 6 points, against the composed tables (cache read once)."""
    shape = find_shape("Qwen/Qwen3-8B")
    for key, rows in sorted(composed_rows(folder).items()):
        if key[0] not in GPUS or key[1] == "trtllm":
            continue
        gpu = find_gpu(GPUS[key[0]])
        ones, seconds = np.ones(rows["tokens"].size), rows["once"] / 1e3
        spots = [(t, c) for t, c in ((1, 1024), (32, 1024), (512, 1024), (1, 16384), (64, 16384), (512, 16384))]
        chosen = [i for i, place in enumerate(zip(rows["tokens"], rows["contexts"], strict=True)) if place in spots]
        cells = [VerifyCell(int(rows["tokens"][i]), int(rows["contexts"][i]), 1, float(seconds[i])) for i in chosen]
        lines = (Roofline(), calibrate(gpu, shape, cells)[0])
        wrong = [line.verify_seconds(gpu, shape, rows["tokens"], rows["contexts"], ones) / seconds - 1 for line in lines]
        yield [" ".join(key), *[f"{np.abs(e).mean():.1%} / {np.abs(e).max():.0%}" for e in wrong]]


def eager_points() -> Rows:
    """Two public points of TAPS (arXiv 2606.00487): Qwen3-4B on an A40, eager transformers, context not stated."""
    gpu, shape = find_gpu("a40"), find_shape("Qwen/Qwen3-4B")
    for nodes, milliseconds in ((64, 33.0), (512, 81.0)):
        one, tokens, context = np.array([1.0]), np.array([nodes + 1.0]), np.array([1024.0])
        found = 1e3 * float(Roofline().verify_seconds(gpu, shape, tokens, context, one)[0])
        yield [f"A40 Qwen3-4B, {nodes} nodes", f"{milliseconds:.0f} ms", f"{found:.1f} ms", f"{found / milliseconds - 1:+.0%}"]


def experts(folder: Path) -> Rows:
    """Layers of Qwen3-30B-A3B up to 512 tokens: with the expert term, convex, and both from seven sizes only."""
    stacks: dict[tuple[str, ...], dict[int, float]] = {}
    with open(folder / "composed" / "qwen3_30b_a3b_moe_layer.csv", newline="") as stream:
        for row in csv.DictReader(stream):
            key = (row["system"], row["backend"], row["ver"], row["distribution"])
            if int(row["n"]) <= 512 and row["dtype"] == "bf16":
                stacks.setdefault(key, {})[int(row["n"])] = float(row["us"]) / 1e6
    for system in sorted({key[0] for key in stacks}):
        results = [expert_errors(layer) for key, layer in stacks.items() if key[0] == system]
        means = np.mean(results, axis=0)
        yield [system, len(results), *[f"{value:.1%}" for value in means]]


def expert_errors(layer: dict[int, float]) -> list[float]:
    """Mean error of the fit with the expert term, of the convex form, and at sizes left out of seven-size profiles with
    the expert term and without; error at one token last."""
    sizes, seconds = np.array(sorted(layer), float), np.array([layer[size] for size in sorted(layer)])
    cost = CostModel.from_points(sizes, seconds, identity=MOE_IDENTITY)
    kept = np.isin(sizes, (1, 4, 16, 64, 128, 256, 512))
    few = [CostModel.from_points(sizes[kept], seconds[kept], identity=identity) for identity in (MOE_IDENTITY, None)]
    whole = [np.abs(cost.verify_seconds(sizes, form=form) / seconds - 1).mean() for form in ("fitted", "convex")]  # type: ignore[arg-type]
    held = [np.abs(item.verify_seconds(sizes[~kept]) / seconds[~kept] - 1).mean() for item in few]
    return [*map(float, whole), *map(float, held), abs(float(cost.verify_seconds(1, form="fitted")) / seconds[0] - 1)]


def coverage(names: Sequence[str], level: float = 0.9, most: int = 80) -> Rows:
    """Leave one measured point out, predict it from the others: how often the interval holds it, and how wide it is."""
    for name in names:
        profile = load_profile(name).profile
        cells = [replace(c, low_seconds=None, high_seconds=None) for c in profile.verify if c.num_requests == 1]
        if len(cells) > 1000:  # published: every sixteenth size
            cells = [cell for cell in cells if cell.verify_tokens == 1 or cell.verify_tokens % 16 == 0]
        inside, widths = leave_out(replace(profile, provenance="measured"), cells, level, most)
        yield [name, widths.size, f"{inside:.0%}", f"{np.median(widths):.2%}", f"{np.quantile(widths, 0.9):.1%}"]


def leave_out(profile: Profile, cells: list[VerifyCell], level: float = 0.9, most: int = 150) -> tuple[float, Array]:
    """The share of left-out points that their interval holds, and the relative half-widths; ends of a line stay in."""
    inner = [
        index
        for index, cell in enumerate(cells)
        if any(o.verify_tokens < cell.verify_tokens for o in cells if o.context_tokens == cell.context_tokens)
        and any(o.verify_tokens > cell.verify_tokens for o in cells if o.context_tokens == cell.context_tokens)
    ]
    inside, widths = [], []
    for index in np.random.default_rng(0).permutation(inner)[:most]:
        cell, rest = cells[index], (*cells[:index], *cells[index + 1 :])
        cost = CostModel(replace(profile, verify=rest, executable_verify_tokens=None, identity=Identity()))
        low, high = cost.verify_interval(cell.verify_tokens, cell.context_tokens, level=level)
        inside.append(low <= cell.seconds <= high)
        widths.append(float(np.log(high / low) / 2))
    return float(np.mean(inside)), np.array(widths)


def print_table(title: str, head: Sequence[str], rows: Rows) -> None:
    """One Markdown table."""
    click.echo(f"\n### {title}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        click.echo(f"| {' | '.join(str(item) for item in row)} |")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print every table of docs/accuracy.md from the tables in FOLDER."""
    print_table("Published A800 tables, 4,608 points", ("model", "from", "mean", "95 %", "max"), sampled(folder))
    head: tuple[str, ...] = (
        "judged on",
        "start chosen on the other",
        "table, mean",
        "95 %",
        "convex, mean",
        "95 %",
        "table, any start",
    )
    print_table(
        f"{SAMPLED_POINTS} points, start chosen on the other model",
        head,
        crossed({model: published(folder, name) for name, model in A800.items()}, SAMPLED_POINTS),
    )
    head = ("stack", "points", "table, largest error", "convex, largest gap", "cliffs")
    print_table("Composed tables of Qwen3-8B", head, tables(folder))
    try:
        head = ("tables", "model", "table, mean", "95 %", "convex, mean", "95 %")
        title = f"{SAMPLED_POINTS} of 4,096 points of composed tables that the sampler was not made with"
        print_table(title, head, list(unseen(SAMPLED_POINTS)))
        head = ("stack", "points", "no attention, mean / max", "cache read once", "cache read per token")
        print_table("`costmodel compose` against the composed tables", head, list(composition(folder)))
    except OpsNotInstalled as error:
        click.echo(f"skipped: {error} ({error.hint})", err=True)
    head = ("stack", "uncalibrated, mean / max", "calibrated to 6 points")
    print_table("`costmodel estimate` against the composed tables", head, rooflines(folder))
    names = ("what", "measured", "estimated", "error")
    print_table("`costmodel estimate` against two public eager points", names, eager_points())
    head = ("system", "stacks", "expert term", "convex", "7 sizes, expert term", "7 sizes, straight", "one token")
    print_table("Experts: layers of Qwen3-30B-A3B", head, experts(folder))
    head = ("profile", "points", "covered", "half-width", "90 % of them below")
    print_table("90 % intervals, points left out", head, coverage(LOOKED_AT))
    print_table("90 % intervals, points left out of profiles they were not made with", head, coverage(NOT_LOOKED_AT))


if __name__ == "__main__":
    main()
