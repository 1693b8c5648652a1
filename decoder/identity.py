"""What a measurement on a target here is a measurement of: the `costmodel.Identity` of a loaded target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from decoder.attention import ATTENTION_NAME
from profiles.paths import cpu_name

if TYPE_CHECKING:
    from decoder.target import Target


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def target_identity(target: Target, drafter: Any = None, mode: str = "eager") -> Any:
    """Identity of `target` run in `mode` (eager or captured), and of `drafter` where one is given."""
    import transformers

    from costmodel.identity import Identity

    return Identity(
        device=device_name(target.device),
        target=target.name,
        model_shape=dict(target.shape),
        dtype=str(target.dtype).removeprefix("torch."),
        quantization="none",
        attention=ATTENTION_NAME,
        engine=f"transformers-{mode}" if target.linear == "default" else f"transformers-{mode}-{target.linear}",
        engine_version=transformers.__version__,
        mode=mode,
        tensor_parallel=target.tensor_parallel,
        num_threads=torch.get_num_threads() if target.device.type == "cpu" else None,
        drafter=None if drafter is None else drafter.name,
        block_size=None if drafter is None else int(drafter.block_size),
    )
