"""From raw draft logits to a finished tree: how far from one pass over the logits, and how far ahead of plain Python.

Compared, interleaved and on one thread, for every shape and budget:
  floor       one pass over the logits (numpy's row maxima): nothing can be faster
  ours        logits -> tree with parents, mask and positions (small top-k that grows where it was too small)
  public      the same in the manner of the public builders: top-k of budget size and log-sum-exp over the whole
              vocabulary (torch if it is installed, else numpy), best-first in Python, mask row by row
  search      ours, the compiled search alone, its arrays made beforehand
  expand      ours, the public call from a trellis to an expansion of fresh arrays
  python      plain-Python best-first over the same candidates, its lists made beforehand, no ties looked at
  reference   selector/search/reference.py over the same trellis, ties and all
Ratios are of the two samples of each interleaved round: median, 10th and 90th percentile; and of the best samples, which
tells most on a machine that others use.
Before anything is timed, all are checked to give trees of the same sum of reach.

Example: python benchmarks/selection.py --json > selection.json
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import numba
import numpy as np
from drafts import draft_logits
from interleaved import Ratio, Timing, hardware, measure
from numpy.typing import NDArray

from selector.search.expansion import expand
from selector.search.growing import expand_logits
from selector.search.kernels import BUDGET, best_first
from selector.search.reference import expand_in_python
from selector.tree import DraftTree

SHAPES = ((15, 151_936), (7, 49_152))
BUDGETS = (64, 128, 256, 512, 1024)
CONTEXT_TOKENS = 1000
SEARCH_CALLS = 20  # a search takes microseconds: timed that many at a time


RATIOS = {
    "search_speedup_over_python": ("python", "search"),
    "search_speedup_over_reference": ("reference", "search"),
    "expand_speedup_over_python": ("python", "expand"),
    "expand_speedup_over_reference": ("reference", "expand"),
    "speedup_over_public": ("public", "ours"),
    "times_the_floor": ("ours", "floor"),
}


@dataclass(frozen=True)
class Row:
    """One shape and budget: timings by contender and the ratios asked for."""

    depth: int
    vocab: int
    budget: int
    num_nodes: int
    listed_per_row: list[int]
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]


def ours(logits: NDArray[np.float32], budget: int) -> tuple[DraftTree, Any, Any]:
    _, expansion = expand_logits(logits, budget)
    tree = DraftTree.from_expansion(expansion, "budget")
    return tree, tree.attention_mask(), tree.position_ids(CONTEXT_TOKENS)


def python_best_first(
    logprobs: list[list[float]], ids: list[list[int]], budget: int
) -> tuple[list[int], list[int], list[int], float]:
    """Best-first in plain Python over rows in falling order: tokens, parents, depths, sum of reach."""
    depth, width = len(logprobs), len(logprobs[0])
    heap = [(-logprobs[0][0], 0, 0, 0)]  # negated log reach, depth, rank, parent
    tokens, parents, depths, total = [], [-1], [0], 0.0
    while heap and len(tokens) < budget:
        negated, d, rank, parent = heapq.heappop(heap)
        tokens.append(ids[d][rank])
        parents.append(parent)
        depths.append(d + 1)
        total += math.exp(-negated)
        if rank + 1 < width:
            heapq.heappush(heap, (negated + logprobs[d][rank] - logprobs[d][rank + 1], d, rank + 1, parent))
        if d + 1 < depth:
            heapq.heappush(heap, (negated - logprobs[d + 1][0], d + 1, 0, len(tokens)))
    return tokens, parents, depths, total


def full_top_k(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Sorted top-k log-probabilities and ids of every row by whole-vocabulary operations."""
    k = min(k, logits.shape[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        tensor = torch.from_numpy(logits)
        values, indices = torch.topk(tensor, k, dim=-1)
        return (values - torch.logsumexp(tensor, dim=-1, keepdim=True)).numpy(), indices.numpy()
    ids = np.argpartition(logits, -k, axis=1)[:, -k:]
    values_there = np.take_along_axis(logits, ids, 1)
    order = np.argsort(-values_there, axis=1)
    top = logits.max(axis=1, keepdims=True)
    normaliser = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return np.take_along_axis(values_there, order, 1) - normaliser, np.take_along_axis(ids, order, 1)


def public(logits: NDArray[np.float32], budget: int) -> tuple[float, Any, Any, Any]:
    logprobs, ids = full_top_k(logits, budget)
    tokens, parents, depths, total = python_best_first(logprobs.tolist(), ids.tolist(), budget)
    mask = np.zeros((len(parents), len(parents)), bool)
    mask[0, 0] = True
    for i in range(1, len(parents)):
        mask[i, :i] = mask[parents[i], :i]
        mask[i, i] = True
    return total, np.array(tokens), mask, np.array(depths) + CONTEXT_TOKENS


def contenders(logits: NDArray[np.float32], budget: int) -> tuple[dict[str, tuple[Callable[[], Any], int]], Row]:
    """Name -> (call, calls per sample), checked against each other; and the row to be filled."""
    trellis, expansion = expand_logits(logits, budget)
    logprobs, ids = trellis.log_edges.tolist(), trellis.token_ids.tolist()
    total = float(expansion.reach.sum())
    others = {
        "public": public(logits, budget)[0],
        "expand": float(expand(trellis, budget, BUDGET).reach.sum()),
        "python": python_best_first(logprobs, ids, budget)[3],
        "reference": float(expand_in_python(trellis, budget).reach.sum()),
    }
    for name, found in others.items():
        if abs(found - total) > 1e-4 * total:
            raise click.ClickException(f"{name} found a tree of another sum of reach: {found} instead of {total}")
    edges, token_ids, one = trellis.log_edges, trellis.token_ids, np.ones(1)
    out = (np.empty(budget, np.int32), np.empty(budget, np.int64), np.empty(budget, np.int32), np.empty(budget))
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "floor": (lambda: logits.max(axis=1), 1),
        "ours": (lambda: ours(logits, budget), 1),
        "public": (lambda: public(logits, budget), 1),
        "search": (lambda: best_first(edges, token_ids, BUDGET, one, 0.0, 1.0, *out), SEARCH_CALLS),
        "expand": (lambda: expand(trellis, budget, BUDGET), SEARCH_CALLS),
        "python": (lambda: python_best_first(logprobs, ids, budget), 1),
        "reference": (lambda: expand_in_python(trellis, budget), 1),
    }
    listed = (trellis.token_ids >= 0).sum(axis=1).tolist()
    return calls, Row(logits.shape[0], logits.shape[1], budget, len(expansion.reach), listed, {}, {})


def run(depth: int, vocab: int, budget: int, repeats: int) -> Row:
    """Measure one shape and budget."""
    calls, row = contenders(draft_logits(depth, vocab), budget)
    timings, ratios = measure(calls, repeats, RATIOS)
    return replace(row, timings=timings, ratios=ratios)


def one_thread() -> None:
    """Load torch, if there is one, and keep everything on one thread."""
    numba.set_num_threads(1)
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: python benchmarks/selection.py --json")
@click.option("--repeats", default=25, show_default=True, help="Samples per contender.")
@click.option("--budget", "budgets", type=int, multiple=True, default=BUDGETS, show_default=True, help="Nodes; may be repeated.")
@click.option("--small", is_flag=True, help="Only the smaller of the two shapes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record on stdout.")
def main(repeats: int, budgets: tuple[int, ...], small: bool, as_json: bool) -> None:
    """Time tree building from raw logits against its floor and against plain Python."""
    one_thread()
    rows = []
    for depth, vocab in SHAPES[1:] if small else SHAPES:
        for budget in budgets:
            row = run(depth, vocab, budget, repeats)
            rows.append(row)
            if not as_json:
                show(row, first=budget == budgets[0])
    if as_json:
        record = {
            "schema": "treebudget.benchmark.selection", "version": 2, "unit": "milliseconds", "repeats": repeats,
            "hardware": hardware(), "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        click.echo(json.dumps(record))


def show(row: Row, first: bool) -> None:
    """Print one row; the floor first."""
    ms = {name: timing.median_ms for name, timing in row.timings.items()}
    if first:
        click.echo(f"\n{row.depth} x {row.vocab:,} float32: one pass over the logits takes {ms['floor']:.2f} ms")
    click.echo(
        f"{row.num_nodes:>5} nodes: logits to tree {ms['ours']:.2f} ms, {row.ratios['times_the_floor']} the floor; public"
        f" {ms['public']:.2f} ms, {row.ratios['speedup_over_public']}\n             search {ms['search'] * 1e3:.1f} us, expand"
        f" {ms['expand'] * 1e3:.1f} us, python {ms['python'] * 1e3:.0f} us, reference {ms['reference'] * 1e3:.0f} us"
    )
    for name, (slow, fast) in list(RATIOS.items())[:4]:
        click.echo(f"             {slow} / {fast} {row.ratios[name]}")


if __name__ == "__main__":
    main()
