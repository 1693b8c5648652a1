from __future__ import annotations

import pytest

from costmodel import CostModel, Profile, VerifyCell, load_profile
from costmodel.errors import UsageError
from costmodel.profile import now_utc
from costmodel.report import draw_cost, plot_cost
from tests.costmodel.fakes import IDENTITY


def sampled_cost() -> CostModel:
    cells = tuple(
        VerifyCell(t, c, 1, 0.05 + 0.001 * t + 1e-5 * c, 0.05, 0.06 + 0.002 * t, 9) for t in (1, 2, 8, 64) for c in (1, 128, 512)
    )
    return CostModel(Profile(IDENTITY, "measured", "test", now_utc(), cells))


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_is_written(tmp_path, ending, magic):
    path = plot_cost(sampled_cost(), tmp_path / "new" / f"curve.{ending}", markers={"chain": 7, "priced": 4.3})
    assert path.read_bytes().startswith(magic)
    assert len(list(path.parent.iterdir())) == 1


def test_markers_lie_on_the_table_at_nodes_plus_one():
    cost = sampled_cost()
    axes = draw_cost(cost, markers={"chain": 7}).axes[0]
    marker = next(line for line in axes.lines if line.get_marker() == "v")
    assert marker.get_xdata()[0] == 8 and marker.get_ydata()[0] == pytest.approx(1e3 * cost.verify_seconds(8, 128))
    legends = [child for child in axes.get_children() if type(child).__name__ == "Legend"]
    assert ["chain: 7 nodes"] in [[text.get_text() for text in legend.get_texts()] for legend in legends]


def test_a_published_table_without_spread_is_drawn_with_five_contexts():
    labels = draw_cost(load_profile("a800-qwen3-8b")).axes[0].get_legend_handles_labels()[1]
    assert sum(label.startswith("context") for label in labels) == 5


def test_an_unknown_ending_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="png, svg, pdf"):
        plot_cost(sampled_cost(), tmp_path / "curve.gif")
