"""The transformers backend does what the profiler times, and leaves its cache alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from costmodel.backend import Backend
from costmodel.measure import profile_backend
from costmodel.plan import MeasurePlan
from decoder.backend import TransformersBackend, random_tree
from decoder.errors import UsageError
from decoder.target import Target
from tests.decoder.helpers import RandomDrafter, TextDrafter, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


class AnywhereDrafter(RandomDrafter):
    """Random drafts after real features, counted."""

    feature_layers = (0, 2)

    def start(self) -> None:
        self.num_given = 0

    def extend(self, features: torch.Tensor) -> None:
        assert features.shape[1] == 64
        self.num_given += len(features)

    def draft(self, root_token: int, context_tokens: int) -> torch.Tensor:
        assert context_tokens == self.num_given
        return super().draft(root_token, context_tokens)


@pytest.mark.parametrize("num_slots", [1, 2, 5, 17, 64, 200])
def test_random_trees_are_trees(num_slots: int) -> None:
    tree = random_tree(num_slots, 7, 61, np.random.default_rng(num_slots))
    assert len(tree.parents) == num_slots and tree.max_depth <= 7
    for slot in range(1, num_slots):
        assert 0 <= tree.parents[slot] < slot and tree.depths[slot] == tree.depths[tree.parents[slot]] + 1
    assert num_slots < 17 or tree.max_depth >= 3


def test_stages_execute_what_was_asked(target: Target) -> None:
    backend = TransformersBackend(target, AnywhereDrafter(61))
    assert isinstance(backend, Backend)
    assert backend.identity.drafter == "random" and backend.identity.block_size == 5
    for context in (0, 40, 7, 100, 1):
        backend.prepare(context)
        assert backend.cache.length == context
        assert [backend.verify(size) for size in (1, 2, 9, 33)] == [1, 2, 9, 33]
        assert backend.draft() == 5 and backend.select(6) == 6 and backend.select(1) == 1
        assert [backend.commit(size) for size in (1, 3, 8)] == [1, 3, 8]
        assert backend.cache.length == context
    backend.synchronize()
    with pytest.raises(UsageError, match="one request"):
        backend.prepare(8, num_requests=2)


def test_the_context_is_the_same_text_at_every_length(target: Target) -> None:
    """A shorter context is the start of the longer one, and verifying there gives what a fresh forward gives."""
    backend = TransformersBackend(target, None)
    backend.prepare(30)
    backend.prepare(12)
    fresh = target.new_cache()
    target.forward(backend.tokens[:12], range(12), fresh)
    fresh.commit_first(12)
    expected = target.forward([5], [12], fresh).logits
    torch.testing.assert_close(target.forward([5], [12], backend.cache).logits, expected, rtol=1e-4, atol=1e-5)
    assert backend.draft() == 0 and backend.select(4) == 0


def test_profiling_end_to_end(target: Target) -> None:
    plan = MeasurePlan(verify_tokens=(1, 2, 4), context_tokens=(1, 16), select_nodes=(1, 4), commit_tokens=(1, 2), max_rounds=3)
    profile = profile_backend(TransformersBackend(target, AnywhereDrafter(61)), plan)
    assert {cell.verify_tokens for cell in profile.verify} == {1, 2, 4}
    assert {cell.stage for cell in profile.stages} == {"draft", "select", "commit"}
    assert all(cell.seconds > 0 for cell in [*profile.verify, *profile.stages])
    assert profile.identity.dtype == "float32"


def test_text_drafters_fit_too(target: Target) -> None:
    """Drafters that want features of other layers get those."""
    backend = TransformersBackend(target, TextDrafter(target, list(range(50)), check=False, feature_layers=(1,)))
    backend.prepare(20)
    assert backend.draft() == 6
