"""Trees that yield the most tokens per second: trellis, search, policies, traces, replay and tuning."""

from __future__ import annotations

from selector.calibration import Calibration
from selector.plan import Plan
from selector.policies import Policy
from selector.pool import CandidatePool
from selector.registry import POLICY_NAMES, parse_policy
from selector.replaying.replay import Replay, replay
from selector.selector import TreeSelector
from selector.trace import Trace, TraceText
from selector.tracewriter import TraceWriter
from selector.tree import DraftTree
from selector.trellis import Trellis
from selector.tune import tune

__all__ = [
    "POLICY_NAMES",
    "Calibration",
    "CandidatePool",
    "DraftTree",
    "Plan",
    "Policy",
    "Replay",
    "Trace",
    "TraceText",
    "TraceWriter",
    "TreeSelector",
    "Trellis",
    "parse_policy",
    "replay",
    "tune",
]
