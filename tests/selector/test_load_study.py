"""The load study: one request is replay, merged counts are select_batch's and brute force's, costs are the pricer's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel, load_profile
from costmodel.planning.pricing import Pricer
from selector.batch import select_batch
from selector.errors import CostCurveError, TraceError
from selector.load.curves import LoadCurves, load_curves
from selector.load.play import best_uniform, merged_at_fixed_point, merged_counts, play_load, text_queue
from selector.load.study import study_load
from selector.policies import FixedShape
from selector.registry import parse_policy
from selector.replaying.orders import Orders, build_orders
from selector.replaying.rounds import build_curves, play, play_plain
from selector.search.kernels import convex_minorant
from selector.trace import Trace
from selector.trellis import Trellis
from tests.selector.helpers import COST_KINDS, markov_trace, random_cost

ROOT = Path(__file__).resolve().parent.parent.parent
TRACE = markov_trace(num_texts=6, length=24, overconfident=1.5)
POINTS, SECONDS = [1, 2, 4, 8, 9, 16, 32, 64], np.array([42, 50, 53, 59, 65, 76, 96, 140]) / 1e3


def cost_model() -> CostModel:
    """Grows with context; one request was measured, larger batches are estimated."""
    return CostModel.from_points(POINTS * 2, np.concatenate([SECONDS, SECONDS * 1.2]), np.repeat([0, 200], 8), draft_seconds=0.01)


def curves_of(orders: Orders, cost: CostModel, num_requests: int) -> LoadCurves:
    return load_curves(cost, num_requests, orders.context_tokens.min(), orders.context_tokens.max(), orders.max_nodes)


def trellis_at(trace: Trace, anchor: int) -> Trellis:
    for text in trace.texts:
        if anchor < text.num_anchors:
            return Trellis(text.draft_token_ids[anchor].astype(np.int64), text.draft_logprobs[anchor].astype(np.float64))
        anchor -= text.num_anchors
    raise IndexError(anchor)


def merged(orders: Orders, anchors: np.ndarray, seconds: np.ndarray, price: float) -> list[int]:
    counts = np.zeros(len(anchors), np.int64)
    total = merged_counts(orders.phi, orders.sizes, anchors, seconds, convex_minorant(seconds), price, counts)
    assert total == counts.sum()
    return counts.tolist()


@pytest.mark.parametrize("price", [5.0, 25.0, 60.0])
def test_one_request_is_replay(price: float) -> None:
    cost, orders, priced = cost_model(), build_orders(TRACE, 32), parse_policy("priced")
    curves, queue = curves_of(orders, cost, 1), text_queue(orders, 1)
    assert sorted(queue.tolist()) == list(range(6))
    replayed = build_curves(orders, cost)
    pairs = [
        (play_load(orders, curves, queue, "plain"), play_plain(orders, replayed)),
        (play_load(orders, curves, queue, "uniform", 6), play(FixedShape("fixed", 6), orders, replayed)),
        (play_load(orders, curves, queue, "merged", price=price), play(priced, orders, replayed, price, 1.0, False)),
        (play_load(orders, curves, queue, "merged", 0, price, 0.7), play(priced, orders, replayed, price, 0.7, False)),
    ]
    for ours, theirs in pairs:
        assert ours.tokens == theirs.text_tokens.sum() and ours.rounds == len(theirs.nodes)
        assert ours.nodes == theirs.nodes.sum() and ours.accepted == theirs.accepted.sum()
        assert ours.seconds == pytest.approx(theirs.total_seconds)


def test_worked_example_two_requests_under_one_forward() -> None:
    """Reaches .9 .81 and .5 .25; a slot costs 10 ms: at 60 tokens/s a node must reach .6, at 40 tokens/s .4."""
    phi = np.array([[0, 0.9, 1.71], [0, 0.5, 0.75]])
    seconds, counts = 0.02 + 0.01 * np.arange(5), np.zeros(2, np.int64)
    sizes, anchors = np.array([2, 2], np.int32), np.array([0, 1])
    for price, expected in ((60.0, [2, 0]), (40.0, [2, 1]), (20.0, [2, 2]), (100.0, [0, 0])):
        assert merged_counts(phi, sizes, anchors, seconds, seconds, price, counts) == sum(expected)
        assert counts.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(COST_KINDS), st.integers(1, 6))
def test_merged_counts_are_those_of_select_batch(seed: int, kind: str, num_requests: int) -> None:
    rng = np.random.default_rng(seed)
    orders = build_orders(TRACE, 20)
    anchors = rng.choice(np.flatnonzero(orders.visitable), num_requests, replace=False)
    seconds, price = random_cost(rng, int(rng.integers(2, 80)), kind), float(rng.random() * 3)
    chosen = select_batch([trellis_at(TRACE, int(a)) for a in anchors], seconds, price, max_nodes=20)
    if chosen.status != "degenerate-cost":
        assert merged(orders, anchors, seconds, price) == chosen.num_nodes.tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(COST_KINDS))
def test_merged_counts_against_every_split(seed: int, kind: str) -> None:
    """No split of nodes among three requests is worth more, so none at the same total (the uniform one) reaches more."""
    rng = np.random.default_rng(seed)
    orders = build_orders(TRACE, 4)
    anchors = rng.choice(np.flatnonzero(orders.visitable), 3, replace=False)
    seconds, price = random_cost(rng, 13, kind), float(rng.random() * 3)
    counts = merged(orders, anchors, seconds, price)

    def value(split: tuple[int, ...] | list[int]) -> float:
        return sum(orders.phi[a, n] for a, n in zip(anchors, split, strict=True)) - price * seconds[sum(split)]

    best = max(value(split) for split in product(range(5), repeat=3))
    assert value(counts) == pytest.approx(best, abs=1e-9)
    reach = [sum(orders.phi[a, n] for a, n in zip(anchors, split, strict=True)) for split in product(range(5), repeat=3)
             if sum(split) == sum(counts)]
    assert sum(orders.phi[a, n] for a, n in zip(anchors, counts, strict=True)) == pytest.approx(max(reach))


@pytest.mark.parametrize("num_requests", [1, 3, 4, 7])
def test_a_plain_python_server_does_the_same(num_requests: int) -> None:
    """Lockstep rounds written out: one forward for all, a new text for whoever ends, until none waits."""
    cost, orders = cost_model(), build_orders(TRACE, 8)
    curves, queue = curves_of(orders, cost, num_requests), text_queue(orders, num_requests, seed=3)
    price, ends = 30.0, orders.text_starts[1:] - 1
    waiting = queue.tolist()
    at = [int(orders.text_starts[waiting[i]]) for i in range(num_requests)]
    last = [int(ends[waiting[i]]) for i in range(num_requests)]
    waiting = waiting[num_requests:]
    tokens, seconds, rounds, done = 0, 0.0, 0, False
    while not done:
        context = float(np.mean(orders.context_tokens[at]))
        row = round(context / 16) - curves.first_bucket
        counts = merged(orders, np.array(at), curves.table[row], price)
        seconds, rounds = seconds + curves.table[row][sum(counts)], rounds + 1
        for i, n in enumerate(counts):
            ranks = orders.ranks[at[i]].tolist()
            hit = next((d for d, rank in enumerate(ranks) if rank >= n), len(ranks))
            tokens, at[i] = tokens + min(hit + 1, last[i] - at[i]), at[i] + hit + 1
            if at[i] >= last[i] and waiting:
                text = waiting.pop(0)
                at[i], last[i] = int(orders.text_starts[text]), int(ends[text])
            elif at[i] >= last[i]:
                done = True
    run = play_load(orders, curves, queue, "merged", price=price)
    assert (run.tokens, run.rounds) == (tokens, rounds) and run.seconds == pytest.approx(seconds)


def test_estimated_batches_cost_what_the_planner_says() -> None:
    """Beyond the measured batches the rule is the planner's, at its own sizes (multiples of r)."""
    cost = load_profile("h100-qwen3-8b")
    for num_requests, context in ((128, 512), (256, 4096), (16, 512), (23, 512)):
        curves, pricer = load_curves(cost, num_requests, context, context, 256), Pricer("h100", cost)
        per_request = curves.max_total_nodes // num_requests
        at = num_requests * np.arange(1, per_request + 1)
        np.testing.assert_allclose(curves.table[0][at], pricer.rounds(per_request, context, num_requests), rtol=1e-12)
        assert curves.plain[0] == pytest.approx(pricer.plain(context, num_requests))
        assert curves.provenance == ("estimated" if num_requests > 64 else "composed")
        assert curves.max_total_nodes + num_requests == cost.max_verify_tokens
        assert (curves.minorant <= curves.table + 1e-15).all()


