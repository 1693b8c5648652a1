"""The bench on a tiny target: equal texts, honest rows, explained differences."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from costmodel import CostModel
from costmodel.clitools import to_jsonable
from decoder.bench import BenchSettings, bench_record, make_selectors, run_bench
from decoder.benchstats import Run, by_dataset, median_ratio, paired_ratios, summarise
from decoder.benchtable import print_bench, print_check
from decoder.check import check_settings, made_up_cost, run_check, step_seconds
from decoder.differences import explain_difference, first_difference, spacing
from decoder.errors import UsageError
from decoder.loop import Decoder
from decoder.prompts import Prompt, encode_prompt, prompts_sha256
from decoder.records import Generation, Round
from decoder.target import Target
from tests.decoder.helpers import LibraryDrafter, RandomDrafter, tiny_model, tiny_tokenizer

PROMPTS = [Prompt("hello there", "a", "p1"), Prompt("what is this?", "a", "p2"), Prompt("Now", "b", "p3")]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def drafter(target: Target) -> LibraryDrafter:
    texts = []
    for prompt in PROMPTS:
        ids = encode_prompt(target.tokenizer, prompt.text)
        texts.append(ids + Decoder(target).generate(ids, 24).token_ids)
    return LibraryDrafter(target, texts)


def test_every_policy_gives_plains_text(target: Target, drafter: LibraryDrafter) -> None:
    settings = BenchSettings(("chain", "fixed:6", "unimodal", "exact", "priced"), max_new_tokens=24, predict=False, max_nodes=20,
                             pause=False)
    order: list[str] = []
    cost = made_up_cost(step_seconds(target))
    result = run_bench(target, drafter, cost, PROMPTS, settings, progress=lambda steps, note: order.append(note))
    names = ["plain", "chain", "fixed:6", "unimodal", "exact", "priced"]
    assert order == [f"warm-up, {name}" for name in names] + names + names[::-1] + names  # ABBA
    record = json.loads(json.dumps(to_jsonable(bench_record(result, target, drafter, cost, PROMPTS, settings))))
    rows = {row["name"]: row for row in record["policies"]}
    assert list(rows) == names
    for name, row in rows.items():
        assert row["identical_to_plain"] == 3 and row["differences"] == []
        assert row["tokens_per_second"] > 0 and row["speedup_over_plain"] > 0
        assert (row["tokens_per_round"] > 1.3) == (name != "plain")
    assert rows["plain"]["speedup_over_plain"] == 1.0 and rows["plain"]["mean_nodes"] == 0
    assert rows["fixed:6"]["mean_nodes"] > 4 and rows["chain"]["mean_nodes"] <= 4
    assert {row["dataset"] for row in record["datasets"]} == {"a", "b", "mean"}
    assert sum(rows["exact"]["stage_milliseconds"].values()) > 0
    assert record["identity"]["target"] == "tiny" and record["prompts"]["num_prompts"] == 3
    stream = StringIO()
    print_bench(record, Console(file=stream, width=200))
    assert "fixed:6" in stream.getvalue() and "data set" in stream.getvalue()


def test_an_interrupted_bench_is_about_the_prompts_that_all_have_decoded(target: Target, drafter: LibraryDrafter) -> None:
    settings = BenchSettings(("chain", "exact"), max_new_tokens=12, max_nodes=20, pause=False)
    cost, steps, kept = made_up_cost(step_seconds(target)), [], []

    def interrupt_at(number: int) -> Any:
        def progress(count: int, note: str) -> None:
            steps.append(note)
            if len(steps) == number:
                raise KeyboardInterrupt
        return progress

    def keep(result: Any) -> None:
        kept.append(bench_record(result, target, drafter, cost, PROMPTS, settings))

    result = run_bench(target, drafter, cost, PROMPTS, settings, progress=interrupt_at(11), after_prompt=keep)
    record = bench_record(result, target, drafter, cost, PROMPTS, settings)
    assert record["interrupted"] and record["prompts"]["num_prompts"] == 2
    assert [row["identical_to_plain"] for row in record["policies"]] == [2, 2, 2]
    assert {row["dataset"] for row in record["datasets"]} <= {"a", "mean"}
    assert record["prediction_note"] == "interrupted after 2 of 3 prompts"
    assert [each["prompts"]["num_prompts"] for each in kept] == [1, 2] and not kept[0]["interrupted"]
    assert kept[0]["prompts"]["sha256"] == prompts_sha256(PROMPTS[:1])
    steps.clear()
    with pytest.raises(KeyboardInterrupt):  # nothing to tell yet
        run_bench(target, drafter, cost, PROMPTS, settings, progress=interrupt_at(5))
    complete = run_bench(target, drafter, cost, PROMPTS, settings)
    assert not bench_record(complete, target, drafter, cost, PROMPTS, settings)["interrupted"]


def test_usage(target: Target) -> None:
    with pytest.raises(UsageError, match="twice"):
        BenchSettings(("chain", "chain"))
    with pytest.raises(UsageError):
        BenchSettings(("chain",), max_new_tokens=1)
    with pytest.raises(UsageError, match="needs a plan"):
        make_selectors(["plan"], made_up_cost(1.0), BenchSettings())


def test_check_passes_and_fails(target: Target, drafter: LibraryDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = check_settings(("chain", "fixed:8"), 16)
    record = run_check(target, drafter, PROMPTS[:2], settings)
    assert record["passed"] and record["failures"] == []
    stream = StringIO()
    print_check(record, Console(file=stream, width=120))
    assert "passed" in stream.getvalue()
    hopeless = run_check(target, RandomDrafter(61, seed=8), PROMPTS[:1], check_settings(("chain:1",), 8))
    assert not hopeless["passed"] and "no policy had a drafted token" in hopeless["failures"][0]

    forward = Target.forward

    def broken(self: Target, token_ids: Any, position_ids: Any, cache: Any, mask: Any = None, logits_rows: Any = None) -> Any:
        if mask is not None:
            mask = torch.ones(mask.shape, dtype=torch.bool)
        return forward(self, token_ids, position_ids, cache, mask, logits_rows)

    monkeypatch.setattr(Target, "forward", broken)
    record = run_check(target, drafter, PROMPTS[:2], settings)
    assert not record["passed"] and "differ from plain decoding" in record["failures"][0]


def test_differences_are_judged_by_the_logits() -> None:
    logits = torch.zeros(4, 6, dtype=torch.bfloat16)
    logits[2, 3], logits[2, 5] = 20.0, 19.75
    assert explain_difference([1, 2, 3, 4], logits, [1, 2, 3, 4], "p") is None
    difference = explain_difference([1, 2, 3, 4], logits, [1, 2, 5, 4], "p")
    assert difference is not None and difference.position == 2
    assert difference.gap == difference.top2_gap == 0.25 and difference.step == 0.125 and difference.near_tie
    far = explain_difference([1, 2, 3, 4], logits, [1, 2, 0, 4], "p")
    assert far is not None and far.gap == 20.0 and not far.near_tie
    short = explain_difference([1, 2, 3], logits, [1, 2], "p")
    assert short is not None and not short.near_tie and short.other_token == -1
    assert first_difference([1], [1, 2]) == 1 and first_difference([], []) is None
    assert spacing(20.0, torch.bfloat16) == 0.125 and spacing(-1.0, torch.float32) == 2**-23


def made_run(policy: str, prompt: int, rounds: list[tuple[int, float]], dataset: str | None = None) -> Run:
    entries = [Round(10, True, 4, tokens - 1, tokens, 0.0, 0.0, seconds, 0.0, 0.0) for tokens, seconds in rounds]
    return Run(policy, prompt, dataset, Generation(5, [1] * 9, rounds=entries))


def test_rates_and_pairs() -> None:
    """By hand: 6 tokens in .2 s against 4 in .2 s is 1.5 times; 4 in .1 s against 4 in .2 s is 2 times."""
    plain = [made_run("plain", 0, [(2, 0.1), (2, 0.1)]), made_run("plain", 1, [(4, 0.2)])]
    runs = [made_run("x", 0, [(3, 0.1), (3, 0.1)]), made_run("x", 1, [(4, 0.1)])]
    assert paired_ratios(runs, plain) == pytest.approx([1.5, 2.0])
    row = summarise(runs, plain)
    assert row["tokens_per_second"] == pytest.approx(10 / 0.3)
    assert row["tokens_per_round"] == pytest.approx(10 / 3) and row["mean_nodes"] == 4
    assert row["speedup_over_plain"] == pytest.approx(1.75)
    assert row["speedup_interval"] == pytest.approx([1.5, 2.0])
    assert median_ratio([1.2, 1.2, 1.2]) == pytest.approx((1.2, 1.2, 1.2))


def test_mean_over_data_sets_counts_each_once() -> None:
    runs = [made_run("plain", i, [(1, 0.1)], "ab"[i > 0]) for i in range(4)]
    runs += [made_run("x", 0, [(3, 0.1)], "a"), *(made_run("x", i, [(1, 0.1)], "b") for i in (1, 2, 3))]
    rows = {(row["dataset"], row["name"]): row["speedup_over_plain"] for row in by_dataset(runs, ["plain", "x"])}
    assert rows["a", "x"] == pytest.approx(3) and rows["b", "x"] == pytest.approx(1) and rows["mean", "x"] == pytest.approx(2)
    assert by_dataset([made_run("plain", 0, [(1, 0.1)])], ["plain"]) == []


def test_cost_model_is_the_contracts() -> None:
    assert isinstance(made_up_cost(1.0), CostModel)
