"""Whether drafting pays at all: compares what drafting rounds and plain steps yield, pauses drafting and probes again."""

from __future__ import annotations

from dataclasses import dataclass

from selector.price import RunningRatio


@dataclass(frozen=True)
class PauseSettings:
    """How cautious the pause is; counts are rounds or plain steps."""

    min_draft_rounds: int = 8  # before the first verdict
    compare_steps: int = 4  # plain steps tried before drafting is paused on a suspicion
    compare_every: int = 64  # drafting rounds between two such trials
    suspicion: float = 1.10  # try plain steps where drafting yields less than this times what the profile says of plain
    margin: float = 1.0  # drafting must yield more than this times what plain steps yield
    first_pause: int = 32
    longest_pause: int = 1024
    probe_rounds: int = 4  # drafting rounds that end a pause


class DraftingPause:
    """State machine: drafting -> comparing (a few plain steps) -> paused -> probing -> drafting, with back-off.

    A pause doubles each time its probe finds drafting still too slow, so that probing costs a vanishing share of time.
    """

    def __init__(self, settings: PauseSettings | None = None) -> None:
        self.settings = settings or PauseSettings()
        self.state = "drafting"
        self.num_pauses = 0
        self._left = 0  # steps or rounds left in this state
        self._next_pause = self.settings.first_pause
        self._since_compare = self.settings.compare_every
        self._draft = RunningRatio(half_life=48.0)
        self._plain = RunningRatio(half_life=48.0)

    @property
    def drafts(self) -> bool:
        """Whether the next round should draft."""
        return self.state in ("drafting", "probing")

    def observe_round(self, num_tokens: int, seconds: float, plain_seconds: float) -> None:
        """Take in a drafting round; `plain_seconds` is what the profile says of a plain step at that context."""
        self._draft.add(num_tokens, seconds)
        self._since_compare += 1
        if self.state == "probing":
            self._left -= 1
            if self._left <= 0:
                self._judge()
        elif self.state == "drafting" and self._draft.count >= 0.9 * self.settings.min_draft_rounds:
            expected = 1.0 / plain_seconds if plain_seconds > 0 else 0.0
            known = self._plain.value
            suspect = max(expected, known or 0.0) * self.settings.suspicion
            slow = self._draft.value is not None and self._draft.value < suspect
            if slow and self._since_compare > self.settings.compare_every:
                self._enter("comparing", self.settings.compare_steps)
                self._since_compare = 0

    def observe_plain(self, seconds: float) -> None:
        """Take in a plain step."""
        self._plain.add(1.0, seconds)
        if self.state == "comparing":
            self._left -= 1
            if self._left <= 0:
                self._judge()
        elif self.state == "paused":
            self._left -= 1
            if self._left <= 0:
                self._enter("probing", self.settings.probe_rounds)

    def _judge(self) -> None:
        draft, plain = self._draft.value, self._plain.value
        if draft is None or plain is None or draft > plain * self.settings.margin:
            self._next_pause = self.settings.first_pause
            self._enter("drafting", 0)
            return
        self._enter("paused", self._next_pause)
        self._draft.fade(0.25)  # what the text was like before a pause says little about after it
        self.num_pauses += 1
        self._next_pause = min(2 * self._next_pause, self.settings.longest_pause)

    def _enter(self, state: str, left: int) -> None:
        self.state, self._left = state, left
