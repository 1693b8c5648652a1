"""`costmodel whatif`: capacity questions, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from costmodel.clitools import POSITIVE, FiniteRange, emit_json, json_option, note, quiet_option, write_atomic
from costmodel.errors import UsageError
from costmodel.loading import load_profile
from costmodel.planning import inverse, render
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.memory import Memory
from costmodel.planning.options import Decimals, WholeNumbers, given_acceptance, prices_of
from costmodel.planning.pricing import Pricer
from costmodel.planning.reach import expected_tokens
from costmodel.planning.whatif import Settings, what_if

MAX_TREE_NODES = 64
NOT_NEGATIVE = FiniteRange(0, 1e12)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--profile", "names", multiple=True, required=True, metavar="NAME", help="From `costmodel list`, or a file. Repeat."
)
@click.option("--context", "contexts", type=WholeNumbers(0), default="1024", show_default=True, help="Cached tokens per request.")
@click.option("--batch", "batches", type=WholeNumbers(1), default="1", show_default=True, help="Requests in the batch.")
@click.option("--survival", type=Decimals(), help="Share of rounds that accept the first i tokens; one p means p, p^2 ...")
@click.option("--conditional", type=Decimals(), help="Acceptance of position i given those before; one p holds for all.")
@click.option("--acceptance-length", "length", type=FiniteRange(0), help="Mean tokens per round as engines log, bonus counted.")
@click.option("--acceptance-rate", "rate", type=FiniteRange(0), help="Accepted over drafted tokens, as engines log it.")
@click.option("--drafted", type=click.IntRange(1, 65536), help="Drafted tokens behind the length or rate (root excluded).")
@click.option("--acceptance-lengths", "lengths", type=Decimals(), help="Mean lengths with 1, 2, 3 ... drafted tokens.")
@click.option("--acceptance", "file", type=EXISTING, help="JSON: survival, acceptance_histogram, or vLLM's counters.")
@click.option("--trace", type=EXISTING, help="A trace of `decoder trace`, read for survival.")
@click.option("--siblings", type=Decimals(), help="Trees: how often the 2nd, 3rd ... candidate is right where the 1st is wrong.")
@click.option("--tree", is_flag=True, help="Trees, with the siblings that a trace shows.")
@click.option("--max-budget", type=click.IntRange(1, 65536), help="Largest budget.  [default: block size - 1, or 64 for trees]")
@click.option("--draft-ms", type=NOT_NEGATIVE, help="One drafter pass of the batch, in place of the profile's.")
@click.option("--price", "prices", multiple=True, metavar="[NAME=]X", help="Price per GPU-hour, of all or of one profile.")
@click.option("--memory-gb", type=POSITIVE, help="GPU memory in 10^9 bytes, in place of the facts file.")
@click.option("--memory-share", type=FiniteRange(0, 1, min_open=True), default=0.9, show_default=True, help="Share usable.")
@click.option("--extra-gb", type=NOT_NEGATIVE, default=0.0, show_default=True, help="Drafter and others, per GPU.")
@click.option("--slo-ms-per-token", "slo", type=POSITIVE, help="Largest batch within this latency per token and user.")
@click.option("--break-even", "even", is_flag=True, help="Acceptance at which speculation pays, for each length.")
@click.option("--requests-per-second", "load", type=POSITIVE, help="GPUs that carry this load; needs --output-tokens.")
@click.option("--output-tokens", type=POSITIVE, help="Mean generated tokens of a request.")
@click.option("--prefill-ms", type=NOT_NEGATIVE, default=0.0, show_default=True, help="Prefill of a request.")
@click.option("--csv", "as_csv", is_flag=True, help="Print every answer as CSV on stdout.")
@click.option("--html", "page_path", type=click.Path(dir_okay=False, path_type=Path), help="Write one page that opens offline.")
@json_option
@quiet_option
def whatif(
    names: tuple[str, ...], contexts: tuple[int, ...], batches: tuple[int, ...], survival: Any, conditional: Any,
    length: float | None, rate: float | None, drafted: int | None, lengths: Any, file: Path | None, trace: Path | None,
    siblings: Any, tree: bool, max_budget: int | None, draft_ms: float | None, prices: tuple[str, ...],
    memory_gb: float | None, memory_share: float, extra_gb: float, slo: float | None, even: bool, load: float | None,
    output_tokens: float | None, prefill_ms: float, as_csv: bool, page_path: Path | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """What would this target do on that GPU, at that context, in that batch?

    One line for every profile, context and batch: the best budget and what follows. Acceptance must be given, in one form.
    Brackets are 90 % intervals; `from` says where a line's figures come from.

    \b
    Examples:
      costmodel whatif --profile a100-qwen3-8b --profile h100-qwen3-8b --survival 0.85 --context 1024,8192 --batch 1,8,64
      costmodel whatif --profile h100-qwen3-8b --acceptance-length 3.2 --drafted 7 --price 2.5 --html plan.html
      costmodel whatif --profile h100-qwen3-8b --survival 0.9,0.7,0.5 --slo-ms-per-token 25
      costmodel whatif --profile h100-qwen3-8b --survival 0.8 --batch 32 --requests-per-second 20 --output-tokens 500
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv both want stdout", hint="give one of them")
    if load is not None and output_tokens is None:
        raise UsageError("--requests-per-second needs the mean length of an answer", hint="add --output-tokens N")
    names = tuple(dict.fromkeys(names))
    costs = [load_profile(name) for name in names]
    pricers = [Pricer(name, cost, None if draft_ms is None else draft_ms / 1e3) for name, cost in zip(names, costs, strict=True)]
    longest = max(min(pricer.block_size for pricer in pricers) - 1, 1)
    depth = max(*(pricer.block_size - 1 for pricer in pricers), 1) if tree or siblings else max_budget or longest
    accepted = given_acceptance(survival, conditional, length, rate, lengths, file, trace, drafted, siblings, tree, depth)
    largest = max_budget or (MAX_TREE_NODES if accepted.siblings else longest)
    gpu_bytes = None if memory_gb is None else memory_gb * 1e9
    memories = [
        Memory.of(cost.identity, gpu_bytes, memory_share, extra_gb * 1e9, name) for name, cost in zip(names, costs, strict=True)
    ]
    settings = Settings(contexts, batches, largest)
    rows = what_if(pricers, accepted, settings, memories, prices_of(prices, names))
    document = _document(pricers, memories, accepted, settings, rows)
    _answer_backwards(document, pricers, memories, accepted, settings, slo, even, load, output_tokens, prefill_ms)
    if page_path is not None:
        _write_page(page_path, document, pricers, accepted, settings)
        note(f"page: {page_path}", quiet)
    _print(document, as_json, as_csv, quiet)


