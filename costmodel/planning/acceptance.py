"""How much of a draft is accepted, from any of the forms in which engines and papers report it.

Everything becomes per-position survival: survival_i is the share of rounds in which the first i drafted tokens were all
accepted (unconditional). Impossible numbers raise ImpossibleAcceptance; positions nobody reported are unknown, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from costmodel.planning.errors import ImpossibleAcceptance

SLACK = 1e-9
NORMAL_90 = 1.645


@dataclass(frozen=True)
class Acceptance:
    """Survival per drafted position and where it came from.

    `siblings` are the shares with which the 2nd, 3rd ... candidate of a position is right where the first is wrong; empty
    for a chain. `num_rounds` is the number of rounds behind the figures, None for a number somebody typed.
    """

    survival: tuple[float, ...]
    source: str
    siblings: tuple[float, ...] = ()
    num_rounds: int | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        check_survival(self.survival)
        if self.num_rounds is not None and self.num_rounds < 1:
            raise ImpossibleAcceptance(f"num_rounds is {self.num_rounds}; what was measured comes from at least one round")
        if any(not 0 <= share <= 1 for share in self.siblings) or sum(self.siblings) > 1 + SLACK:
            raise ImpossibleAcceptance(
                f"sibling shares are {_list(self.siblings)}; each must lie in 0..1 and together they cannot exceed 1",
                hint="they share out the rounds in which the first candidate is wrong",
            )

    @property
    def conditional(self) -> tuple[float, ...]:
        """Pr(position i accepted given all before it were); 0 where nothing before it ever was."""
        before = (1.0, *self.survival[:-1])
        return tuple(now / earlier if earlier > 0 else 0.0 for now, earlier in zip(self.survival, before, strict=True))

    def relative_errors(self, max_nodes: int) -> list[float]:
        """`relative_error` of 0, 1 ... max_nodes nodes; it stays what it was beyond the last known position."""
        return [self.relative_error(number) for number in range(max_nodes + 1)]

    def relative_error(self, num_nodes: int) -> float:
        """Half-width of the 90 % interval of tokens per round at this budget, relative; 0 where num_rounds is unknown.

        Binomial: accepted tokens per round have mean sum S_i and second moment sum (2i - 1) S_i.
        """
        if self.num_rounds is None or num_nodes < 1:
            return 0.0
        known = self.survival[:num_nodes]
        mean = math.fsum(known)
        second = math.fsum((2 * i - 1) * value for i, value in enumerate(known, start=1))
        return NORMAL_90 * math.sqrt(max(second - mean**2, 0.0) / self.num_rounds) / (1.0 + mean)


def check_survival(survival: Sequence[float]) -> None:
    """Raise ImpossibleAcceptance for an empty list, a value outside 0..1 or a rise."""
    if not survival:
        raise ImpossibleAcceptance("survival is empty", hint="give one value per drafted position")
    before = 1.0
    for position, value in enumerate(survival, start=1):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ImpossibleAcceptance(f"survival at position {position} is {value:g}; it is a share and lies in 0..1")
        if value > before + SLACK:
            raise ImpossibleAcceptance(
                f"survival rises from {before:g} to {value:g} at position {position}; "
                "a token can only be accepted after all before it were",
                hint="numbers given the previous position go into --conditional",
            )
        before = value


def from_survival(values: Sequence[float], max_nodes: int) -> Acceptance:
    """Unconditional survival per position; a single p stands for p, p^2, p^3 ... up to `max_nodes`."""
    check_survival(values)
    if len(values) == 1:
        return Acceptance(_geometric(values[0], max_nodes), f"survival {values[0]:g} at every position, given the one before")
    return Acceptance(tuple(values[:max_nodes]), f"survival {_list(values)}")


def from_conditional(values: Sequence[float], max_nodes: int) -> Acceptance:
    """Acceptance of every position given that all before it were accepted; a single number holds for all positions."""
    for position, value in enumerate(values, start=1):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ImpossibleAcceptance(f"conditional acceptance at position {position} is {value:g}; it lies in 0..1")
    source = f"conditional acceptance {_list(values)}"
    if len(values) == 1:
        return Acceptance(_geometric(values[0], max_nodes), source)
    survival, product = [], 1.0
    for value in values[:max_nodes]:
        product *= value
        survival.append(product)
    return Acceptance(tuple(survival), source)


def from_length(length: float, num_drafted: int) -> Acceptance:
    """Mean acceptance length L (bonus token counted) with K drafted tokens: p^i with 1 + p + ... + p^K = L.

    Only the mean is known, so a constant conditional acceptance is the model; positions beyond K are unknown.
    """
    rate_from_length(length, num_drafted)
    p = rate_of_mean(length, num_drafted)
    note = f"one constant conditional acceptance, {p:.4f}, was solved from the length: the shape over positions is unknown"
    return Acceptance(_geometric(p, num_drafted), f"acceptance length {length:g} with {num_drafted} drafted", notes=(note,))


def from_rate(rate: float, num_drafted: int) -> Acceptance:
    """Acceptance rate as engines log it, accepted over drafted tokens: length = 1 + rate x K, then as from_length."""
    if not 0 <= rate <= 1:
        raise ImpossibleAcceptance(f"the acceptance rate is {rate:g}; accepted over drafted tokens lies in 0..1")
    found = from_length(1.0 + rate * num_drafted, num_drafted)
    return Acceptance(found.survival, f"acceptance rate {rate:g} with {num_drafted} drafted", notes=found.notes)


def from_lengths(lengths: Sequence[float]) -> Acceptance:
    """Mean acceptance lengths measured with 1, 2, 3 ... drafted tokens: survival_i is the step from i - 1 to i."""
    before, survival = 1.0, []
    for drafted, length in enumerate(lengths, start=1):
        step = length - before
        if step < -SLACK:
            raise ImpossibleAcceptance(
                f"acceptance length falls from {before:g} to {length:g} at {drafted} drafted tokens; a longer draft cannot lose",
                hint=f"measured curves do this where noise exceeds the gain: give the first {drafted - 1} values only",
            )
        survival.append(max(step, 0.0))
        before = length
    return Acceptance(tuple(survival), f"acceptance lengths {_list(lengths)}")


def from_counts(counts: Sequence[float], num_rounds: float, source: str = "accepted tokens per position") -> Acceptance:
    """Counts of accepted tokens per position and the number of drafts, as vLLM's counters keep them."""
    if not 1 <= num_rounds < math.inf:
        raise ImpossibleAcceptance(f"number of drafts is {num_rounds:g}, expected a number of at least 1")
    return Acceptance(tuple(count / num_rounds for count in counts), source, num_rounds=int(num_rounds))


