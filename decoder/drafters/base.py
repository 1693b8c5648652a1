"""What the decoding loop asks of a drafter, and the names under which drafters are found."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Drafter(Protocol):
    """Proposes the tokens after the root in one pass.

    The loop calls `start` once per request, `extend` with the target's hidden states of every newly committed token,
    and `draft` once per drafting round. A drafter keeps state only between `start` and the next `start`.
    """

    name: str
    block_size: int
    feature_layers: tuple[int, ...]

    def start(self) -> None:
        """Forget the last request."""

    def extend(self, features: torch.Tensor) -> None:
        """Take over committed tokens' hidden states, of shape (n, len(feature_layers) * hidden), in order."""

    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        """Logits of shape (block_size - 1, vocab), float32, for the tokens after the root.

        The root sits at position `context_tokens`, which must be the number of tokens given to `extend`.
        """

    def identity(self) -> dict[str, Any]:
        """What a trace or a profile records about this drafter."""
