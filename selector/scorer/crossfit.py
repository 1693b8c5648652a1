"""Calibration evidence on every text: what networks say that are each blind to a share of the texts, of that share.

Fitted on the few texts kept aside, the calibration followed their accidents: the scorer was then less well calibrated at
depth 1 than the draft itself (0.030 against 0.021 tokens per prefix on evaluation prompts; with this 0.017).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selector.scorer.fitting import fit_network
from selector.scorer.groups import Groups, all_residuals
from selector.scorer.preparing import ReducedEmbedding, deal_texts, prepare
from selector.scorer.settings import ScorerSettings
from selector.trace import Trace


class Evidence(NamedTuple):
    """What `fit_depth_calibration` fits to, by group: the draft's and the network's logits, and what came."""

    drafted: NDArray[np.floating]
    residuals: NDArray[np.floating]
    label: NDArray[np.int64]
    depth: NDArray[np.int64]
    weight: NDArray[np.floating]


def evidence(torch: Any, fitted: Mapping[str, Any], held: Groups, reduced: Any, settings: ScorerSettings) -> Evidence:
    """What a fitted network says of groups that it was not trained on."""
    placed = {name: value.to(settings.device) for name, value in fitted.items()}
    residuals = all_residuals(torch, placed, held, reduced)
    return Evidence(*(x.cpu().numpy() for x in (held.drafted, residuals, held.label, held.depth, held.weight)))


def blind_evidence(
    torch: Any, trace: Trace, embedding: ReducedEmbedding, settings: ScorerSettings, seconds: float
) -> Evidence | None:
    """Evidence on all texts of a trace, or None where there are too few or the time does not suffice.

    Every network stops early on the share that it is blind to, which flatters it by the choice of one epoch.

    Args:
        settings: `max_seconds` is for all networks. seconds: that one network has just taken.
    """
    folds = deal_texts(trace, settings.calibration_folds, settings.seed)
    if len(folds) < 2 or settings.max_seconds < len(folds) * seconds:
        return None
    deadline, found = time.monotonic() + settings.max_seconds, []
    for fold in folds:
        others = sorted(set(range(len(trace.texts))) - set(fold))
        prepared = prepare(torch, trace, others, fold, embedding, settings)
        left = replace(settings, max_seconds=max(0.0, deadline - time.monotonic()))
        fitted, record = fit_network(torch, prepared.train, prepared.held, prepared.reduced, trace.depth, left, None)
        if record["out_of_time"]:
            return None
        found.append(evidence(torch, fitted, prepared.held, prepared.reduced, settings))
    return Evidence(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