def test_batches_that_do_not_fit_are_refused() -> None:
    cost, orders = cost_model(), build_orders(TRACE, 8)
    assert curves_of(orders, cost, 64).max_total_nodes == 0  # the roots alone
    with pytest.raises(CostCurveError, match="65 requests"):
        curves_of(orders, cost, 65)
    short = Trace({}, [text for text in markov_trace(num_texts=2, length=1).texts])
    with pytest.raises(TraceError, match="nothing to play"):
        study_load(short, cost, "mine", [1])


def test_a_flat_curve_and_texts_without_a_round() -> None:
    flat = CostModel.from_points([1, 64], [0.06, 0.06])
    with pytest.raises(CostCurveError, match="at batch 1 a round costs the same"):
        study_load(TRACE, flat, "flat", [1], num_bootstrap=2)
    text = TRACE.texts[0]
    short = replace(
        text, key="short", token_ids=text.token_ids[: text.num_prompt_tokens + 1], draft_token_ids=text.draft_token_ids[:1],
        draft_logprobs=text.draft_logprobs[:1],
    )  # fmt: skip
    more = Trace(TRACE.identity, [short, *TRACE.texts])
    studies = [study_load(trace, cost_model(), "some", [2], num_bootstrap=3) for trace in (TRACE, more)]
    assert studies[0] == studies[1]


