"""Accuracy on tables measured by others: few points, cliffs, experts, and intervals that cover as often as they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import profiles
from costmodel import CostModel, Identity, Profile, VerifyCell, load_profile
from costmodel.accuracy import A800, MOE_IDENTITY, coverage, expert_errors, leave_out
from costmodel.crosschecks import crossed, sampled_errors
from costmodel.expertfit import fit_experts
from costmodel.experts import expected_experts
from costmodel.intervals import KnownLine
from costmodel.profile import now_utc
from costmodel.sampler import sample_table

# Microseconds of one layer of Qwen3-30B-A3B (128 experts, 8 a token, power_law_1.2 routing) on H100 and A100:
# AIConfigurator operator tables, Apache-2.0 (vllm 0.24.0 and 0.14.0).
LAYERS = {
    "h100": {1: 48, 2: 74, 4: 114, 8: 166, 16: 209, 32: 359, 64: 404, 128: 445, 256: 460, 512: 483},
    "h200": {1: 39, 2: 56, 4: 88, 8: 125, 16: 164, 32: 267, 64: 287, 128: 318, 256: 360, 512: 363},
    "a100": {1: 62, 2: 108, 4: 196, 8: 258, 16: 350, 32: 601, 64: 676, 128: 736, 256: 1056, 512: 1163},
}


@pytest.mark.parametrize("name", ["a800-qwen3-4b", "a800-qwen3-8b"])
def test_fifty_points_recover_a_published_table(name):
    cells = {(cell.verify_tokens, cell.context_tokens): cell.seconds for cell in load_profile(name).profile.verify}
    sizes, contexts = (sorted(set(axis)) for axis in zip(*cells, strict=True))
    sampled = sample_table(lambda t, c: cells[t, c], sizes, contexts, 50)
    assert len(sampled.verify) <= 50
    cost = CostModel(sampled)
    tokens, places = (np.array(axis, float) for axis in zip(*cells, strict=True))
    for form in ("table", "convex"):
        wrong = np.abs(cost.verify_seconds(tokens, places, form=form) / np.array(list(cells.values())) - 1)
        assert wrong.mean() <= 0.01 and np.quantile(wrong, 0.95) <= 0.02  # asked for: 0.02 and 0.05


@pytest.mark.parametrize("name", profiles.names())
def test_every_shipped_table_is_within_one_percent_where_it_was_measured(name):
    cost = load_profile(name)
    profile = cost.profile
    assert profile.source and profile.created and profile.identity.device and profile.identity.target
    for place in sorted({(cell.context_tokens, cell.num_requests) for cell in profile.verify}):
        cells = [cell for cell in profile.verify if (cell.context_tokens, cell.num_requests) == place]
        found = cost.verify_seconds([cell.verify_tokens for cell in cells], *place)
        # Where samples were taken, dips within their noise are smoothed out: the table then stays among the samples.
        ends = [(c.low_seconds, c.high_seconds) if c.num_samples else (c.seconds, c.seconds) for c in cells]
        low, high = np.array(ends, float).T
        assert np.all(found >= 0.99 * low) and np.all(found <= 1.01 * high)
    assert cost.diagnostics.largest_gap is not None


def test_the_cliff_of_the_a100_is_listed():
    cliffs = load_profile("a100-qwen3-8b").diagnostics.cliffs
    here = [cliff for cliff in cliffs if (cliff.context_tokens, cliff.num_requests) == (1024, 1)]
    found = {(cliff.from_verify_tokens, cliff.to_verify_tokens): cliff.relative_jump for cliff in here}
    assert found[128, 129] == pytest.approx(0.38, abs=0.04) and (256, 257) in found


@pytest.mark.parametrize("gpu", sorted(LAYERS))
def test_the_expert_term_describes_a_layer_and_keeps_one_token_exact(gpu):
    layer = {size: value / 1e6 for size, value in LAYERS[gpu].items()}
    fitted, convex, *_, first = expert_errors(layer)
    assert fitted < 0.08 and convex > 0.3 and first < 1e-12


def test_the_expert_term_helps_between_sizes():
    better = 0
    for layer in LAYERS.values():
        sizes, seconds = np.array(sorted(layer), float), np.array([layer[size] for size in sorted(layer)]) / 1e6
        kept = np.isin(sizes, (1, 8, 64, 512))
        costs = [CostModel.from_points(sizes[kept], seconds[kept], identity=identity) for identity in (MOE_IDENTITY, None)]
        errors = [np.abs(cost.verify_seconds(sizes) / seconds - 1).mean() for cost in costs]
        better += errors[0] < errors[1]
    assert better == len(LAYERS)


def test_the_expert_fit_recovers_a_curve_made_of_experts():
    sizes = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], float)
    truth = 0.01 + 2e-5 * (expected_experts(sizes, 128, 8) - 8) + 1e-6 * (sizes - 1)
    fit = fit_experts(sizes, 0 * sizes, truth, 128, 8)
    assert fit is not None
    between = np.array([3, 24, 100, 400], float)
    expected = 0.01 + 2e-5 * (expected_experts(between, 128, 8) - 8) + 1e-6 * (between - 1)
    np.testing.assert_allclose(fit.seconds(between), expected, rtol=0.01)
    assert fit.seconds(1) == pytest.approx(0.01, rel=1e-12) and np.all(np.diff(fit.concave_seconds(sizes)) >= 0)


def test_expected_experts_against_simulation():
    random = np.random.default_rng(0)
    drawn = [np.unique([random.choice(32, 4, replace=False) for _ in range(6)]).size for _ in range(2000)]
    assert expected_experts(6, 32, 4) == pytest.approx(np.mean(drawn), abs=0.15)  # deviation of the mean is 0.05
    assert expected_experts(1, 32, 4) == pytest.approx(4)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_scores_are_what_leaving_each_point_out_gives(noise):
    """Oracle: the line without the point, asked for its scale, its reach and its chord there."""
    random = np.random.default_rng(4)
    sizes = np.array([1, 2, 3, 5, 8, 13, 21, 64, 65, 128], float)
    line = KnownLine(sizes, random.uniform(1, 2, sizes.size), noise * random.uniform(0.5, 1, sizes.size))
    for index, (score, beyond) in enumerate(line.scores().T, start=1):
        rest = KnownLine(*(np.delete(item, index) for item in (line.sizes, line.seconds, line.noise)))
        at = line.sizes[index : index + 1]
        distance = abs(np.log(line.seconds[index] / np.interp(at[0], rest.sizes, rest.seconds)))
        assert score == pytest.approx(distance / rest.scale(at)[0])
        assert beyond == pytest.approx(max(distance - rest.reach(at)[0], 0.0), abs=1e-12)
    assert line.scores().shape == (2, sizes.size - 2) and KnownLine(sizes[:2], sizes[:2], 0 * sizes[:2]).scores().shape == (2, 0)


def numbers(line: str) -> list[float]:
    return [float(item) for item in re.findall(r"([0-9.]+)%", line)]


def test_the_document_says_what_the_command_prints():
    """The shipped A800 profiles are the published tables, so their rows of docs/accuracy.md can be computed anew."""
    document = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
    tables = {}
    for name, model in A800.items():
        cells = load_profile(name.replace("_", "-")).profile.verify
        contexts = sorted({cell.context_tokens for cell in cells})
        seconds = np.array([[cell.seconds for cell in cells if cell.context_tokens == context] for context in contexts])
        tables[model] = (contexts, np.arange(1, seconds.shape[1] + 1.0), seconds)
    for row in crossed(tables, 50):
        line = next(item for item in document.splitlines() if item.startswith(f"| {row[0]} | {row[1]} |"))
        assert numbers(line) == pytest.approx(numbers(" ".join(row)), abs=0.03)
        assert float(row[2][:-1]) <= 2 and float(row[3][:-1]) <= 5  # asked for
    for model, table in tables.items():
        for form, errors in sampled_errors(table, 50).items():
            line = next(item for item in document.splitlines() if item.startswith(f"| {model} | {form}, 50 points |"))
            assert numbers(line)[:2] == pytest.approx([100 * errors.mean(), 100 * np.quantile(errors, 0.95)], abs=0.03)


@pytest.mark.parametrize("name", ["h200-qwen3-4b", "l40s-qwen3-4b", "a40-qwen3-8b"])
def test_intervals_cover_on_profiles_they_were_not_made_with(name):
    (row,) = coverage([name])
    assert 85 <= float(row[2][:-1]) <= 95  # type: ignore[index]


CURVES = {
    "linear": lambda t, c: 0.02 + 1e-4 * t + 2e-6 * c,
    "knee": lambda t, c: max(0.02, 0.02 + 4e-4 * (t - 40)) + 2e-6 * c,
    "experts": lambda t, c: 0.01 + 2e-6 * c + 3e-4 * expected_experts(t, 128, 8),
    "cliff": lambda t, c: 0.02 + 1e-4 * t + 2e-6 * c + (0.012 if t > 53 else 0),
}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def measured(curve, noise: float, seed: int) -> Profile:
    random = np.random.default_rng(seed)
    cells = []
    for context in (1, 512, 1024, 2048):
        for size in SIZES:
            samples = curve(size, context) * (1 + noise * random.standard_normal(6))
            low, middle, high = np.percentile(samples, [10, 50, 90])
            cells.append(VerifyCell(size, context, 1, float(middle), float(low), float(high), 6))
    return Profile(Identity(), "measured", "simulated", now_utc(), tuple(cells))


def test_ninety_percent_intervals_cover_ninety_percent():
    shares = []
    for curve in CURVES.values():
        for noise, seed in ((0.01, 1), (0.05, 2)):
            profile = measured(curve, noise, seed)
            share, _ = leave_out(profile, list(profile.verify))
            shares.append(share)
    # 8 x 48 points left out: one deviation of the mean is 1.5 %, of a single share 4 %.
    assert 0.85 <= np.mean(shares) <= 0.95 and min(shares) > 0.75


@pytest.mark.parametrize("name", ["a800-qwen3-4b", "a800-qwen3-8b"])
def test_intervals_cover_on_published_tables(name):
    profile = load_profile(name).profile
    cells = [cell for cell in profile.verify if cell.verify_tokens == 1 or cell.verify_tokens % 32 == 0]
    share, _ = leave_out(replace(profile, provenance="measured"), cells, most=100)
    assert 0.85 <= share <= 0.95


def test_intervals_widen_with_level_noise_and_distance():
    cost = CostModel(measured(CURVES["linear"], 0.03, 3))
    widths = [np.subtract(*cost.verify_interval(20, 700, level=level)[::-1]) for level in (0.5, 0.9, 0.99)]
    assert widths[0] < widths[1] <= widths[2]
    assert np.subtract(*cost.verify_interval(16, 512, of="call")[::-1]) > np.subtract(*cost.verify_interval(16, 512)[::-1])
    near, far = (np.diff(np.log(cost.verify_interval(t, 512)))[0] for t in (128, 512))
    assert far > near + 0.3
    low, high = cost.verify_interval([1, 20, 64], 512)
    assert low.shape == high.shape == (3,) and np.all(low < high)