def from_histogram(histogram: Sequence[float], source: str = "acceptance histogram") -> Acceptance:
    """Rounds by number of accepted drafted tokens, entry j for j accepted: survival_i = sum_{j >= i} / sum."""
    if len(histogram) < 2 or not all(0 <= count < math.inf for count in histogram) or not sum(histogram) > 0:
        raise ImpossibleAcceptance(f"histogram is {_list(histogram)}; expected counts of rounds with 0, 1, 2 ... accepted")
    counts = [sum(histogram[position:]) for position in range(1, len(histogram))]
    return from_counts(counts, sum(histogram), source)


def rate_from_length(length: float, num_drafted: int) -> float:
    """Acceptance rate (accepted over drafted) of a mean acceptance length, bonus counted: (L - 1) / K.

    The same length at another K is another rate, so rates of different budgets cannot be ranked. Raises
    ImpossibleAcceptance unless 1 <= L <= K + 1.
    """
    if num_drafted < 1:
        raise ImpossibleAcceptance(f"{num_drafted} drafted tokens; expected at least 1")
    if not 1 <= length <= num_drafted + 1 + SLACK:
        raise ImpossibleAcceptance(
            f"acceptance length {length:g} with {num_drafted} drafted tokens; it lies between 1 and {num_drafted + 1}",
            hint="the length counts the bonus token; --drafted counts proposed tokens, root excluded",
        )
    return (length - 1.0) / num_drafted


def rate_of_mean(length: float, num_drafted: int) -> float:
    """The p with 1 + p + ... + p^K = L, by bisection to 1e-12; 1 where L is K + 1 or more."""
    low, high = 0.0, 1.0
    if length >= num_drafted + 1:
        return 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if 1.0 + math.fsum(_geometric(middle, num_drafted)) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _geometric(p: float, num_positions: int) -> tuple[float, ...]:
    return tuple(p**position for position in range(1, num_positions + 1))


def _list(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:12])
    return shown + (" ..." if len(values) > 12 else "")
