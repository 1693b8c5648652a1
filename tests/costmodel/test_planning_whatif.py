from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import CostModel, Identity, StageCell, load_profile
from costmodel.planning import Memory, Pricer, Settings, inverse, what_if
from costmodel.planning.acceptance import from_conditional, from_survival
from costmodel.planning.reach import expected_tokens
from costmodel.planning.whatif import best_fixed, choose
from tests.costmodel.planning_helpers import NO_LIMIT, pricer, profile

PRICER = pricer()
MEASURED = pricer(requests=(1, 4, 16), rule="measured")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=15), st.sampled_from([0, 1024, 5000]), st.sampled_from([1, 3, 16]))
def test_the_budget_is_the_best_of_all(conditional, context, batch):
    """Oracle: every budget priced by the cost model's own round_seconds (contexts are multiples of its bucket)."""
    tokens = expected_tokens(from_conditional([*conditional, 0.0], 15), 15)
    cost, context = MEASURED.cost, 16 * (context // 16)
    rounds = cost.round_seconds(batch * tokens.size, context, batch)
    rates = [1 / cost.plain_seconds(context, batch)]
    rates += [tokens[n] / rounds[batch * (n + 1) - 1] for n in range(1, tokens.size)]
    choice = choose(MEASURED, tokens, context, batch)
    assert choice.rate == pytest.approx(max(rates)) and rates[choice.budget] == pytest.approx(max(rates))


@settings(max_examples=15, deadline=None)
@given(st.floats(0.01, 100.0), st.floats(0.1, 0.95))
def test_units_change_nothing_but_the_units(scale, p):
    shapes = Settings((0, 1024), (1, 4), price_per_hour=2.0)
    accepted = from_survival([p], 15)
    plain = what_if([PRICER], accepted, shapes, [NO_LIMIT])
    scaled = what_if([pricer(scale=scale)], accepted, dataclasses.replace(shapes, price_per_hour=6.0), [NO_LIMIT])
    for one, other in zip(plain, scaled, strict=True):
        for key in ("budget", "fixed_budget", "stops_paying_at_batch", "verdict"):
            assert one[key] == other[key]
        assert other["speedup_over_plain"] == pytest.approx(one["speedup_over_plain"])
        assert other["ms_per_token"] == pytest.approx(scale * one["ms_per_token"])
        assert other["cost_per_million_tokens"] == pytest.approx(3 * scale * one["cost_per_million_tokens"])


def test_ranking_uses_tokens_per_second_only():
    """Case 24: one length of 3.2 at budgets 4, 8, 16 (root included): the rates differ fivefold, the cheapest round wins."""
    seconds = PRICER.rounds(15, 0, 1)
    per_second = {t: 3.2 / seconds[t - 2] for t in (4, 8, 16)}
    assert max(per_second, key=per_second.get) == 4  # type: ignore[arg-type]
    flat = np.array([1.0, 1, 1, 3.2, 3.2, 3.2, 3.2, 3.2, *[3.2] * 8])
    assert choose(PRICER, flat, 0, 1).budget == 3


def test_a_row_worked_by_hand():
    """20 + .4 t ms + 3 ms draft, survival 1 then 0: one node costs 23.8 ms for two tokens, plain 20.4 for one."""
    row = what_if([PRICER], from_survival([1.0, 0.0], 15), Settings((0,), (1,), price_per_hour=3.6), [NO_LIMIT])[0]
    assert row["budget"] == 1 and row["tokens_per_round"] == 2.0
    assert row["ms_per_token"] == pytest.approx(11.9) and row["plain_ms_per_token"] == pytest.approx(20.4)
    assert row["speedup_over_plain"] == pytest.approx(20.4 / 11.9)
    assert row["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 * 1e6 * 0.0119)
    assert row["provenance"] == "measured" and row["not_charged"] == ["select", "commit"]
    for key, (low, high) in row["interval"].items():
        if row[key] is not None:  # speculation pays at every batch searched
            assert low <= row[key] <= high, key


def test_gain_under_two_percent_is_not_worth_it_and_hopeless_drafts_are_not_made():
    rows = what_if([PRICER], from_survival([0.8], 15), Settings((0,), (1,)), [NO_LIMIT])
    assert rows[0]["gain_over_fixed"] == 0 and rows[0]["verdict"].startswith("not worth it")
    hopeless = what_if([PRICER], from_survival([0.01], 15), Settings((0,), (1,)), [NO_LIMIT])[0]
    assert hopeless["budget"] == 0 and hopeless["verdict"].startswith("do not speculate")
    assert hopeless["stops_paying_at_batch"] == 1 and hopeless["speedup_over_plain"] == 1.0
    mixed = what_if([PRICER], from_survival([0.8], 15), Settings((0,), (1, 64)), [NO_LIMIT])
    assert any(row["verdict"].startswith("worth it") for row in mixed)


def test_best_fixed_is_the_geometric_mean_over_shapes():
    tokens = expected_tokens(from_survival([0.8], 15), 15)
    choices = [choose(PRICER, tokens, 0, batch) for batch in (1, 8, 64)]
    brute = max(range(16), key=lambda n: math.prod(float(choice.rates[n]) for choice in choices))
    assert best_fixed(choices) == brute


def test_a_batch_beyond_the_profile_is_estimated_and_reads_the_cache_per_request():
    """The generator's own law, 20 + .4 t + r c / 2000, is recovered from one request's cells, and never called measured."""
    row = PRICER.round_interval(0, 8192, 16)
    assert row.seconds[0] == pytest.approx(1e-3 * (20 + 0.4 * 16 + 16 * 8192 / 2000), rel=1e-6)
    assert row.low[0] < 1e-3 * (20 + 0.4 * 16 + 8192 / 2000) * 1.01  # the rule total_tokens is the low end
    assert PRICER.provenance(16) == "estimated" and PRICER.provenance(1) == "measured"
    assert MEASURED.provenance(16) == "measured" and MEASURED.priced_by(8) == "interpolated between batches"
    assert MEASURED.provenance(32) == "estimated"


def test_a_flat_curve_gives_no_decision():
    flat = Pricer("flat", CostModel.from_points([1, 8, 64], [0.06, 0.06, 0.06], draft_seconds=0.001))
    assert what_if([flat], from_survival([0.9], 15), Settings(), [NO_LIMIT])[0]["verdict"].startswith("no decision")


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.95), st.sampled_from([0, 1024, 8192]), st.sampled_from([1, 4, 64]))
def test_the_ends_of_a_choice_are_the_choices_at_the_ends(p, context, batch):
    """Oracle: the best budget by brute force where every latency costs its low end, and where it costs its high end."""
    row = what_if([PRICER], from_survival([p], 15), Settings((context,), (batch,)), [NO_LIMIT])[0]
    tokens = [1 + sum(p**i for i in range(1, n + 1)) for n in range(16)]
    budgets, gains = [], []
    for end in ("seconds", "low", "high"):
        rates = [tokens[n] / float(getattr(PRICER.round_interval(n, context, batch), end)[0]) for n in range(16)]
        budgets.append(max(range(16), key=lambda n, rates=rates: rates[n]))
        gains.append(rates[row["budget"]] / rates[row["fixed_budget"]] - 1)
    assert row["interval"]["budget"] == [min(budgets), max(budgets)]
    assert row["interval"]["gain_over_fixed"] == pytest.approx([min(gains), max(gains)])


