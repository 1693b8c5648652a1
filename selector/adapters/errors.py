"""What can go wrong between our trees and other engines' layouts."""

from __future__ import annotations

from profiles.errors import TreebudgetError


class AdapterError(TreebudgetError):
    """Arrays of another engine are no tree, contradict each other, or a tree does not fit the engine's layout."""
