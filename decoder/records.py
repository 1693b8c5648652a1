"""What a generation leaves behind: its tokens, and one record per round with the seconds of every stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STAGES = ("draft", "select", "verify", "commit", "other")


@dataclass(frozen=True)
class Round:
    """One round. `num_accepted` counts accepted nodes; `num_emitted` tokens kept of accepted + 1 (a text can end inside)."""

    context_tokens: int
    drafted: bool
    num_nodes: int
    num_accepted: int
    num_emitted: int
    draft_seconds: float
    select_seconds: float
    verify_seconds: float
    commit_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.draft_seconds + self.select_seconds + self.verify_seconds + self.commit_seconds + self.other_seconds

    @property
    def num_verify_tokens(self) -> int:
        """Rows the target forwarded: nodes and the root."""
        return self.num_nodes + 1


@dataclass
class Generation:
    """The outcome of one request: `token_ids` are the new tokens, a stop token included where one ended the text.

    The first token comes from the prompt's forward, so rates count the others over the rounds' seconds. `logits` stays
    empty unless the decoder keeps them: tensors (n, vocab) that together have a row for every token, or more.
    """

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    logits: list[Any] = field(default_factory=list, repr=False)

    @property
    def round_seconds(self) -> float:
        """Seconds of all rounds; the prompt's forward is not in it."""
        return sum(entry.seconds for entry in self.rounds)

    @property
    def num_round_tokens(self) -> int:
        """Tokens the rounds gave: all but the first."""
        return sum(entry.num_emitted for entry in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rounds per second of the rounds; 0 without rounds."""
        return self.num_round_tokens / self.round_seconds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a round gave, bonus included; 0 without rounds."""
        return self.num_round_tokens / len(self.rounds) if self.rounds else 0.0

    @property
    def mean_nodes(self) -> float:
        """Mean nodes verified per round, root not counted."""
        return sum(entry.num_nodes for entry in self.rounds) / len(self.rounds) if self.rounds else 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage, summed over the rounds."""
        return {stage: sum(getattr(entry, f"{stage}_seconds") for entry in self.rounds) for stage in STAGES}


class StageClock:
    """Seconds by stage of one round; the device is waited for at every boundary."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.begun = self.last = time.perf_counter()
        self.excluded = 0.0

    def stage(self, name: str) -> None:
        """Book the time since the last boundary as `name`."""
        self.synchronize()
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    def exclude(self) -> None:
        """Leave the time since the last boundary out (a caller's callback is not part of the round)."""
        now = time.perf_counter()
        self.excluded += now - self.last
        self.last = now

    def total(self) -> float:
        """Seconds of the round so far."""
        return self.last - self.begun - self.excluded
