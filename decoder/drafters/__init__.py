"""Drafters: models that propose a block of tokens in one pass."""

from decoder.drafters.base import Drafter
from decoder.drafters.registry import find_drafter, load_drafter

__all__ = ["Drafter", "find_drafter", "load_drafter"]