def test_queues_are_whole_passes_long_enough_for_every_place() -> None:
    orders = build_orders(TRACE, 8)
    queue = text_queue(orders, 4, seed=1)
    assert len(queue) == 36 and (np.bincount(queue) == 6).all()
    again = text_queue(orders, 4, [2, 2, 5], seed=1)
    assert set(again.tolist()) == {2, 5} and len(again) == 33


@pytest.mark.parametrize("num_requests", [1, 4])
def test_no_other_budget_or_price_does_better(num_requests: int) -> None:
    """The uniform budget is the best of all; the fixed point's price is within 2 % of the best of a sweep of prices."""
    cost, orders = cost_model(), build_orders(markov_trace(num_texts=24, length=30, overconfident=1.2), 16)
    curves, queue = curves_of(orders, cost, num_requests), text_queue(orders, num_requests)
    largest = min(16, curves.max_total_nodes // num_requests)
    uniform = best_uniform(orders, curves, queue, range(1, 17))
    every = [play_load(orders, curves, queue, "uniform", n).tokens_per_second for n in range(1, largest + 1)]
    assert uniform.tokens_per_second == max(every) and uniform.budget == 1 + int(np.argmax(every))
    found = merged_at_fixed_point(orders, curves, queue, uniform.tokens_per_second)
    prices = found.tokens_per_second * np.geomspace(0.25, 4.0, 33)
    swept = [play_load(orders, curves, queue, "merged", 0, price, found.reach_scale).tokens_per_second for price in prices]
    assert found.tokens_per_second >= 0.98 * max(swept)
    assert min(swept) < 0.95 * max(swept)  # the sweep is wide enough to tell


def test_study_says_where_speculation_stops_paying() -> None:
    cost = cost_model()
    study = study_load(TRACE, cost, "mine", [1, 2, 4, 16, 60], num_bootstrap=12)
    speedups = [row.merged_speedup for row in study.rows]
    assert speedups[0] > 1 > speedups[-1]
    assert study.stops_paying_at_merged == next(r.num_requests for r in study.rows if r.merged_speedup <= 1)
    for row in study.rows:
        low, high = row.merged_speedup_interval
        assert low <= high and row.provenance == ("estimated" if row.num_requests > 1 else "measured")
        assert row.merged_gain_over_uniform == pytest.approx(row.merged_speedup / row.uniform_speedup - 1)
    assert study == study_load(TRACE, cost, "mine", [1, 2, 4, 16, 60], num_bootstrap=12)
    fixed = study_load(TRACE, cost, "mine", [1], context_tokens=208, num_bootstrap=2)
    assert fixed.rows[0].plain_tokens_per_second == pytest.approx(1 / cost.plain_seconds(208))
    assert fixed.context_tokens == (208, 208)


def test_the_benchmark_prints_one_record_and_draws(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.safetensors")
    picture = tmp_path / "load.png"
    command = [sys.executable, str(ROOT / "benchmarks" / "load_study.py"), "--trace", str(tmp_path / "trace.safetensors"),
               "--profile", "a100-qwen3-8b", "--batch", "1", "--batch", "128", "--bootstrap", "3", "--picture", str(picture)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT, check=True)
    record = json.loads(done.stdout)
    assert record["schema"] == "treebudget.benchmark.load_study" and record["kind"] == "simulation"
    rows = record["studies"][0]["rows"]
    assert [row["num_requests"] for row in rows] == [1, 128] and rows[1]["provenance"] == "estimated"
    assert record["studies"][0]["what_if"]["target"] == ["toy", "Qwen/Qwen3-8B"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
