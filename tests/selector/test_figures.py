from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from costmodel import CostModel
from costmodel.clitools import to_jsonable
from selector.calibration import Calibration
from selector.figures import FigureError, write_figures
from selector.figures.labels import Spot, label_points
from selector.figures.numbers import coverage, rank_shares, stage_seconds, sweep
from selector.figures.reliability import reliability_numbers
from selector.figures.style import house_style, new_figure, save_figure
from selector.registry import parse_policy
from selector.replaying.orders import build_orders
from selector.replaying.replay import replay
from selector.replaying.rounds import build_curves, play
from selector.trace import Trace
from tests.selector.helpers import markov_trace

NAMES = ("rank", "coverage", "round", "throughput", "gap", "reliability")


def cost_model() -> CostModel:
    return CostModel.from_points([1, 2, 8, 9, 33], [0.042, 0.050, 0.059, 0.065, 0.11], draft_seconds=0.010, select_seconds=0.001)


def place_of(trace: Trace, text: int, anchor: int, depth: int) -> tuple[int | None, bool]:
    """Rank of the true token by sorting, None if unlisted; and whether the text goes that far."""
    item = trace.texts[text]
    at = item.num_prompt_tokens + anchor + 1 + depth
    if at >= len(item.token_ids):
        return None, False
    pairs = zip(item.draft_logprobs[anchor, depth].tolist(), item.draft_token_ids[anchor, depth].tolist(), strict=True)
    ordered = [token for _, token in sorted(pairs, key=lambda pair: -pair[0])]
    true = int(item.token_ids[at])
    return (ordered.index(true) + 1 if true in ordered else None), True


def test_rank_shares_against_sorting():
    trace = markov_trace(num_texts=3, length=12, depth=3, top_k=5)
    numbers = rank_shares(trace)
    assert numbers["ranks"] == ["1", "2", "3-4", "5", "not listed"]
    bounds = [(1, 1), (2, 2), (3, 4), (5, 5)]
    for depth in range(3):
        found = [place_of(trace, t, a, depth) for t in range(3) for a in range(12)]
        ranks = [rank for rank, exists in found if exists]
        assert numbers["places"][depth] == len(ranks)
        expected = [sum(rank is not None and low <= rank <= high for rank in ranks) / len(ranks) for low, high in bounds]
        expected.append(sum(rank is None for rank in ranks) / len(ranks))
        np.testing.assert_allclose(numbers["shares"][depth], expected)
        assert sum(numbers["shares"][depth]) == pytest.approx(1)


def test_a_probability_of_nan_is_no_rank():
    trace = markov_trace(num_texts=1, length=8, depth=2, top_k=4)
    trace.texts[0].draft_logprobs[:] = np.nan
    assert [row[-1] for row in rank_shares(trace)["shares"]] == [1.0, 1.0]


def test_coverage_grows_with_the_budget_and_ends_at_what_is_listed():
    trace = markov_trace(num_texts=4, length=16, depth=3, top_k=3)
    whole = 3 + 9 + 27
    numbers = coverage(build_orders(trace, whole), budgets=(1, 4, whole))
    shares = np.array(numbers["shares"])
    assert (np.diff(shares, axis=0) >= 0).all() and (np.diff(shares, axis=1) <= 0).all()
    np.testing.assert_allclose(shares[-1], numbers["listed"])  # the tree of all candidates
    top = [place_of(trace, t, a, 0) for t in range(4) for a in range(16)]
    assert shares[0, 0] == pytest.approx(sum(rank == 1 for rank, exists in top if exists) / sum(exists for _, exists in top))
    starts = 4 * 15
    assert numbers["accepted_nodes"][-1] == pytest.approx(np.dot(shares[-1], numbers["places"]) / starts)


def test_sweeps_are_replays_of_their_policies():
    trace, cost = markov_trace(), cost_model()
    orders = build_orders(trace, 32)
    curves = build_curves(orders, cost)
    for kind in ("fixed", "chain"):
        columns = sweep(orders, curves, kind)
        rounds = play(parse_policy(f"{kind}:3"), orders, curves)
        at = columns["nodes"].index(3)
        assert columns["tokens_per_second"][at] == pytest.approx(rounds.tokens_per_second)
        assert columns["accepted_per_verified"][at] == pytest.approx(rounds.accepted.sum() / rounds.nodes.sum())
    assert columns["nodes"] == [1, 2, 3, 4]


def test_stages_sum_to_the_round():
    trace, cost = markov_trace(), cost_model()
    numbers = stage_seconds(cost, build_orders(trace, 32))
    total = np.sum(list(numbers["seconds"].values()), axis=0)
    np.testing.assert_allclose(total, cost.round_seconds(33, numbers["context_tokens"]))
    assert stage_seconds(cost, build_orders(trace, 32), 0.002)["seconds"]["score"] == [0.002] * 33
    assert numbers["plain"] == pytest.approx(cost.plain_seconds(numbers["context_tokens"]))


