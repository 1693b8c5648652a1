"""One network fitted: epochs until the log-loss on texts kept aside stops falling, the running mean of the weights kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from selector.scorer.groups import Groups, all_residuals, residuals_of
from selector.scorer.losses import LOG_SMALLEST, local_loss, reach_loss
from selector.scorer.network import ZERO_AT_START, shapes
from selector.scorer.settings import ScorerSettings

INPUT_INIT = 0.3  # of the layers after the token tables
GRADIENT_NORM = 1.0
FINAL_RATE = 0.02  # learning rate at the end, as a share of the first
Progress = Callable[[int, float], None]


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


def fit_network(
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
