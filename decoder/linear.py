"""Forms of the target's linear layers, by name: the same products, computed another way.

On a CPU, products with few rows spend more time laying out the weights than multiplying: `torch.nn.functional.linear`
repacks them at every call. `prepacked` lets oneDNN lay them out once, after loading, which makes a forward of 1 to 32 rows
two to four times cheaper (docs/results.md) at the price of a second copy of the embedding where it is tied to the head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from decoder.errors import UsageError

LinearForm = Callable[[nn.Module], None]
"""Rewrites a loaded model's linear layers in place, once, after loading."""

PACKED_ROWS = 16  # the number of rows oneDNN picks the layout for; within noise, any from 1 to 32 gives the same layout


class PackedLinear(nn.Module):
    """A frozen linear layer over weights that oneDNN has laid out once; CPU, float32 or bfloat16, no gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.packed, self.bias, "none", [], "")


def can_prepack(weight: torch.Tensor) -> bool:
    """True where oneDNN is built in and multiplies this dtype on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def keep_layers(model: nn.Module) -> None:
    """The layers as transformers made them."""


def prepack_layers(model: nn.Module) -> None:
    """Replace every linear layer by a `PackedLinear`; UsageError where this processor or dtype has no such form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if not can_prepack(child.weight):
                    raise UsageError(f"linear layers cannot be prepacked for {child.weight.dtype} on {child.weight.device}: "
                                     "that needs a CPU build with oneDNN and float32 or bfloat16")
                setattr(parent, name, PackedLinear(child))


LINEAR_FORMS: dict[str, LinearForm] = {"default": keep_layers, "prepacked": prepack_layers}


def resolve_linear_form(model: nn.Module, name: str) -> str:
    """`auto` means prepacked where that is possible, else default; other names stay, unknown ones raise UsageError."""
    if name == "auto":
        weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
        return "prepacked" if weights and all(can_prepack(weight) for weight in weights) else "default"
    if name not in LINEAR_FORMS:
        raise UsageError(f"unknown form of linear layers {name!r}: allowed are auto, {', '.join(sorted(LINEAR_FORMS))}")
    return name


def apply_linear_form(model: nn.Module, name: str) -> str:
    """Apply the form called `name` and return which one was taken."""
    name = resolve_linear_form(model, name)
    LINEAR_FORMS[name](model)
    return name
