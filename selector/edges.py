"""Where the edge probabilities of a round come from: the scorer, the calibration, or the drafter's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selector.calibration import Calibration
from selector.drift.alarm import DriftAlarm, DriftEvent, round_log_likelihoods
from selector.policies import Candidates
from selector.pool import CandidatePool
from selector.scoring import EdgeScorer, scored
from selector.tree import DraftTree
from selector.trellis import Trellis

SCORED, CALIBRATED, DRAFTED = "scored", "calibrated", "drafted"


class EdgeSource:
    """Gives a round's candidates their probabilities and falls back, scorer first, where one cannot be trusted.

    Without a root token, for a pool, or for a trellis that is path-conditioned already there is nothing to score; while
    the drift alarm is raised the scorer is not used, and only asked when the alarm checks it. Then the calibration is
    used, or, without one, the drafter's own numbers.
    """

    def __init__(
        self, calibration: Calibration | None = None, scorer: EdgeScorer | None = None, alarm: DriftAlarm | None = None
    ) -> None:
        self.calibration, self.scorer, self.alarm = calibration, scorer, alarm
        self.used = DRAFTED  # in the last round
        self._told = True  # the last round's tokens: without them a scorer that was put aside cannot be checked
        self._compared: tuple[Trellis, Trellis] | None = None  # the last round without the scorer and with it, for the alarm

    @property
    def is_drafted(self) -> bool:
        """Whether the last round went by the drafter's own numbers, normalised over the whole vocabulary."""
        return self.used == DRAFTED

    @property
    def asked_scorer(self) -> bool:
        """Whether the last round's edges were scored, be it only for the alarm to check the scorer."""
        return self._compared is not None

    @property
    def fell_back(self) -> bool:
        """Whether there is a scorer that the last round did not use."""
        return self.scorer is not None and self.used != SCORED

    def apply(self, candidates: Candidates, root_token: int) -> Candidates:
        """The candidates with the probabilities to search by."""
        self.used, self._compared = DRAFTED, None
        if isinstance(candidates, CandidatePool) or candidates.depth == 0:
            return candidates
        wanted = self.alarm is None or self.alarm.use_scorer or (self.alarm.wants_scores and self._told)
        if self.scorer is not None and wanted and root_token >= 0 and candidates.log_edges.ndim == 2:
            by_scorer = scored(self.scorer, candidates, root_token)
            self._compared = self._calibrated(candidates), by_scorer
            if self.alarm is None or self.alarm.use_scorer:
                self.used = SCORED
                return by_scorer
        self.used = DRAFTED if self.calibration is None else CALIBRATED
        return self._calibrated(candidates) if self._compared is None else self._compared[0]

    def _calibrated(self, drafted: Trellis) -> Trellis:
        if self.calibration is None:
            return drafted
        return replace(drafted, log_edges=self.calibration.apply(drafted.log_edges))

    def observe(self, tree: DraftTree, num_accepted: int, token_ids: Sequence[int] | None) -> DriftEvent | None:
        """Tell the alarm what came of the last round; returns what it has to say.

        Args:
            tree: of the last round. token_ids: committed in it, at most num_accepted + 1; without them only the number of
                accepted nodes is compared, and a scorer that was put aside is not checked again.
        """
        if self.alarm is None or self.scorer is None:
            return None
        self._told = token_ids is not None
        if self._compared is not None and token_ids is not None:
            instead, by_scorer = self._compared
            return self.alarm.observe(
                *round_log_likelihoods(by_scorer.log_edges, instead.log_edges, instead.token_ids, token_ids)
            )
        if self._compared is not None and self.used == SCORED:
            return self.alarm.observe_tree(tree, num_accepted, self._compared[0].token_ids, self._compared[0].log_edges)
        return self.alarm.observe_unscored()
