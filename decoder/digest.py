"""A digest of a model's weights from a sample of each, so that two targets of one name are told apart."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

VALUES_PER_TENSOR = 256


@torch.no_grad()
def weights_sha256(model: nn.Module) -> str:
    """The sha256 over name, shape and at most 256 evenly spread values of every parameter, in hex.

    A sample, so that it takes milliseconds: it tells models that were trained apart, not a few changed values. Values are
    rounded to bfloat16, so that a model has one digest in whatever dtype it is loaded.
    """
    digest, samples = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // VALUES_PER_TENSOR)][:VALUES_PER_TENSOR].to(torch.bfloat16))
    if samples:
        digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
