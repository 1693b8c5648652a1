"""Training a scorer on a trace: the TAPS losses, early stopping on texts kept aside, calibration on those."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.errors import ScorerError
from selector.scorer.calibration import fit_depth_calibration
from selector.scorer.groups import Groups, all_residuals, make_groups, residuals_of
from selector.scorer.inference import Weights
from selector.scorer.lazy import import_torch
from selector.scorer.losses import LOG_SMALLEST, local_loss, reach_loss
from selector.scorer.network import ZERO_AT_START, shapes
from selector.scorer.samples import collect
from selector.scorer.scorer import IDENTITY_FIELDS, Scorer
from selector.scorer.settings import ScorerSettings
from selector.trace import Trace

MIN_TEXTS = 4
PCA_ROWS = 20_000  # tokens of the vocabulary that the components are found from
INPUT_INIT = 0.3  # of the layers after the token tables
GRADIENT_NORM = 1.0
FINAL_RATE = 0.02  # learning rate at the end, as a share of the first
RECORDED = (*IDENTITY_FIELDS, "dtype", "prompts_sha256", "num_prompts")
Progress = Callable[[int, float], None]


def principal_components(embedding: NDArray[np.floating], count: int, seed: int = 0) -> tuple[NDArray, NDArray]:
    """Mean (H,) and components (H, r) of the embedding, scaled to variance lambda^(1/2) per component, total r."""
    vocab = len(embedding)
    chosen = np.random.default_rng(seed).choice(vocab, PCA_ROWS, replace=False) if vocab > PCA_ROWS else np.arange(vocab)
    rows = np.asarray(embedding[np.sort(chosen)], np.float32)
    mean = rows.mean(axis=0)
    values, vectors = np.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    values, vectors = np.maximum(values[::-1][:count], 1e-12), vectors[:, ::-1][:, :count]
    scale = values**-0.25
    return mean, (vectors * (scale / np.sqrt(np.mean(values**0.5)))).astype(np.float32)


def split_texts(trace: Trace, settings: ScorerSettings) -> tuple[list[int], list[int]]:
    """Indices of texts to train on and to keep aside, every data set in both where it has enough texts."""
    rng = np.random.default_rng(settings.seed)
    order = sorted(rng.permutation(len(trace.texts)).tolist(), key=lambda i: trace.texts[i].dataset or "")
    aside = max(1, round(settings.validation_share * len(order)))
    picked = {order[int((j + 0.5) * len(order) / aside)] for j in range(aside)}
    return [i for i in range(len(order)) if i not in picked], sorted(picked)


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
    table = np.asarray(embedding)
    usable = _usable(trace, table)
    parts = [usable.select(indices) for indices in split_texts(usable, settings)]
    samples = [collect(part, settings.top_k, settings.sharpening) for part in parts]
    mean, basis = principal_components(table, min(settings.embedding_components, table.shape[1]), settings.seed)
    tokens = np.unique(np.concatenate([np.append(s.token_ids[s.token_ids >= 0], s.roots) for s in samples]))
    reduced = torch.from_numpy(((table[tokens].astype(np.float32) - mean) @ basis).astype(np.float32)).to(settings.device)
    train, held = (make_groups(torch, s, p, tokens, settings) for s, p in zip(samples, parts, strict=True))
    best, record = _fit(torch, train, held, reduced, usable.depth, settings, progress)
    weights = _weights(torch, best, held, reduced, (table, mean, basis), settings)
    known = {name: trace.identity[name] for name in RECORDED if name in trace.identity} if identity is None else dict(identity)
    record |= {"settings": asdict(settings), "num_texts": [len(part.texts) for part in parts]}
    record["num_groups"] = [len(s.label) for s in samples]
    record["soft_labels"] = samples[0].soft is not None and settings.soft_share > 0
    return Scorer(weights, settings.top_k, known, record)


def _usable(trace: Trace, table: NDArray[Any]) -> Trace:
    """The texts that a round can start in; raises ScorerError for too few, or an embedding that does not hold their tokens."""
    usable = trace.select(i for i, text in enumerate(trace.texts) if text.num_anchors >= 2)
    if len(usable.texts) < MIN_TEXTS:
        raise ScorerError(
            f"a scorer needs at least {MIN_TEXTS} texts of two generated tokens or more, the trace has {len(usable.texts)}",
            hint="record a trace over more prompts",
        )
    highest = max(int(max(text.token_ids.max(), text.draft_token_ids.max())) for text in usable.texts)
    if table.ndim != 2 or highest >= len(table):
        raise ScorerError(f"the embedding must be (vocab, hidden) with a row for token {highest}, got shape {table.shape}")
    return usable


def _weights(
    torch: Any,
    fitted: Mapping[str, Any],
    held: Groups,
    reduced: Any,
    embedding: tuple[NDArray, NDArray, NDArray],
    settings: ScorerSettings,
) -> Weights:
    """The scorer's arrays: token tables projected for the whole vocabulary, calibration fitted on the held-out groups."""
    placed = {name: value.to(settings.device) for name, value in fitted.items()}
    residuals = all_residuals(torch, placed, held, reduced)
    known = [x.cpu().numpy() for x in (held.drafted, residuals, held.label, held.depth, held.weight)]
    calibration = fit_depth_calibration(known[0], known[1], known[2], known[3], known[4], len(fitted["scale"]))
    arrays = {name: value.numpy() for name, value in fitted.items()}
    table, mean, basis = embedding
    tables = [_project(table, mean, basis @ arrays.pop(f"{role}_projection")) for role in ("parent", "child")]
    return Weights(tables[0], tables[1], **arrays, **calibration)


