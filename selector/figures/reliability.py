"""The reliability figure: whether chances of acceptance come true, as drafted and as corrected, by where the parent is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.calibration import Calibration
from selector.figures.style import BLUE, GREEN, GREY, MUTED, ORANGE
from selector.scoring import EdgeScorer, score_chunks
from selector.trace import Trace

MIN_COUNT = 20  # predictions in a bin; fewer say nothing
_MAX_EDGES = 2**25  # kept at once; of a longer trace every n-th text is used
_COLOURS = {"as drafted": ORANGE, "calibrated": BLUE, "scorer": GREEN}


def reliability_numbers(trace: Trace, calibration: Calibration | None, scorer: EdgeScorer | None) -> dict[str, Any]:
    """Mean predicted chance and share accepted by bins of the prediction, for every predictor and split; and its errors.

    Over all prefixes that were reached; what was never reached is not counted (`selector.reliability`).
    """
    from selector.reliability import SPLITS, judge_edges
    from selector.scorer.samples import collect

    k = trace.top_k if scorer is None else min(trace.top_k, scorer.top_k)
    used = _shortened(trace, k if scorer is None else k * k)
    samples = collect(used, k)
    predictors: dict[str, NDArray[np.float64]] = {"as drafted": samples.log_probs}
    if calibration is not None:
        predictors["calibrated"] = calibration.apply_to_batch(samples.log_probs)
    if scorer is not None and len(samples.token_ids):
        chunks = score_chunks(scorer, samples.token_ids, samples.log_probs, samples.roots)
        predictors["scorer"] = np.concatenate([edges for _, edges in chunks])
    judged = judge_edges(predictors, samples)
    curves = [
        {
            "predictor": name,
            "split": split,
            "predicted": bins.predicted[bins.count >= MIN_COUNT].tolist(),
            "observed": bins.observed[bins.count >= MIN_COUNT].tolist(),
            "count": bins.count[bins.count >= MIN_COUNT].tolist(),
        }
        for (name, split), bins in judged.bins.items()
    ]
    counts = {"num_anchors": len(samples.token_ids), "num_texts": len(used.texts), "num_texts_of_trace": len(trace.texts)}
    return {"splits": list(SPLITS), "top_k": k, **counts, "curves": curves, **judged.to_dict()}


def _shortened(trace: Trace, edges_per_row: int) -> Trace:
    """Every n-th text of a trace, as many as fit."""
    step = max(1, -(-trace.num_generated_tokens * trace.depth * edges_per_row // _MAX_EDGES))
    return trace.select(range(0, len(trace.texts), step))


def draw_reliability(panels: list[Any], numbers: dict[str, Any]) -> None:
    """One panel per split: share accepted against predicted chance; the closer to the diagonal, the more honest."""
    errors = {(row["predictor"], row["split"]): row["ece"] for row in numbers["rows"] if row["depth"] is None}
    for axes, split in zip(panels, numbers["splits"], strict=True):
        axes.plot([0, 100], [0, 100], color=MUTED, lw=1, ls=":")
        for curve in numbers["curves"]:
            if curve["split"] == split and curve["predicted"]:
                name = curve["predictor"]
                label = f"{name} (error {errors.get((name, split), float('nan')):.3f})"
                x, y = ([100 * value for value in curve[axis]] for axis in ("predicted", "observed"))
                axes.plot(x, y, "o-", ms=4, lw=1.6, color=_COLOURS.get(name, GREY), label=label)
        axes.set_title(split, fontsize=9.5, loc="left")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 100)
        axes.set_xlabel("predicted chance of acceptance (%)")
        if len(axes.lines) > 1:
            axes.legend(loc="upper left")
    panels[0].set_ylabel("accepted (%)")
