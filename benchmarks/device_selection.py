"""Trees for a batch of requests whose draft logits live on an accelerator: chosen there, or brought to the host and back.

Compared, interleaved, for every batch:
  floor     one pass over the logits on the device (row maxima): nothing can be faster
  captured  the search on the device as one CUDA graph, replayed (on CUDA only)
  device    the search on the device, operation by operation
  host      logits to the host, the compiled search there for one request after the other, trees and masks back
Every contender ends with token ids, depths and attention masks on the device, padded to the budget, and is waited for.
Before anything is timed the trees are compared. On CUDA the search also runs once with every wait of the host made an error.

Example: python benchmarks/device_selection.py --device cuda --vocab 151936 --depth 15 --json > device_selection.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from drafts import draft_logits
from interleaved import Calls, Ratio, Timing, hardware, measure
from numpy.typing import NDArray
from torch import Tensor

from costmodel import load_profile
from decoder.device import CapturedSearch, DeviceTrees, search_on_device
from decoder.device.search import RULES
from profiles.errors import TreebudgetError
from selector.scorer import Scorer
from selector.scoring import scored
from selector.search.expansion import expand
from selector.tree import DraftTree
from selector.trellis import Trellis

BATCHES = "1,2,4,8,16,32,64"
CONTEXT_TOKENS = 1000
RATIOS = {
    "device_over_captured": ("device", "captured"),
    "host_over_captured": ("host", "captured"),
    "host_over_device": ("host", "device"),
    "captured_over_floor": ("captured", "floor"),
    "device_over_floor": ("device", "floor"),
}


@dataclass(frozen=True)
class Setting:
    """What is the same for every batch; `curve` is seconds of a round with n nodes at index n."""

    policy: str
    nodes: int
    top_k: int
    curve: NDArray[np.float64]
    price: float
    scorer: Scorer | None
    device: torch.device

    def on_device(self, logits: Tensor, roots: Tensor, curve: Tensor) -> DeviceTrees:
        """Operation by operation."""
        return search_on_device(logits, self.nodes, self.policy, curve, self.price, self.top_k, roots, scorer=self.scorer)

    def captured(self, logits: Tensor, roots: Tensor, curve: Tensor) -> CapturedSearch:
        """As one graph that is ready to be replayed."""
        search = CapturedSearch(
            tuple(logits.shape), self.nodes, self.policy, round_seconds=curve, price=self.price, top_k=self.top_k,
            scorer=self.scorer, dtype=logits.dtype, device=logits.device,
        )  # fmt: skip
        search(logits, roots)  # from here on they lie in its buffers, where a drafter would have put them
        return search

    def on_host(self, logits: Tensor, roots: NDArray[np.int64]) -> list[DraftTree]:
        """One tree after the other, by the compiled search."""
        trees = []
        for rows, root in zip(logits.cpu().numpy(), roots.tolist(), strict=True):
            trellis = Trellis.from_logits(rows, self.top_k)
            weighed = trellis if self.scorer is None else scored(self.scorer, trellis, root)
            found = expand(weighed, self.nodes, RULES[self.policy], self.curve, self.price)
            trees.append(DraftTree.from_expansion(found, "optimal", root))
        return trees

    def by_host(self, logits: Tensor, roots: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """What a verification needs, on the device again: ids and depths (R, N + 1), masks (R, N + 1, N + 1)."""
        trees, slots = self.on_host(logits, roots), self.nodes + 1
        ids, depths = np.zeros((len(trees), slots), np.int64), np.ones((len(trees), slots), np.int64)
        masks = np.repeat(np.eye(slots, dtype=bool)[None], len(trees), 0)
        for r, tree in enumerate(trees):
            n = tree.num_verify_tokens
            ids[r, :n], depths[r, :n], masks[r, :n, :n] = tree.token_ids, tree.depths, tree.attention_mask()
        return tuple(torch.from_numpy(each).to(self.device) for each in (ids, depths, masks))


@dataclass(frozen=True)
class Row:
    """One batch: timings by contender, ratios, nodes chosen on average, and trees that differ between device and host."""

    batch: int
    mean_nodes: float
    trees_differing: int
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]


def run(setting: Setting, batch: int, depth: int, vocab: int, repeats: int, wait: Any) -> Row:
    """Measure one batch."""
    host_logits = np.stack([draft_logits(depth, vocab, seed) for seed in range(batch)])
    host_roots = np.arange(batch, dtype=np.int64) % vocab
    logits, roots = (torch.from_numpy(each).to(setting.device) for each in (host_logits, host_roots))
    curve = torch.from_numpy(setting.curve).to(setting.device)
    trees = setting.on_device(logits, roots, curve)
    expected = setting.on_host(logits, host_roots)
    differing = sum(not same(a, b) for a, b in zip(trees.to_trees(), expected, strict=True))
    calls: Calls = {
        "floor": (lambda: logits.amax(-1), 1),
        "device": (lambda: setting.on_device(logits, roots, curve), 1),
        "host": (lambda: setting.by_host(logits, host_roots), 1),
    }
    if setting.device.type == "cuda":
        search = setting.captured(logits, roots, curve)
        differing = max(differing, sum(not same(a, b) for a, b in zip(search().to_trees(), expected, strict=True)))
        calls = {**calls, "captured": (search, 1)}
    timings, ratios = measure(calls, repeats, RATIOS, wait)
    return Row(batch, float(trees.num_nodes.double().mean()), differing, timings, ratios)


def same(one: DraftTree, other: DraftTree) -> bool:
    """The same nodes in the same order."""
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.parents, other.parents)


def waits_of_the_host(setting: Setting, depth: int, vocab: int) -> int | None:
    """0 where a search ran with every wait made an error; an error otherwise; None where there is no such mode."""
    if setting.device.type != "cuda":
        return None
    logits, roots = torch.zeros(2, depth, vocab, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    curve = torch.from_numpy(setting.curve).to("cuda")
    setting.on_device(logits, roots, curve)  # a scorer's weights are copied here
    torch.cuda.set_sync_debug_mode("error")
    try:
        setting.on_device(logits, roots, curve)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0


def show(row: Row) -> None:
    """One line for people."""
    times = [f"{name} {each.median_ms:.3f} ms ({each.low_ms:.3f}-{each.high_ms:.3f})" for name, each in row.timings.items()]
    ratios = [f"{name.replace('_', ' ')} {ratio}" for name, ratio in row.ratios.items()]
    click.echo(f"batch {row.batch:>3}: {row.mean_nodes:.1f} nodes, {row.trees_differing} trees differ; {', '.join(times)}")
    click.echo(f"           {', '.join(ratios)}")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: python benchmarks/device_selection.py --device cuda --vocab 151936 --depth 15 --json",
)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True, help="Of the logits.")
@click.option("--batch", "batches", default=BATCHES, show_default=True, help="Requests, one row of the record each.")
@click.option("--depth", default=7, show_default=True, help="Drafted positions.")
@click.option("--vocab", default=49_152, show_default=True, help="Tokens in the vocabulary.")
@click.option("--nodes", default=64, show_default=True, help="Most nodes of a tree.")
@click.option("--top-k", default=16, show_default=True, help="Candidates per depth.")
@click.option("--policy", type=click.Choice(list(RULES)), default="exact", show_default=True, help="Rule for the nodes.")
@click.option("--profile", default="h100-qwen3-8b", show_default=True, help="Whose round seconds the policy looks at.")
@click.option("--scorer", "scorer_path", type=click.Path(dir_okay=False, path_type=Path), help="Score the edges as well.")
@click.option("--repeats", default=25, show_default=True, help="Samples per contender.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record on stdout.")
def main(
    device: str, batches: str, depth: int, vocab: int, nodes: int, top_k: int, policy: str, profile: str,
    scorer_path: Path | None, repeats: int, as_json: bool,
) -> None:  # fmt: skip
    """Time the choice of trees for a batch on the logits' device against a detour over the host."""
    try:
        cost = load_profile(profile)
        scorer = Scorer.load(scorer_path) if scorer_path is not None else None
    except TreebudgetError as error:
        raise click.ClickException(str(error)) from error
    curve = np.array(cost.round_seconds(nodes + 1, CONTEXT_TOKENS))  # a copy, writable as torch wants it
    setting = Setting(policy, nodes, top_k, curve, 1.0 / float(curve[0]), scorer, torch.device(device))
    wait = torch.cuda.synchronize if setting.device.type == "cuda" else lambda: None
    waits, rows = waits_of_the_host(setting, depth, vocab), []
    for batch in (int(each) for each in batches.split(",")):
        rows.append(run(setting, batch, depth, vocab, repeats, wait))
        if not as_json:
            show(rows[-1])
    if as_json:
        about = {"depth": depth, "vocab": vocab, "nodes": nodes, "top_k": top_k, "policy": policy, "profile": profile,
                 "scored": scorer is not None, "device": device, "gpu": gpu_name(setting.device), "repeats": repeats}  # fmt: skip
        record = {"schema": "treebudget.benchmark.device_selection", "version": 1, "unit": "milliseconds", **about,
                  "host_waits": waits, "hardware": hardware() | {"threads": torch.get_num_threads()},
                  "rows": [asdict(row) for row in rows]}  # fmt: skip
        click.echo(json.dumps(record))


def gpu_name(device: torch.device) -> str | None:
    """The GPU the figures belong to."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


if __name__ == "__main__":
    main()
