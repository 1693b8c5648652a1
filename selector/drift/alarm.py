"""The drift alarm: says when a scorer does worse than the draft's probabilities, and when it may be used again.

The draft's are those that would be used instead of the scorer's: calibrated where the plan has a calibration.
Every round tells what the target said after each accepted node, so the scorer and the draft can be compared by the
likelihood they gave to it. Were the scorer's chances exactly right, the product over rounds of (draft's likelihood over
scorer's) would be a martingale of mean 1. They are not, and the rounds of one text go wrong together; so that ratio is
raised to an exponent below 1, at which its mean is still at most 1 for a scorer that is merely better (it exists: the
adjustment coefficient of Lundberg and Cramer; the central condition of Gruenwald and Mehta 2020, JMLR 21(56)).
The cumulative-sum test (Page 1954) on it that fires at log ratio h has a mean time between false alarms of at least
exp(h) rounds (Lorden 1971, Theorem 2). Coming back is the same test turned round, once per check (Ville's inequality):
if the draft's chances are right, it happens with probability at most exp(-proof).

Live, per drafting round: score if `wants_scores`; build the tree on the scorer's edges if `use_scorer`; then `observe`
the two of `round_log_likelihoods` (or `observe_tree`), or `observe_unscored`. An event's `text` is for the user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selector.errors import ScorerError
from selector.tree import DraftTree

LOG_SMALLEST = -23.0  # likelihood of what was held impossible, 1e-10
MISSING_FLOOR = 1e-5  # some chance is always left to what is not listed, as in the scorer


@dataclass(frozen=True)
class DriftSettings:
    """How sure the alarm wants to be; counts are drafting rounds.

    `exponent` was found on prompts for tuning, on texts kept from the scorer (`drift.study.critical_exponent`: 0.45 for
    blocks of 64 rounds, 0.75 for whole texts, 1.4 if rounds were independent). At 1, scorers that were better by 0.4 nats
    a round were put aside for one odd text. The number of rounds between false alarms holds where rounds are no more alike
    than there: texts that differ more from each other need a smaller exponent.
    """

    rounds_between_false_alarms: float = 100_000.0
    exponent: float = 0.5  # share of the nats against the scorer that counts
    largest_step: float = 1.0  # nats one round may count against the scorer: one odd text is no drift
    first_pause: int = 128
    longest_pause: int = 8192
    check_rounds: int = 64  # scored but not used, at the end of a pause
    proof: float = 3.0  # nats by which the scorer must be better in a check to be used again

    def __post_init__(self) -> None:
        """Check; raises ScorerError."""
        counts = (self.first_pause, self.longest_pause, self.check_rounds)
        if not 1 < self.rounds_between_false_alarms < math.inf or not all(1 <= count < math.inf for count in counts):
            raise ScorerError(f"drift settings: counts must be at least 1 and rounds between alarms above 1, got {self}")
        if not all(0 < value < math.inf for value in (self.largest_step, self.proof)):
            raise ScorerError(f"drift settings: largest_step and proof must be above 0, got {self}")
        if not 0 < self.exponent <= 1:
            raise ScorerError(f"drift settings: the exponent must lie in (0, 1], got {self.exponent}")


@dataclass(frozen=True)
class DriftEvent:
    """The alarm changed its mind: `kind` is "fell_back" or "came_back", `text` says it in a sentence."""

    kind: str
    round: int
    nats_per_round: float  # log-likelihood of the scorer less the draft's, over the rounds the verdict rests on
    text: str


class DriftAlarm:
    """State machine: using -> paused (the draft's probabilities) -> checking (scored, not used) -> using or paused.

    Pauses double each time a check fails. The caller scores rounds only while `wants_scores`.
    """

    def __init__(self, settings: DriftSettings | None = None) -> None:
        self.settings = settings or DriftSettings()
        self.state = "using"
        self.num_rounds = 0
        self.num_alarms = 0
        self._threshold = math.log(self.settings.rounds_between_false_alarms)
        self._sum = 0.0  # evidence against the scorer while using; for it while checking
        self._since = 0  # rounds that evidence is from
        self._total = 0.0  # log-likelihood of the scorer less the draft's over those rounds
        self._pause = self.settings.first_pause

    @property
    def use_scorer(self) -> bool:
        """Whether trees may be built on the scorer's edges."""
        return self.state == "using"

    @property
    def raised(self) -> bool:
        """Whether the scorer is not to be trusted now."""
        return not self.use_scorer

    @property
    def wants_scores(self) -> bool:
        """Whether the next round should be scored, be it only to check."""
        return self.state != "paused"

    def observe(self, scorer_log_likelihood: float, raw_log_likelihood: float) -> DriftEvent | None:
        """Take in one round (see `round_log_likelihoods`); returns an event if the state changed between using and not."""
        if self.state == "paused":
            return self.observe_unscored()
        gain = scorer_log_likelihood - raw_log_likelihood
        if math.isnan(gain):
            gain = -self.settings.largest_step  # a scorer that yields NaN is no scorer
        self.num_rounds += 1
        self._since += 1
        self._total += gain
        return self._while_using(gain) if self.state == "using" else self._while_checking(gain)

    def observe_tree(
        self, tree: DraftTree, num_accepted: int, drafted_ids: NDArray[np.int64], drafted_log_probs: NDArray[np.float64]
    ) -> DriftEvent | None:
        """`observe` where only a round's tree, chosen on the scorer's edges, and its number of accepted nodes are at hand."""
        return self.observe(*accepted_log_likelihoods(tree, num_accepted, drafted_ids, drafted_log_probs))

    def observe_unscored(self) -> DriftEvent | None:
        """Take in a round that was not scored."""
        self.num_rounds += 1
        if self.state == "paused":
            self._since += 1
            if self._since >= self._pause:
                self._enter("checking")
        return None

    def _while_using(self, gain: float) -> DriftEvent | None:
        self._sum += self.settings.exponent * min(-gain, self.settings.largest_step)
        if self._sum <= 0:
            self._sum, self._since, self._total = 0.0, 0, 0.0
        if self._sum < self._threshold:
            return None
        rounds, worse = self._since, -self._total / self._since
        text = (
            f"the scorer predicts the target worse than the draft's probabilities, by {worse:.3f} nats per round over "
            f"the last {rounds} rounds: it is not used for the next {self._pause} rounds and a check of "
            f"{self.settings.check_rounds} after them (were these prompts unlike those it was trained on? train it on a trace of "
            "such prompts: selector tune)"
        )
        event = DriftEvent("fell_back", self.num_rounds, -worse, text)
        self.num_alarms += 1
        self._enter("paused")
        return event

    def _while_checking(self, gain: float) -> DriftEvent | None:
        self._sum += min(gain, self.settings.largest_step)
        if self._since < self.settings.check_rounds:
            return None
        rounds, better, proven = self._since, self._total / self._since, self._sum >= self.settings.proof
        if not proven:
            self._pause = min(2 * self._pause, self.settings.longest_pause)
            self._enter("paused")
            return None
        self._pause = self.settings.first_pause
        self._enter("using")
        text = f"the scorer is used again: better than the draft's probabilities by {better:.3f} nats over {rounds} rounds"
        return DriftEvent("came_back", self.num_rounds, better, text)

    def _enter(self, state: str) -> None:
        self.state, self._sum, self._since, self._total = state, 0.0, 0, 0.0


def round_log_likelihoods(
    scorer_edges: NDArray[np.float64],
    raw_log_probs: NDArray[np.float64],
    token_ids: NDArray[np.int64],
    target_tokens: Sequence[int],
) -> tuple[float, float]:
    """Log-likelihood of what the target said in one round: by the scorer's edges, and by the draft's probabilities.

    Args:
        scorer_edges: (depth, k, k) log edges. raw_log_probs, token_ids: (depth, k or more), cut to k.
        target_tokens: the round's committed tokens after the root: the accepted ones and the target's own next token.

    A token that is not listed ends the round's evidence as "none of these"; both sides share the same k candidates.
    """
    k = scorer_edges.shape[2]
    scorer, raw, parent = 0.0, 0.0, 0
    for depth, token in enumerate(target_tokens[: scorer_edges.shape[0]]):
        own, drafted = scorer_edges[depth, parent], raw_log_probs[depth, :k]
        column = -1
        for c in range(k):
            if token_ids[depth, c] == token and drafted[c] > -math.inf:
                column = c
        scorer += _log_chance(own, column)
        raw += _log_chance(drafted, column)
        if column < 0:
            break
        parent = column
    return scorer, raw


def accepted_log_likelihoods(
    tree: DraftTree, num_accepted: int, drafted_ids: NDArray[np.int64], drafted_log_probs: NDArray[np.float64]
) -> tuple[float, float]:
    """Log-likelihood of the number of accepted nodes, by the tree's reach and by the draft's probabilities on the same tree.

    Pr(at least n accepted) is the sum of reach over the nodes of depth n. It needs no tokens, and says less than
    `round_log_likelihoods` does.

    Args:
        tree: chosen on the scorer's edges. drafted_ids, drafted_log_probs: (depth, K) the draft's own.
    """
    reach = np.ones(len(tree.parents))
    for slot in range(1, len(reach)):
        depth = int(tree.depths[slot]) - 1
        columns = np.flatnonzero(drafted_ids[depth] == tree.token_ids[slot])
        edge = math.exp(drafted_log_probs[depth, columns[0]]) if len(columns) else 0.0
        reach[slot] = reach[tree.parents[slot]] * edge
    size = num_accepted + 2  # more accepted than the tree is deep has a chance of 0
    chances = [np.bincount(tree.depths, values, size) for values in (np.asarray(tree.reach, float), reach)]
    exact = [at_least[num_accepted] - (at_least[num_accepted + 1 :][:1].sum()) for at_least in chances]
    return max(math.log(max(exact[0], 1e-300)), LOG_SMALLEST), max(math.log(max(exact[1], 1e-300)), LOG_SMALLEST)


def _log_chance(row: NDArray[np.float64], column: int) -> float:
    """Log-probability of one candidate, or of none of them (column -1), never below LOG_SMALLEST."""
    if column >= 0:
        return max(float(row[column]), LOG_SMALLEST)
    return math.log(max(1.0 - float(np.exp(row).sum()), MISSING_FLOOR))
