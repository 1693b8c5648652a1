"""What a selector counts while it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class SelectorStats:
    """Counters since the selector was made.

    Attributes:
        rounds, plain_steps: what was decoded. nan_rows: rows of logits with NaN. truncated: trees cut short by max_nodes or
        by the listed candidates. grown: rounds in which more candidates had to be listed. degenerate_cost: rounds on a flat
        cost curve. root_only: trees without a node. pauses: pauses in drafting. scored: rounds that went by the scorer;
        fallbacks: rounds that could not although there is one. drift_alarms: times the scorer was found to be off.
        out_of_range: rounds at contexts that the plan's trace does not cover.
    """

    rounds: int = 0
    plain_steps: int = 0
    nan_rows: int = 0
    truncated: int = 0
    grown: int = 0
    degenerate_cost: int = 0
    root_only: int = 0
    pauses: int = 0
    scored: int = 0
    fallbacks: int = 0
    drift_alarms: int = 0
    out_of_range: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain JSON types."""
        return asdict(self)
