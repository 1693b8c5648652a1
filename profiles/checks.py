"""Checks of numbers that come from files and callers: true and false are none, and there is an end to what is believable."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

LARGEST = 10**9  # tokens, requests, samples: more is a mistake


def is_whole(value: Any, least: float = 0, most: float = math.inf) -> TypeGuard[int]:
    """Whether a value is an int from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any, least: float) -> TypeGuard[float]:
    """Whether a value is an int or a float, finite and at least `least`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf
