from __future__ import annotations

import numpy as np

from costmodel import CostModel, Identity, Profile
from costmodel.planning import Memory, Pricer


def profile(scale: float = 1.0, requests: tuple[int, ...] = (1,), rule: str = "total_tokens", slope: float = 0.4) -> Profile:
    """A machine whose forward costs 20 ms + slope x tokens + cache reads per request, drafting 3 ms."""
    sizes, contexts = [1, 2, 4, 8, 16, 32, 64, 128, 256], [0, 1024, 8192]
    rows = [
        (t, c, r, scale * 1e-3 * (20 + slope * t + r * c / 2000)) for r in requests for c in contexts for t in sizes if t >= r
    ]
    tokens, context, batch, seconds = (np.array(column) for column in zip(*rows, strict=True))
    identity = Identity(device="NVIDIA H100", target="Qwen/Qwen3-8B", dtype="bfloat16", block_size=16)
    made = Profile.from_points(tokens, seconds, context, batch, draft_seconds=3e-3 * scale, identity=identity)
    return Profile(**{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "requests_rule": rule})


def pricer(name: str = "p", **options) -> Pricer:
    return Pricer(name, CostModel(profile(**options)))


NO_LIMIT = Memory(None, None, None, unknown="test")
