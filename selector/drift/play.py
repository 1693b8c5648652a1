"""The drift alarm replayed: rounds of a trace decoded as live, on scored edges while it trusts them and on drafted ones else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selector.drift.alarm import DriftAlarm, DriftEvent
from selector.price import ReachScale
from selector.reliability import log_losses
from selector.replaying.orders import Orders
from selector.replaying.rounds import Curves, Rounds
from selector.scorer.samples import Samples
from selector.scoring import EdgeScorer, score_chunks


@dataclass(frozen=True, eq=False)
class AlarmPlay:
    """What came of texts decoded one after the other under one alarm.

    Attributes:
        text_seconds, text_tokens: (T,) as in `Rounds`, in the order of the trace. num_rounds: in all; num_scored: those whose
            tree was built on the scorer's edges; num_asked: those whose edges were scored, be it only to check.
        events: what the alarm said, in order.
    """

    text_seconds: NDArray[np.float64]
    text_tokens: NDArray[np.int64]
    num_rounds: int
    num_scored: int
    num_asked: int
    events: list[DriftEvent]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all texts over seconds of all rounds; 0 without any round."""
        seconds = float(self.text_seconds.sum())
        return float(self.text_tokens.sum()) / seconds if seconds > 0 else 0.0

    @property
    def fallbacks(self) -> list[int]:
        """Rounds (from 1) at which the alarm fell back."""
        return [event.round for event in self.events if event.kind == "fell_back"]


def scored_rows(scorer: EdgeScorer, samples: Samples) -> NDArray[np.float64]:
    """(G, k) log edges that a scorer gives to the children of every reached prefix; `samples` collected with its top_k."""
    anchor, parts = samples.group_anchor, []
    for chunk, edges in score_chunks(scorer, samples.token_ids, samples.log_probs, samples.roots):
        own = slice(*np.searchsorted(anchor, [chunk.start, chunk.stop]))  # groups are in the order of their anchors
        parts.append(edges[anchor[own] - chunk.start, samples.group_depth[own], samples.parent_column[own]])
    return np.concatenate(parts) if parts else np.zeros((0, samples.token_ids.shape[2]))


def gains_by_depth(rows: NDArray[np.float64], base: NDArray[np.float64], samples: Samples) -> NDArray[np.float64]:
    """(A, depth + 1) nats by which `rows` foresaw the first n tokens of every anchor's path better than `base`, at n.

    With n = accepted + 1 it is the difference of the two that `alarm.round_log_likelihoods` gives for that round.

    Args:
        rows, base: (G, k) log edges of the groups, such as `scored_rows` and drafted log-probabilities.
    """
    gains = np.zeros((len(samples.hits), samples.hits.shape[1] + 1))
    difference = log_losses(base, samples.label) - log_losses(rows, samples.label)
    gains[samples.group_anchor, samples.group_depth + 1] = difference
    return gains.cumsum(axis=1)


def round_gains(rounds: Rounds, gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """(R,) nats of every round that was played."""
    return gains[rounds.visited, np.minimum(rounds.accepted + 1, gains.shape[1] - 1)]  # type: ignore[no-any-return]


def play_with_alarm(
    scored: Orders,
    drafted: Orders,
    curves: Curves,
    scoring_seconds: float,
    gains: NDArray[np.float64],
    alarm: DriftAlarm,
    text_order: Sequence[int] | None = None,
    reach_scale: float = 1.0,
) -> AlarmPlay:
    """Decode with `exact`, its tree from the edges that the alarm allows, the alarm told of every round's tokens.

    Args:
        scored, drafted: the same anchors searched by the scorer's edges, and by what is used instead. curves: of a round
            without scoring; a round that asks the scorer takes `scoring_seconds` more.
        gains: from `gains_by_depth`. alarm: lives on from text to text, as in one process. text_order: default the trace's.
    """
    seconds, counts, events = np.zeros(drafted.num_texts), np.zeros(3, np.int64), []
    scale, depth = ReachScale(reach_scale), drafted.ranks.shape[1]
    for text in range(drafted.num_texts) if text_order is None else text_order:
        anchor, last = int(drafted.text_starts[text]), int(drafted.text_starts[text + 1]) - 1
        while anchor < last:
            uses, asks = alarm.use_scorer, alarm.wants_scores
            orders = scored if uses else drafted
            cost = curves.table[curves.bucket[anchor]] + (scoring_seconds if asks else 0.0)
            phi, sizes = orders.phi[anchor], slice(int(orders.sizes[anchor]) + 1)
            if curves.flat:  # as the policy does
                nodes = min(depth, int(orders.sizes[anchor]), orders.max_nodes)
            else:
                nodes = int(np.argmax((1.0 / scale.value + phi[sizes]) / cost[sizes]))
            hits = int((orders.ranks[anchor] < nodes).cumprod().sum())
            scale.observe(hits, float(phi[nodes]))
            event = alarm.observe(gains[anchor, min(hits + 1, depth)], 0.0) if asks else alarm.observe_unscored()
            events += [event] if event is not None else []
            seconds[text] += cost[nodes]
            counts += (1, uses, asks)
            anchor += hits + 1
    num_rounds, num_scored, num_asked = counts.tolist()
    return AlarmPlay(seconds, drafted.num_tokens, num_rounds, num_scored, num_asked, events)