def test_counted_rounds_widen_what_typed_numbers_leave_exact():
    typed = from_survival([0.8, 0.6, 0.4], 15)
    counted = dataclasses.replace(typed, num_rounds=50)
    shapes = Settings((1024,), (4,))
    exact, sampled = (what_if([PRICER], item, shapes, [NO_LIMIT])[0]["interval"] for item in (typed, counted))
    assert exact["tokens_per_round"][0] == exact["tokens_per_round"][1]
    for key in ("tokens_per_round", "ms_per_token", "tokens_per_second_per_gpu"):
        assert sampled[key][0] < exact[key][0] and exact[key][1] < sampled[key][1]
    tokens = expected_tokens(counted, 15)
    batches = [
        inverse.largest_batch_within(PRICER, tokens, NO_LIMIT, 1024, 14.0, errors)["interval"]["largest_batch"]
        for errors in (None, counted.relative_errors(tokens.size - 1))
    ]
    assert batches[1][0] < batches[0][0] and batches[0][1] < batches[1][1]


def test_stops_paying_is_the_first_batch_that_does_not():
    tokens = expected_tokens(from_survival([0.4], 15), 15)
    steep = pricer(slope=2.0)
    row = what_if([steep], from_survival([0.4], 15), Settings((0,), (1,)), [NO_LIMIT])[0]
    stop = row["stops_paying_at_batch"]
    paying = [choose(steep, tokens, 0, batch).budget > 0 for batch in range(1, 41)]
    assert stop == paying.index(False) + 1


def test_memory_of_qwen3_8b_on_80_gb():
    memory = Memory.of(profile().identity, gpu_bytes=80e9)
    assert memory.weights_bytes == pytest.approx(16.38e9, rel=2e-3)  # 8.19e9 parameters, two bytes
    assert memory.cache_bytes_per_token == 2 * 36 * 8 * 128 * 2
    most = memory.largest_batch(8192, 15)
    assert most is not None
    assert memory.weights_bytes + memory.cache_bytes(8192, 15, most) <= 0.9 * 80e9
    assert memory.weights_bytes + memory.cache_bytes(8192, 15, most + 1) > 0.9 * 80e9
    unknown = Memory.of(Identity(device="abacus"))
    assert unknown.largest_batch(1, 1) is None and unknown.unknown


@pytest.mark.parametrize("slo", [5.0, 10.0, 14.0, 40.0])
def test_slo_batch_against_brute_force(slo):
    tokens = expected_tokens(from_survival([0.8], 15), 15)
    row = inverse.largest_batch_within(PRICER, tokens, NO_LIMIT, 1024, slo)
    fast = [1e3 / choose(PRICER, tokens, 1024, batch).rate <= slo for batch in range(1, 513)]
    assert row["largest_batch"] == (max(i for i, ok in enumerate(fast, 1) if ok) if any(fast) else 0)
    assert row["limited_by"] == ("search" if all(fast) else "latency")


