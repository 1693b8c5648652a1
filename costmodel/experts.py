"""How many experts of a mixture-of-experts layer t tokens wake: why such a layer's cost is concave in t."""

from __future__ import annotations

from typing import Any

import numpy as np


def expected_experts(verify_tokens: Any, num_experts: int, experts_per_token: float) -> Any:
    """Expected distinct experts that t tokens activate, E (1 - (1 - k/E)^t), for independent, uniform routing.

    Real tokens of one tree are alike and routing is skewed, so real numbers lie below; an effective k takes that up.
    t scalar or array (floats allowed); returns the same shape.
    """
    tokens = np.asarray(verify_tokens, dtype=float)
    experts = num_experts * -np.expm1(tokens * np.log1p(-min(experts_per_token / num_experts, 1.0 - 1e-12)))
    return float(experts) if experts.ndim == 0 else experts