def _project(table: NDArray[np.floating], mean: NDArray, matrix: NDArray) -> NDArray[np.float32]:
    """(V, d) token table, rounded to float16 as the file holds it."""
    rows = [(table[i : i + 8192].astype(np.float32) - mean) @ matrix for i in range(0, len(table), 8192)]
    return np.concatenate(rows).astype(np.float16).astype(np.float32)


def _start(torch: Any, num_components: int, depth: int, settings: ScorerSettings) -> dict[str, Any]:
    """Parameters before training: those in ZERO_AT_START are zero, so that the network is the drafter's marginals."""
    generator = torch.Generator().manual_seed(settings.seed)
    sizes = shapes(settings.token_features, settings.hidden, depth)
    sizes |= {name: (num_components, settings.token_features) for name in ("parent_projection", "child_projection")}
    made = {}
    for name, size in sizes.items():
        value = torch.zeros(size) if name in ZERO_AT_START else torch.randn(size, generator=generator) / size[0] ** 0.5
        value = value * (INPUT_INIT if name.endswith("_in") else 1.0)
        made[name] = value.to(settings.device).requires_grad_(True)
    return made


def _optimiser(torch: Any, weights: Mapping[str, Any], num_steps: int, settings: ScorerSettings) -> tuple[Any, Any]:
    """AdamW with weight decay on matrices only, and a cosine schedule over all steps."""
    biases = [w for name, w in weights.items() if w.ndim == 1 or name in ("depth_bias", "none_hidden")]
    matrices = [w for name, w in weights.items() if not (w.ndim == 1 or name in ("depth_bias", "none_hidden"))]
    parts = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(parts, lr=settings.learning_rate)
    return optimiser, torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps, settings.learning_rate * FINAL_RATE)


def _fit(
    torch: Any, train: Groups, held: Groups, reduced: Any, depth: int, settings: ScorerSettings, progress: Progress | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Epochs until held-out log-loss stops falling; best weights (on the CPU) and the record."""
    began = time.monotonic()
    torch.manual_seed(settings.seed)
    weights = _start(torch, reduced.shape[1], depth, settings)
    anchors = torch.nonzero(train.count > 0)[:, 0].cpu()
    steps = max(1, -(-len(anchors) // settings.batch_anchors))
    num_epochs = max(1, min(settings.max_epochs, settings.max_steps // steps))
    optimiser, schedule = _optimiser(torch, weights, steps * num_epochs, settings)
    mean = {name: value.detach().clone() for name, value in weights.items()}  # what is judged and kept
    losses = [held_out_loss(torch, mean, held, reduced)]
    best, best_epoch, epoch, late = _copy(mean), 0, 0, False
    while epoch < num_epochs and epoch - best_epoch < settings.patience and not late:
        epoch += 1
        for batch in anchors[torch.randperm(len(anchors))].split(settings.batch_anchors):
            loss = _step_loss(torch, weights, train, batch.to(settings.device), reduced, settings)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(weights.values()), GRADIENT_NORM)
            optimiser.step()
            schedule.step()
            for name, value in weights.items():
                mean[name].lerp_(value.detach(), 1.0 - settings.averaging)
            late = time.monotonic() - began > settings.max_seconds
            if late:
                break
        losses.append(held_out_loss(torch, mean, held, reduced))
        if losses[-1] < losses[best_epoch]:
            best, best_epoch = _copy(mean), epoch
        if progress is not None:
            progress(epoch, losses[-1])
    record = {"held_out_log_loss": losses, "best_epoch": best_epoch, "epochs": epoch, "out_of_time": late}
    return best, record | {"seconds": round(time.monotonic() - began, 2)}


def _copy(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in weights.items()}


def _step_loss(torch: Any, weights: Mapping[str, Any], groups: Groups, batch: Any, reduced: Any, settings: ScorerSettings) -> Any:
    """Both losses on all groups of some anchors, per unit of weight."""
    level = torch.arange(int(groups.count.max()), device=batch.device)
    mask = level < groups.count[batch][:, None]
    index = (groups.start[batch][:, None] + level)[mask]
    log_q = torch.log_softmax(groups.drafted[index] + residuals_of(torch, weights, groups, index, reduced, settings.dropout), -1)
    loss = settings.kl_weight * local_loss(torch, log_q, groups.labels[index])
    if settings.reach_weight > 0:
        loss = loss + settings.reach_weight * reach_loss(torch, log_q, groups.label[index], mask)
    weight = groups.weight[index]
    return (weight * loss).sum() / weight.sum().clamp(min=1e-9)


def held_out_loss(torch: Any, weights: Mapping[str, Any], groups: Groups, reduced: Any) -> float:
    """Weighted mean log-loss (nats) of the true token, or none of these, over all groups."""
    log_q = torch.log_softmax(groups.drafted + all_residuals(torch, weights, groups, reduced), -1)
    chosen = log_q.gather(1, groups.label[:, None])[:, 0].clamp(min=LOG_SMALLEST)
    return -float((groups.weight * chosen).sum()) / max(float(groups.weight.sum()), 1e-9)
