"""Oracles, random trellises and synthetic traces for the selector's tests."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from selector.trace import Trace, TraceText
from selector.trellis import Trellis


def random_trellis(rng: np.random.Generator, depth: int, top_k: int, conditional: bool = False, coarse: bool = False) -> Trellis:
    """Random edge probabilities that leave some mass; `coarse` makes ties and zeros."""
    shape = (depth, top_k) if conditional else (depth,)
    p = rng.dirichlet(np.full(top_k + 1, 0.7), size=shape)[..., :top_k]
    if coarse:
        p = np.floor(p * 4) / 4
    ids = np.array([rng.permutation(3 * top_k)[:top_k] for _ in range(depth)]).reshape(depth, top_k)
    return Trellis.from_probabilities(ids, p)


def random_cost(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Positive seconds by number of nodes: convex, staircase, rough (not even monotone) or concave."""
    n = np.arange(size)
    if kind == "convex":
        return 0.5 + np.cumsum(np.sort(rng.random(size))) * rng.choice([0.02, 0.2])
    if kind == "staircase":
        return 0.5 + np.cumsum(rng.random(size) * rng.choice([0.0, 0.0, 1.0], size)) + 0.01 * (n == size - 1)  # never flat
    if kind == "concave":
        return 0.5 + rng.random() * np.sqrt(n)
    return 0.3 + rng.random(size) + 0.05 * n


COST_KINDS = ("convex", "staircase", "concave", "rough")


def all_nodes(trellis: Trellis) -> list[tuple[int, int, float]]:
    """Every node of the whole tree as (index of its parent or -1, depth, reach), parents first."""
    edges = np.exp(trellis.edges_by_parent)
    nodes: list[tuple[int, int, float]] = []
    frontier = [(-1, 0, 1.0)]  # parent index, column, reach of the parent
    for depth in range(trellis.depth):
        following = []
        for parent, column, reach in frontier:
            row = edges[depth, column if edges.shape[1] > 1 and depth > 0 else 0]
            for child in range(trellis.top_k):
                if row[child] > 0:
                    nodes.append((parent, depth + 1, reach * row[child]))
                    following.append((len(nodes) - 1, child, reach * row[child]))
        frontier = following
    return nodes


def best_sums(trellis: Trellis, max_nodes: int) -> np.ndarray:
    """Largest sum of reach of any prefix-closed tree of n nodes, n = 0.., by looking at every subset of nodes."""
    nodes = all_nodes(trellis)
    best = [0.0]
    for n in range(1, min(max_nodes, len(nodes)) + 1):
        closed = (
            subset
            for subset in combinations(range(len(nodes)), n)
            if all(nodes[i][0] < 0 or nodes[i][0] in subset for i in subset)
        )
        best.append(max(sum(nodes[i][2] for i in subset) for subset in closed))
    return np.array(best)


def markov_trace(
    num_texts: int = 12,
    length: int = 48,
    depth: int = 4,
    top_k: int = 4,
    vocab: int = 30,
    seed: int = 0,
    overconfident: float = 2.0,
) -> Trace:
    """Texts from a Markov chain and a drafter that knows it through noise that grows with depth, too sure of itself."""
    rng = np.random.default_rng(seed)
    texts = []
    transition = rng.permutation(vocab)
    for t in range(num_texts):
        prompt = int(rng.integers(3, 40))
        tokens = [int(rng.integers(vocab))]
        while len(tokens) < prompt + length:
            tokens.append(int(transition[tokens[-1]]) if rng.random() < 0.7 else int(rng.integers(vocab)))
        scores = rng.standard_normal((length, depth, vocab))
        for a in range(length):
            for d in range(depth):
                position = prompt + a + 1 + d
                if position < len(tokens):
                    scores[a, d, tokens[position]] += rng.normal(3.5 - 0.6 * d, 1.5)
        scores *= overconfident
        logprobs = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        ids = np.argsort(-logprobs, axis=2, kind="stable")[:, :, :top_k]
        texts.append(
            TraceText(
                f"text-{t}", ("math", "code")[t % 2], prompt, np.array(tokens, np.int32), ids.astype(np.int32),
                np.take_along_axis(logprobs, ids, axis=2).astype(np.float32),
            )
        )  # fmt: skip
    return Trace({"target": "toy", "drafter": "toy-drafter", "block_size": depth + 1, "dtype": "float32"}, texts)
