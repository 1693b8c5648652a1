"""Captured forwards: padding, static inputs, refusals; a stand-in for CUDA graphs replays operations that were noted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from costmodel import CostModel
from costmodel.adaptive import AdaptivePlan
from costmodel.errors import SizeNotExecutable
from costmodel.measure import profile_backend
from decoder.backend import TransformersBackend
from decoder.cache import TreeCache
from decoder.errors import TargetError, UsageError
from decoder.graphs import DEFAULT_SIZES, CapturedForwards
from decoder.target import Target, TargetOutput
from tests.decoder.helpers import tiny_dflash, tiny_model, tiny_qwen3, tiny_target
from tests.decoder.tape import capture_on_tape

SIZES = (1, 2, 4, 8, 16)


def check_replays(target: Target, captured: CapturedForwards) -> TreeCache:
    """Graphs of two requests give what eager forwards give, for tokens they were not captured with; returns their cache."""
    device, prompt, cache = target.device, target.new_cache(), target.new_cache(num_requests=2)
    target.forward([3, 1, 4], range(3), prompt)
    prompt.commit_first(3)
    cache.copy_prefix(prompt, 3)
    captured.make_ready(4, cache)
    mask = torch.ones(2, 1, 4, 7, dtype=torch.bool, device=device).tril(3)
    positions = torch.arange(3, 7, device=device).repeat(2, 1)
    for seed in range(3):
        ids = torch.randint(0, 61, (2, 4), generator=torch.Generator().manual_seed(seed)).to(device)
        output = captured.forward(ids, positions, cache, mask)
        logits, features = output.logits.clone(), output.features
        expected = target.forward_batch(ids, positions, cache, mask)
        torch.testing.assert_close(logits, expected.logits)
        torch.testing.assert_close(features, expected.features)
    assert captured.num_replays == 3 and cache.store.written == 7
    return cache


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def backend(target: Target, monkeypatch: pytest.MonkeyPatch) -> TransformersBackend:
    """A captured backend on a CPU, whose graphs are stand-ins; the stand-in's own forwards are not counted as replays."""
    made = CapturedForwards(target, SIZES, capture_on_tape)
    monkeypatch.setattr("decoder.backend.CapturedForwards", lambda *_options: made)
    return TransformersBackend(target, tiny_dflash(target), mode="captured", captured_sizes=SIZES)


def test_a_cpu_is_refused_by_name(target: Target) -> None:
    with pytest.raises(UsageError, match="needs CUDA graphs.*cpu") as caught:
        TransformersBackend(target, None, mode="captured")
    assert "--mode eager" in str(caught.value.hint)
    with pytest.raises(UsageError, match="unknown mode"):
        TransformersBackend(target, None, mode="compiled")
    with pytest.raises(UsageError, match="positive"):
        CapturedForwards(target, [0, 2], capture_on_tape)


def test_sizes_are_padded_to_the_next_that_the_batch_shares(target: Target) -> None:
    captured = CapturedForwards(target, SIZES, capture_on_tape)
    assert [captured.padded(size, 1) for size in (1, 2, 3, 5, 16)] == [1, 2, 4, 8, 16]
    assert [captured.padded(size, 4) for size in (4, 5, 9)] == [4, 8, 16]
    for size, requests in ((17, 1), (3, 3)):
        with pytest.raises(SizeNotExecutable):
            captured.padded(size, requests)
    assert DEFAULT_SIZES[:5] == (1, 2, 4, 8, 16) and DEFAULT_SIZES[-1] == 512


def test_a_replay_computes_with_the_new_tokens(target: Target) -> None:
    """The tensors a graph reads are filled before every replay: other ids give what an eager forward gives for them."""
    target.set_feature_layers((0, 2))
    captured = CapturedForwards(target, SIZES, capture_on_tape)
    cache = check_replays(target, captured)
    cache.store.reserve(5000)  # the buffers move, so no graph over the old ones may be replayed
    captured.make_ready(4, cache)
    assert len(captured._graphs) == 1 and captured._buffers == (cache.store.keys.data_ptr(), id(cache))  # type: ignore[union-attr]


def test_what_cannot_be_captured_is_named(target: Target) -> None:
    def fail(function: Callable[[], TargetOutput]) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    captured, cache = CapturedForwards(target, SIZES, fail), target.new_cache()
    with pytest.raises(TargetError, match="nothing has been written"):
        captured.make_ready(2, cache)
    target.forward([3], [0], cache)
    with pytest.raises(TargetError, match="2 rows cannot be captured: CUDA error"):
        captured.make_ready(2, cache)


def test_a_captured_profile_steps_between_its_sizes(backend: TransformersBackend) -> None:
    plan = AdaptivePlan(max_verify_tokens=16, max_context_tokens=32, num_requests=(1, 4), samples=2, max_seconds=1.0)
    profile = profile_backend(backend, plan)
    assert profile.identity.mode == "captured" and profile.identity.engine.startswith("transformers-captured")  # type: ignore[union-attr]
    assert profile.executable_verify_tokens == SIZES and {cell.verify_tokens for cell in profile.verify} <= set(SIZES)
    cost = CostModel(profile)
    assert cost.verify_seconds(5, 1) == cost.verify_seconds(8, 1) and backend.num_target_forwards > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: real captures")
@pytest.mark.parametrize("make", [tiny_model, tiny_qwen3], ids=["llama", "qwen3"])
def test_real_cuda_graphs_compute_with_the_new_tokens(make: Callable[[], Any]) -> None:
    on_gpu = Target(make().to("cuda"), feature_layers=(0, 2))
    check_replays(on_gpu, CapturedForwards(on_gpu, SIZES))