def _write_page(
    path: Path, document: dict[str, Any], pricers: Sequence[Pricer], acceptance: Acceptance, settings: Settings
) -> None:
    from costmodel.planning.page import page

    tokens = expected_tokens(acceptance, settings.max_nodes)
    write_atomic(path, page(document, pricers, tokens, acceptance.relative_errors(tokens.size - 1), settings))


def _document(
    pricers: Sequence[Pricer], memories: Sequence[Memory], acceptance: Acceptance, settings: Settings, rows: list[dict]
) -> dict[str, Any]:
    return {
        "schema": "treebudget.whatif",
        "version": 1,
        "acceptance": {
            "source": acceptance.source, "survival": acceptance.survival, "conditional": acceptance.conditional,
            "siblings": acceptance.siblings, "num_rounds": acceptance.num_rounds, "notes": acceptance.notes,
        },
        "max_budget": settings.max_nodes,
        "assumptions": [*_assumptions(pricers, acceptance), *_not_known_to_fit(pricers, memories)],
        "profiles": [
            {"name": pricer.name, "provenance": pricer.cost.provenance, "source": pricer.cost.profile.source,
             "not_charged": pricer.not_charged, "notes": pricer.cost.profile.notes}
            for pricer in pricers
        ],
        "rows": rows,
    }  # fmt: skip


def _assumptions(pricers: Sequence[Pricer], acceptance: Acceptance) -> list[str]:
    found = [
        "every request of a batch has the same context, budget and acceptance; all take part in every round",
        "acceptance does not change with context or batch",
        *acceptance.notes,
    ]
    if acceptance.num_rounds is None:
        found.append("acceptance is taken as exact: intervals are those of the latencies alone")
    trees = "the draft is a tree whose positions are independent of the path (product model)"
    found.append(trees if acceptance.siblings else "the draft is a chain")
    for pricer in pricers:
        if pricer.not_charged:
            found.append(f"{pricer.name}: {', '.join(pricer.not_charged)} not in the profile, charged 0")
    return found


def _not_known_to_fit(pricers: Sequence[Pricer], memories: Sequence[Memory]) -> list[str]:
    """Why the table says `?` of what fits, for every profile of which it does."""
    return [
        f"{pricer.name}: what fits is not known: {memory.unknown}"
        for pricer, memory in zip(pricers, memories, strict=True)
        if memory.unknown is not None
    ]


def _answer_backwards(
    document: dict[str, Any], pricers: Sequence[Pricer], memories: Sequence[Memory], acceptance: Acceptance,
    settings: Settings, slo: float | None, even: bool, load: float | None, output_tokens: float | None, prefill_ms: float,
) -> None:  # fmt: skip
    tokens = expected_tokens(acceptance, settings.max_nodes)
    errors = acceptance.relative_errors(tokens.size - 1)
    if slo is not None:
        document["slo"] = [
            inverse.largest_batch_within(pricer, tokens, memory, context, slo, errors)
            for pricer, memory in zip(pricers, memories, strict=True)
            for context in settings.contexts
        ]
    if even:
        document["break_even"] = [
            row
            for pricer in pricers
            for context in settings.contexts
            for batch in settings.batches
            for row in inverse.break_even(pricer, settings.max_nodes, context, batch)
        ]
    if load is not None and output_tokens is not None:
        parallel = {pricer.name: pricer.tensor_parallel for pricer in pricers}
        document["fleet"] = inverse.fleet(document["rows"], load, output_tokens, prefill_ms, parallel)
        document["assumptions"].append(inverse.ARRIVALS)


def _print(document: dict[str, Any], as_json: bool, as_csv: bool, quiet: bool) -> None:
    if as_json:
        emit_json(document)
        return
    if as_csv:
        click.echo(render.to_csv(document), nl=False)
    else:
        click.echo(f"acceptance: {document['acceptance']['source']}\n{render.table(document['rows'])}")
        for title, lines in render.inverse_tables(document):
            click.echo(f"\n{title}\n{render.columns(lines)}")
    for line in document["assumptions"]:
        note(f"note: {line}", quiet)
    for row in document["rows"]:
        for beyond in row["outside"]:
            note(f"note: {row['profile']} at context {row['context_tokens']}, batch {row['batch']}: {beyond}", quiet)
