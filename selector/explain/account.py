"""What one round was: its tree, what every node was thought to be worth, what came of it, and what was left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class NodeAccount:
    """One candidate of the round, in the tree or left out.

    Attributes:
        path: the tokens from the root down, this one last. slot: in the tree, None if left out.
        place: in the order of reach, from 1; None beyond what was searched.
        edge_probability: Pr(accept it | its parent reached). reach: Pr(the walk visits it).
        marginal_seconds: by how much it makes the round longer, coming next in the order.
        gain: tokens it is expected to bring (scale x reach) less what those seconds are worth at the price.
        accepted: whether the target says the same tokens from the root down to it.
        why: for one left out, the reason.
    """

    path: tuple[int, ...]
    slot: int | None
    place: int | None
    edge_probability: float
    reach: float
    marginal_seconds: float
    gain: float
    accepted: bool
    why: str | None = None

    @property
    def token_id(self) -> int:
        """The token itself."""
        return self.path[-1]

    @property
    def depth(self) -> int:
        """1 for a child of the root."""
        return len(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"token_id": self.token_id, "depth": self.depth, **asdict(self)}


@dataclass(frozen=True)
class Divergence:
    """Where the target left the tree: its own next token, and why that was no node.

    `listed` says whether the drafter proposed it there; `place`, `reach` and `gain` are then those of the node it would
    have been (None beyond what was searched); `why` is a sentence. Of a text that ends here `token_id` is None.
    """

    depth: int
    token_id: int | None
    listed: bool
    place: int | None
    reach: float | None
    gain: float | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """One round accounted for.

    Attributes:
        key, text_index, anchor: which place of the trace. round_number: which round of its text, where that was asked for.
        context_tokens: cached before the round. root_token_id: slot 0. context_token_ids: the last tokens before the root.
        policy, status: as in the tree. price: tokens per second that a second is charged; price_from: where it comes from.
        reach_scale: accepted over expected nodes that was assumed. edges: "scored", "calibrated" or "drafted".
        round_seconds: what the round costs. plain_seconds: a plain step. expected_tokens: of the round, scaled.
        committed_token_ids: what the round yields: accepted nodes and the bonus token.
        nodes: the tree by slot. left_out: the next candidates in the order of reach. siblings: beside every node of the
        target's path (and where it left the tree) the best candidates left out.
        divergence: where the target left the tree. provenance: of the profile. identity: of the trace. what_if: fields in
        which trace and profile differ, as {field: [trace, profile]}. notes: what else is to be known.
    """

    key: str
    text_index: int
    anchor: int
    round_number: int | None
    context_tokens: int
    context_token_ids: list[int]
    root_token_id: int
    policy: str
    status: str
    price: float
    price_from: str
    reach_scale: float
    edges: str
    round_seconds: float
    plain_seconds: float
    expected_tokens: float
    committed_token_ids: list[int]
    nodes: list[NodeAccount]
    left_out: list[NodeAccount]
    siblings: list[NodeAccount]
    divergence: Divergence
    provenance: str
    identity: dict[str, Any] = field(default_factory=dict)
    what_if: dict[str, list[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        """Accepted nodes."""
        return sum(node.accepted for node in self.nodes)

    @property
    def token_ids(self) -> set[int]:
        """Every token that is named, for a tokenizer to spell."""
        named = {self.root_token_id, *self.committed_token_ids, *self.context_token_ids}
        named |= {token for node in (*self.nodes, *self.left_out, *self.siblings) for token in node.path}
        return named if self.divergence.token_id is None else named | {self.divergence.token_id}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, schema treebudget.explain."""
        document = {"schema": "treebudget.explain", "version": 1, **asdict(self)}
        for name in ("nodes", "left_out", "siblings"):
            document[name] = [node.to_dict() for node in getattr(self, name)]
        return {**document, "num_nodes": len(self.nodes), "num_accepted": self.num_accepted}
