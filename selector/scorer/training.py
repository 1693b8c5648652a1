"""Training a scorer on a trace: the TAPS losses, early stopping on texts kept aside, calibration on texts not learned from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.errors import ScorerError
from selector.scorer.calibration import fit_depth_calibration
from selector.scorer.crossfit import blind_evidence, evidence
from selector.scorer.fitting import Progress, fit_network
from selector.scorer.inference import Weights
from selector.scorer.lazy import import_torch
from selector.scorer.preparing import ReducedEmbedding, prepare, split_texts
from selector.scorer.scorer import IDENTITY_FIELDS, Scorer
from selector.scorer.settings import ScorerSettings
from selector.trace import Trace

MIN_TEXTS = 4
CALIBRATED_ASIDE, CALIBRATED_BLIND = "the texts kept aside", "every text, by networks that did not see it"
RECORDED = (*IDENTITY_FIELDS, "dtype", "prompts_sha256", "num_prompts")


def train_scorer(
    trace: Trace,
    embedding: ArrayLike,
    settings: ScorerSettings | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Scorer:
    """Train a scorer on a trace of prompts that the drafter was not trained on.

    Args:
        trace: with or without the target's own distributions; without them labels are the tokens of its texts.
        embedding: (vocab, hidden) the target's token embedding.
        identity: of the scorer; default the trace's target, drafter, block size and prompts.
        progress: called after every epoch with its number and the held-out log-loss (nats per group).

    Raises:
        ScorerError: fewer than 4 texts of two generated tokens, tokens outside the embedding, no torch.
    """
    torch = import_torch("training a scorer")
    settings = settings or ScorerSettings()
    deadline = time.monotonic() + settings.max_seconds
    table = np.asarray(embedding)
    usable, reduced = _usable(trace, table), ReducedEmbedding.of(table, settings)
    train, aside = split_texts(usable, settings)
    prepared = prepare(torch, usable, train, aside, reduced, settings)
    fitted, record = fit_network(torch, prepared.train, prepared.held, prepared.reduced, usable.depth, settings, progress)
    left = replace(settings, max_seconds=max(0.0, deadline - time.monotonic()))
    blind = blind_evidence(torch, usable, reduced, left, record["seconds"])
    known = evidence(torch, fitted, prepared.held, prepared.reduced, settings) if blind is None else blind
    calibration = fit_depth_calibration(known.drafted, known.residuals, known.label, known.depth, known.weight, usable.depth)
    if identity is None:
        identity = {name: trace.identity[name] for name in RECORDED if name in trace.identity}
    record |= {"settings": asdict(settings), "num_texts": [len(usable.texts) - len(aside), len(aside)]}
    record["num_groups"] = [len(s.label) for s in prepared.samples]
    record["soft_labels"] = prepared.samples[0].soft is not None and settings.soft_share > 0
    record["calibrated_on"] = CALIBRATED_ASIDE if blind is None else CALIBRATED_BLIND
    return Scorer(_weights(fitted, calibration, reduced), settings.top_k, dict(identity), record)


def _usable(trace: Trace, table: NDArray[Any]) -> Trace:
    """The texts that a round can start in, one per prompt; ScorerError for too few, or an embedding without their tokens."""
    usable = trace.with_rounds().without_repeats()
    if len(usable.texts) < MIN_TEXTS:
        raise ScorerError(
            f"a scorer needs at least {MIN_TEXTS} texts of two generated tokens or more, the trace has {len(usable.texts)}",
            hint="record a trace over more prompts",
        )
    highest = max(int(max(text.token_ids.max(), text.draft_token_ids.max())) for text in usable.texts)
    if table.ndim != 2 or highest >= len(table):
        raise ScorerError(f"the embedding must be (vocab, hidden) with a row for token {highest}, got shape {table.shape}")
    if not np.isfinite(table).all():
        raise ScorerError("the embedding holds values that are not finite")
    return usable


def _weights(
    fitted: Mapping[str, Any], calibration: Mapping[str, NDArray[np.float32]], embedding: ReducedEmbedding
) -> Weights:
    """The scorer's arrays, its token tables projected for the whole vocabulary."""
    arrays = {name: value.numpy() for name, value in fitted.items()}
    tables = [embedding.project(arrays.pop(f"{role}_projection")) for role in ("parent", "child")]
    return Weights(tables[0], tables[1], **arrays, **calibration)