def test_slo_batch_on_a_staircase():
    """Batch 3 of an H100 is served faster than 1, 2 and 4: doubling would have stopped at the first."""
    steps, tokens = Pricer("h", load_profile("h100-qwen3-8b")), expected_tokens(from_survival([0.75], 15), 15)
    rates = [1e3 / choose(steps, tokens, 1024, batch).rate for batch in range(1, 9)]
    slo = min(rates) + 1e-6
    assert rates.index(min(rates)) > 0
    assert inverse.largest_batch_within(steps, tokens, NO_LIMIT, 1024, slo)["largest_batch"] >= 1 + rates.index(min(rates))


@pytest.mark.parametrize("batch", [16, 64, 128])
def test_beyond_the_profile_cost_grows_with_the_context_and_is_doubted(batch):
    """An eager curve, flat at the host's launch time and 2 % off at one context: no context is cheaper than a shorter one."""
    eager = Pricer("a", load_profile("a800-qwen3-8b"))
    priced = [eager.budgets(7, context, batch) for context in (1, 1000, 2000, 4000)]
    seconds = np.array([item.seconds for item in priced])
    assert (np.diff(seconds, axis=0) >= -1e-9).all()
    for item in priced:
        assert (item.high / item.seconds > 1.3).all() and (item.seconds / item.low > 1.3).all()


def test_tensor_parallel_beyond_the_heads_divides_the_cache_no_further():
    bytes_per_token = [
        Memory.of(Identity(device="h100", target="Qwen/Qwen3-8B", dtype="bfloat16", tensor_parallel=n)).cache_bytes_per_token
        for n in (1, 8, 16)
    ]
    assert bytes_per_token[0] == 8 * bytes_per_token[1] == 8 * bytes_per_token[2]


def test_slo_batch_stops_at_memory():
    tokens = expected_tokens(from_survival([0.8], 15), 15)
    memory = Memory(10e9, 1e6, 20e9)
    row = inverse.largest_batch_within(PRICER, tokens, memory, 1024, 1e6)
    assert row["limited_by"] == "memory" and row["largest_batch"] <= memory.largest_batch(1024, row["budget"])


def test_break_even_ties_with_plain():
    for row in inverse.break_even(PRICER, 15, 1024, 1):
        p = row["conditional_acceptance"]
        assert p is not None
        tokens = 1 + sum(p**i for i in range(1, row["budget"] + 1))
        seconds = PRICER.rounds(row["budget"], 1024, 1)[-1]
        assert tokens / seconds == pytest.approx(1 / PRICER.plain(1024, 1), rel=1e-6)
        assert row["acceptance_rate"] == pytest.approx((row["acceptance_length"] - 1) / row["budget"])
    never = Pricer("dear", CostModel.from_points([1, 2, 4], [0.01, 0.03, 0.05], draft_seconds=0.1))
    assert all(row["conditional_acceptance"] is None for row in inverse.break_even(never, 3, 0, 1))


def _erlang_c(load: float, servers: int) -> float:
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 60.0), st.integers(1, 16))
def test_gpus_against_the_textbook_erlang_c(load, slots):
    gpus = inverse.gpus_needed(load, slots)
    assert gpus * slots > load and _erlang_c(load, gpus * slots) <= 0.05 + 1e-12
    fewer = (gpus - 1) * slots
    assert fewer <= load or _erlang_c(load, fewer) > 0.05


def test_square_root_staffing_takes_over_for_huge_loads():
    assert inverse.gpus_needed(1e6, 64) == math.ceil((1e6 + 2e3) / 64)


def test_the_interval_of_a_draft_is_that_of_the_drafters_own_block():
    """Block sizes beside it are measured too, and their spread says nothing about this one."""
    made = profile()
    spreads = {8: 3.0, 16: 1.1, 32: 3.0}
    cells = tuple(StageCell("draft", size, 0, 1, 3e-3, 3e-3 / wide, 3e-3 * wide) for size, wide in spreads.items())
    prices = [Pricer("p", CostModel(dataclasses.replace(made, stages=stages))) for stages in (cells, cells[1:2])]
    several, own = (price.round_interval(4, 1024, 1) for price in prices)
    assert (several.low, several.high) == (own.low, own.high)


def test_a_mixture_of_experts_whose_experts_are_of_unknown_width_is_not_said_to_fit():
    shape = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 1000, "experts": 8}
    unknown = Memory.of(Identity(model_shape=shape, dtype="bfloat16"), gpu_bytes=1e9)
    assert unknown.weights_bytes is None and unknown.largest_batch(100, 0) is None and "full shape" in str(unknown.unknown)
    known = Memory.of(Identity(model_shape={**shape, "expert_intermediate": 32}, dtype="bfloat16"), gpu_bytes=1e9)
    assert known.weights_bytes is not None and known.weights_bytes > 2 * 4 * 8 * 3 * 64 * 32  # all experts, two bytes each
