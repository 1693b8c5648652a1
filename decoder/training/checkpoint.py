"""Checkpoints without pickle: weights and optimiser moments as safetensors, the rest as JSON in its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from decoder.training.errors import TrainingError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write everything that resuming needs; the old checkpoint stays until the new one is whole."""
    tensors = {f"model/{name}": tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimiser.state.get(parameter, {}).items():
            if moment in MOMENTS:
                tensors[f"optimiser/{name}/{moment}"] = torch.as_tensor(value, dtype=torch.float32).contiguous()
    partial = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial, metadata={"state": json.dumps(state)})
    partial.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, identity: dict[str, Any]) -> dict[str, Any]:
    """Restore a checkpoint of the same run and return its state; a run of another identity, or a damaged one, is refused."""
    try:
        return _load(path, model, optimiser, identity)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # cut off, changed, or of another shape
        raise TrainingError(f"{path} cannot be used: {' '.join(str(error).split())}", hint="delete it to start anew") from error


def _load(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, identity: dict[str, Any]) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        state = json.loads((file.metadata() or {}).get("state", "{}"))
        for name, expected in identity.items():
            if state.get("identity", {}).get(name) != expected:
                raise TrainingError(f"{path}: field {name} is {state.get('identity', {}).get(name)!r}, this run has {expected!r}",
                                    hint="use another --work folder, or delete the checkpoint to start anew")
        names = set(file.keys())
        model.load_state_dict({name.removeprefix("model/"): file.get_tensor(name) for name in names if name.startswith("model/")})
        for name, parameter in model.named_parameters():
            moments = {m: file.get_tensor(f"optimiser/{name}/{m}") for m in MOMENTS if f"optimiser/{name}/{m}" in names}
            if moments:
                optimiser.state[parameter] = moments
    missing = {"step", "seconds", "history"} - set(state)
    if missing:
        raise KeyError(f"its state lacks {', '.join(sorted(missing))}")
    return state  # type: ignore[no-any-return]