def test_reliability_of_an_honest_drafter_lies_on_the_diagonal():
    rng = np.random.default_rng(0)
    trace = markov_trace(num_texts=20, length=200, depth=1, top_k=3)
    for text in trace.texts:  # the true token is candidate c with exactly the probability the draft says
        p = rng.dirichlet(np.ones(4), size=200)
        own = np.array([rng.choice(4, p=row) for row in p])
        ids = np.tile(np.array([100, 101, 102], np.int32), (200, 1, 1))
        following = text.next_tokens()[:, 0]
        for a in range(199):
            if own[a] < 3:
                ids[a, 0, own[a]] = following[a]
        text.draft_token_ids[:], text.draft_logprobs[:, 0] = ids, np.log(p[:, :3])
    numbers = reliability_numbers(trace, Calibration((1.0,), (-1.0,)), None)
    error = {(row["predictor"], row["depth"]): row["ece"] for row in numbers["rows"] if row["split"] == "all"}
    assert error["as drafted", None] < 0.05  # 3,980 groups: the noise of 15 bins is about 0.03
    assert error["calibrated", None] > 0.1  # scaled down on purpose


def test_all_figures_are_written_with_their_numbers_and_say_of_what(tmp_path):
    trace, cost = markov_trace(num_texts=6, length=24), cost_model()
    trace.identity["device"] = "another"
    cost.profile.__dict__["identity"] = type(cost.identity)(device="this")
    calibration = Calibration((0.6, 0.5, 0.5, 0.5), (-0.2, -0.4, -0.4, -0.4))
    result = replay(trace, cost, ["exact", "priced", "taps"], calibration=calibration, num_bootstrap=10)
    done = []
    written = write_figures(
        result, trace, cost, tmp_path / "new", calibration, ending="svg", advance=lambda steps, note: done.append(note)
    )
    assert tuple(written) == NAMES == tuple(done)
    json.dumps(to_jsonable(written), allow_nan=False)
    for name, figure in written.items():
        assert figure["path"] == str(tmp_path / "new" / f"{name}.svg")
        text = "".join(ElementTree.parse(figure["path"]).getroot().itertext())
        assert "measured profile: this" in text and "6 texts" in text
        assert "a what-if: trace and profile differ in device" in text
    assert [row["name"] for row in written["gap"]["numbers"]["policies"]] == [row.name for row in result.rows]


def test_a_trace_of_one_short_text_can_be_drawn(tmp_path):
    trace = markov_trace(num_texts=1, length=3, depth=1, top_k=1)
    result = replay(trace, CostModel.from_points([1, 2], [0.05, 0.06]), ["exact"], num_bootstrap=2)
    written = write_figures(result, trace, CostModel.from_points([1, 2], [0.05, 0.06]), tmp_path)
    assert all(Path(figure["path"]).read_bytes().startswith(b"\x89PNG") for figure in written.values())


def test_a_drafter_too_weak_to_draft_with_can_be_drawn(tmp_path):
    """Every candidate has a chance of a thousandth: `unimodal` verifies nothing, so nothing is accepted per node."""
    trace = markov_trace(num_texts=3, length=10)
    texts = [replace(text, draft_logprobs=np.full_like(text.draft_logprobs, np.log(1e-3))) for text in trace.texts]
    weak, cost = Trace(trace.identity, texts), cost_model()
    result = replay(weak, cost, ["unimodal"], num_bootstrap=5)
    assert result.row("unimodal").acceptance_rate is None
    assert set(write_figures(result, weak, cost, tmp_path)) == set(NAMES)


def test_a_long_trace_is_judged_on_texts_from_all_of_it(monkeypatch):
    trace = markov_trace(num_texts=9, length=10)
    monkeypatch.setattr("selector.figures.reliability._MAX_EDGES", trace.num_generated_tokens * trace.depth * trace.top_k // 2)
    numbers = reliability_numbers(trace, None, None)
    assert (numbers["num_texts"], numbers["num_texts_of_trace"], numbers["num_anchors"]) == (5, 9, 50)


def test_endings_are_refused_before_anything_is_computed(tmp_path):
    with pytest.raises(FigureError, match="png, svg, pdf"):
        write_figures(None, None, None, tmp_path, ending="gif")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_labels_of_close_points_do_not_lie_on_each_other(tmp_path):
    with house_style():
        figure, (axes,) = new_figure("costs $5 and $6", "caption", "footer")
        axes.set_xlim(0, 10)
        axes.set_ylim(0, 10)
        spots = [Spot(5 + 0.01 * i, 5 + 0.01 * i, f"policy {i}", "black") for i in range(7)]
        label_points(axes, spots)
        figure.canvas.draw()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to their points
        save_figure(figure, tmp_path / "x.png")
    assert len(boxes) == 7
    for i, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_a_scorer_is_judged_beside_the_draft():
    class Halved:
        """Half of what the draft says, whatever the parent; two candidates."""

        top_k = 2

        def edges(self, token_ids, log_probs, root_token_ids):
            return np.repeat(log_probs[:, :, None, :2], 2, axis=2) + np.log(0.5)

    trace = markov_trace(num_texts=4, length=40, depth=3, top_k=4)
    numbers = reliability_numbers(trace, None, Halved())
    assert (numbers["top_k"], {curve["predictor"] for curve in numbers["curves"]}) == (2, {"as drafted", "scorer"})
    means = {row["predictor"]: row["predicted"] for row in numbers["rows"] if (row["split"], row["depth"]) == ("all", None)}
    assert means["scorer"] == pytest.approx(means["as drafted"] / 2)
