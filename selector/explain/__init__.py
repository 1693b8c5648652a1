"""One round drawn: the tree, what its nodes were worth, what came of it, what was left out and why."""

from __future__ import annotations

from selector.explain.account import Divergence, Explanation, NodeAccount
from selector.explain.errors import ExplainError
from selector.explain.explain import explain

__all__ = ["Divergence", "ExplainError", "Explanation", "NodeAccount", "explain"]
