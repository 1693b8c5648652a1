"""One tree forward equals one causal forward per path, and cousins do not see each other."""

from __future__ import annotations

import numpy as np
import torch

from decoder.sampling import Sampling, TokenChooser
from decoder.target import Target
from decoder.verify import verify_tree
from tests.decoder.helpers import PlainTree, text_logits, tiny_target

CONTEXT = [3, 17, 5, 40, 2]
TREE = PlainTree([9, 4, 6, 8, 1, 7], [-1, 0, 0, 1, 2, 3])


def tree_logits(target: Target, tree: PlainTree) -> torch.Tensor:
    cache = target.new_cache()
    target.forward(CONTEXT, range(len(CONTEXT)), cache)
    cache.commit_first(len(CONTEXT))
    return target.forward(tree.token_ids, tree.position_ids(len(CONTEXT)), cache, tree.attention_mask()).logits


def path_tokens(tree: PlainTree, slot: int) -> list[int]:
    tokens = []
    while slot >= 0:
        tokens.append(int(tree.token_ids[slot]))
        slot = int(tree.parents[slot])
    return tokens[::-1]


def test_every_slot_equals_its_own_text() -> None:
    target = tiny_target()
    logits = tree_logits(target, TREE)
    for slot in range(len(TREE.parents)):
        alone = text_logits(target, CONTEXT + path_tokens(TREE, slot))[-1]
        torch.testing.assert_close(logits[slot], alone, rtol=1e-4, atol=1e-4)


def test_a_sibling_changes_nothing_for_its_cousins() -> None:
    """Case 18, bit for bit in float32."""
    target = tiny_target()
    other = PlainTree([9, 50, 6, 8, 1, 7], TREE.parents.tolist())
    before, after = tree_logits(target, TREE), tree_logits(target, other)
    untouched, touched = [0, 2, 4], [1, 3, 5]
    assert torch.equal(before[untouched], after[untouched])
    assert all((before[slot] - after[slot]).abs().max() > 1e-3 for slot in touched)


def test_commit_then_continue_equals_the_text() -> None:
    """After a path is committed, the next forward sees exactly the text, at the right positions."""
    target = tiny_target(layers=2)
    target.set_feature_layers((1,))
    cache = target.new_cache(8)
    target.forward(CONTEXT, range(len(CONTEXT)), cache)
    cache.commit_first(len(CONTEXT))
    target.forward(TREE.token_ids, TREE.position_ids(len(CONTEXT)), cache, TREE.attention_mask())
    cache.commit([0, 2, 4])
    text = [*CONTEXT, 9, 6, 1, 33]
    logits = target.forward([33], [8], cache).logits[0]
    torch.testing.assert_close(logits, text_logits(target, text)[-1], rtol=1e-4, atol=1e-4)


def test_verified_tokens_and_features() -> None:
    target = tiny_target()
    target.set_feature_layers((0, 2))
    cache = target.new_cache()
    target.forward(CONTEXT, range(len(CONTEXT)), cache)
    cache.commit_first(len(CONTEXT))
    first = int(text_logits(target, [*CONTEXT, 9])[-1].argmax())
    second = int(text_logits(target, [*CONTEXT, 9, first])[-1].argmax())
    wrong = (second + 1) % 61
    tree = PlainTree([-1, (first + 1) % 61, first, wrong], [-1, 0, 0, 2])
    verified = verify_tree(target, cache, tree, 9, TokenChooser(Sampling()))
    assert verified.slots == [0, 2] and verified.token_ids == [first, second] and verified.num_accepted == 1
    assert verified.features is not None and verified.features.shape == (2, 64)
    assert tree.token_ids[0] == -1, "the caller's tree is not written to"
    whole = target.forward([*CONTEXT, 9, first], range(7), target.new_cache()).features
    assert whole is not None
    np.testing.assert_allclose(verified.features.numpy(), whole[-2:].numpy(), rtol=1e-3, atol=1e-4)
