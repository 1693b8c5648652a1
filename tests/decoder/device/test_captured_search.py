"""What a CUDA graph asks of the search and of the scorer, seen on the operations, and on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decoder.device import CapturedSearch, search_on_device
from decoder.errors import UsageError
from selector.errors import PolicyError
from selector.scorer import Scorer
from selector.scoring import scored
from selector.search.expansion import expand
from selector.search.kernels import BUDGET, EXACT, FIRST_DESCENT, PRICED
from selector.tree import DraftTree
from selector.trellis import Trellis
from tests.decoder.helpers import assert_same_tree
from tests.decoder.tape import Tape, capture_on_tape
from tests.selector.random_scorers import VOCAB, make_scorer

REQUESTS, DEPTH, NODES, TOP_K = 3, 4, 20, 5
RTOL = 1e-4  # the missing mass of a row is a difference in float32
SHAPE = (REQUESTS, DEPTH, VOCAB)
RULES = {"fixed": BUDGET, "exact": EXACT, "priced": PRICED, "unimodal": FIRST_DESCENT}
on_every_policy = pytest.mark.parametrize("policy", RULES)
with_and_without = pytest.mark.parametrize("scorer", [None, make_scorer(np.random.default_rng(3))], ids=["drafted", "scored"])


def make_search(policy: str, scorer: Scorer | None, device: str = "cpu", capture: Any = capture_on_tape) -> CapturedSearch:
    curve = None if policy == "fixed" else torch.ones(NODES + 1, dtype=torch.float64)
    return CapturedSearch(SHAPE, NODES, policy, round_seconds=curve, top_k=TOP_K, scorer=scorer, device=device, capture=capture)


def fresh_round(seed: int) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    rng = np.random.default_rng(seed)
    curve = np.cumsum(rng.uniform(0.1, 1.0, NODES + 1)) + rng.uniform(1, 5)
    return (3 * rng.standard_normal(SHAPE)).astype(np.float32), rng.integers(0, VOCAB, REQUESTS), rng.uniform(0.1, 1.0), curve


def host_tree(logits: np.ndarray, root: int, price: float, curve: np.ndarray, policy: str, scorer: Scorer | None) -> DraftTree:
    trellis = Trellis.from_logits(logits, TOP_K)
    weighed = trellis if scorer is None else scored(scorer, trellis, root)
    return DraftTree.from_expansion(expand(weighed, NODES, RULES[policy], curve, price), "optimal", root)


@on_every_policy
@with_and_without
def test_replays_give_the_compiled_searchs_trees_for_what_comes_next(policy: str, scorer: Scorer | None) -> None:
    """What was noted on zeros is replayed on other logits, roots, prices and curves: nothing of the first was baked in."""
    search, sizes = make_search(policy, scorer), set()
    for seed in range(6):
        logits, roots, price, curve = fresh_round(seed)
        given = {} if policy == "fixed" else {"round_seconds": torch.from_numpy(curve)}
        trees = search(torch.from_numpy(logits), torch.from_numpy(roots), price, **given)
        for r, tree in enumerate(trees.to_trees()):
            expected = host_tree(logits[r], int(roots[r]), price, curve, policy, scorer)
            assert_same_tree(tree, expected, RTOL)
            slots = tree.num_verify_tokens
            np.testing.assert_array_equal(trees.attention_mask[r, :slots, :slots], expected.attention_mask())
            sizes.add(tree.num_nodes)
    assert policy == "fixed" or len(sizes) > 2


def test_what_is_not_given_stays() -> None:
    search = make_search("priced", None)
    logits, roots, price, curve = fresh_round(1)
    first = search(torch.from_numpy(logits), torch.from_numpy(roots), torch.tensor(price), torch.from_numpy(curve)).to_trees()
    search.logits.neg_().neg_()  # a drafter that writes its logits in place
    for found, expected in zip(search().to_trees(), first, strict=True):
        assert_same_tree(found, expected)
    with pytest.raises(UsageError, match="no round_seconds"):
        make_search("fixed", None)(round_seconds=torch.from_numpy(curve))


@on_every_policy
@with_and_without
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_waited_for_and_everything_stays_on_the_device(policy: str, scorer: Scorer | None, device: str) -> None:
    """Zero host synchronisations, counted; on "meta" there are no values to wait for, and a tensor of the host is seen."""
    logits, roots = torch.zeros(SHAPE, device=device), torch.zeros(REQUESTS, dtype=torch.int64, device=device)
    curve, price = torch.ones(NODES + 1, dtype=torch.float64, device=device), torch.ones((), dtype=torch.float64, device=device)
    target = torch.zeros(REQUESTS, NODES + 1, dtype=torch.int64, device=device)
    if scorer is not None:
        scorer._weights_on(torch, logits.device)  # before a capture, as CapturedSearch does
    with Tape(device) as tape:
        trees = search_on_device(logits, NODES, policy, curve, price, TOP_K, roots, scorer=scorer)
        trees.position_ids(roots)
        walked = trees.walk(target, DEPTH)[0]
    assert tape.found == [] and len(tape.steps) > 100
    assert trees.attention_mask.shape == (REQUESTS, NODES + 1, NODES + 1) and walked.shape == (REQUESTS, DEPTH + 1)


def test_the_tape_finds_what_a_capture_would_refuse() -> None:
    x, positive = torch.arange(4.0), torch.tensor([True, False, True, True])

    def store_by_mask() -> None:
        x.clone()[positive] = x[:3]

    refused = [lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[positive], lambda: x.nonzero(), lambda: torch.tensor(3),
               lambda: x.unique(), lambda: x.tolist(), lambda: torch.equal(x, x), store_by_mask]  # fmt: skip
    for function in refused:
        with pytest.raises(RuntimeError, match="cannot be captured"):
            capture_on_tape(function)
    with Tape("meta") as tape:
        torch.zeros(2)
    assert tape.found[0] == "aten.zeros.default on cpu"
    replay, out = capture_on_tape(lambda: x[torch.arange(2)] * 2)
    x.add_(10)
    replay()
    assert out.tolist() == [20, 22]


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(UsageError, match="needs CUDA graphs.*cpu"):
        CapturedSearch(SHAPE, NODES, device="cpu")
    with pytest.raises(PolicyError, match="round_seconds"):
        CapturedSearch(SHAPE, NODES, "exact", device="cpu", capture=capture_on_tape)
    with pytest.raises(PolicyError, match="root_tokens"):
        search_on_device(torch.zeros(SHAPE), NODES, scorer=make_scorer())


@on_every_policy
@with_and_without
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a real capture")
def test_a_real_cuda_graph_gives_the_compiled_searchs_trees(policy: str, scorer: Scorer | None) -> None:
    from decoder.capture import capture_cuda

    search = make_search(policy, scorer, "cuda", capture_cuda)
    for seed in range(6):
        logits, roots, price, curve = fresh_round(seed)
        given = {} if policy == "fixed" else {"round_seconds": torch.from_numpy(curve)}
        trees = search(torch.from_numpy(logits), torch.from_numpy(roots), price, **given).to_trees()
        for r, tree in enumerate(trees):
            assert_same_tree(tree, host_tree(logits[r], int(roots[r]), price, curve, policy, scorer), RTOL)
