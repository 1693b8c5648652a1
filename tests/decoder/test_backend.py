"""The transformers backend does what the profiler times, and leaves its cache alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from costmodel.adaptive import AdaptivePlan
from costmodel.backend import Backend
from costmodel.errors import ConstantTokens, NoVerifyCalls, RowsMismatch
from costmodel.measure import profile_backend
from costmodel.plan import MeasurePlan
from costmodel.planning.memory import Memory
from decoder.backend import TransformersBackend, random_tree
from decoder.batchdraft import BatchDrafts
from decoder.batchverify import TreeSource, batch_mask, verify_trees
from decoder.errors import TargetError, UsageError
from decoder.sampling import Sampling, TokenChooser
from decoder.target import Target
from decoder.verify import accept
from tests.decoder.helpers import RandomDrafter, TextDrafter, tiny_dflash, tiny_target

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
EXPERTS = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRID = MeasurePlan(verify_tokens=(4, 8), context_tokens=(1, 16), select_nodes=(4,), commit_tokens=(1, 2), max_rounds=3)


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


@pytest.mark.parametrize(("num_requests", "context", "slots"), [(1, 9, 4), (3, 9, 1), (3, 9, 6), (4, 0, 5)])
def test_a_batch_says_what_its_requests_say_alone(target: Target, num_requests: int, context: int, slots: int) -> None:
    """The oracle of batched verification: every request's logits and walk, one forward each."""
    source, chooser = TreeSource(5, 61, np.random.default_rng(3)), TokenChooser(Sampling())
    prompt = [int(token) for token in np.random.default_rng(4).integers(0, 61, context)]
    alone, batch = target.new_cache(), target.new_cache(num_requests=num_requests)
    if context:
        target.forward(prompt, range(context), alone)
        alone.commit_first(context)
        batch.copy_prefix(alone, context)
    trees = source.trees(slots, num_requests)
    kept: list[torch.Tensor] = []

    def forward(*arguments: object) -> object:
        output = target.forward_batch(*arguments)  # type: ignore[arg-type]
        kept.append(output.logits)
        return output

    before = target.num_rows, target.num_forwards
    walks = verify_trees(target, batch, trees, chooser, forward)  # type: ignore[arg-type]
    assert (target.num_rows - before[0], target.num_forwards - before[1]) == (num_requests * slots, 1)
    logits = kept[0].unflatten(0, (num_requests, slots))
    for tree, rows, walk in zip(trees, logits, walks, strict=True):
        single = target.forward(tree.token_ids, tree.position_ids(context), alone, tree.attention_mask()).logits
        torch.testing.assert_close(rows, single, rtol=1e-4, atol=1e-4)
        assert walk == accept(tree, rows, chooser)[0]


def test_a_mask_shows_context_and_ancestors_only() -> None:
    trees = TreeSource(3, 61, np.random.default_rng(0)).trees(5, 2)
    mask = batch_mask(trees, 3)
    assert mask is not None and mask.shape == (2, 1, 5, 8) and bool(mask[..., :3].all())
    assert np.array_equal(mask[1, 0, :, 3:].numpy(), trees[1].attention_mask())


def test_batches_execute_what_was_asked(target: Target) -> None:
    backend = TransformersBackend(target, tiny_dflash(target))
    for context, requests in ((0, 3), (40, 3), (7, 1), (30, 4)):
        backend.prepare(context, requests)
        assert (backend.cache.length, backend.cache.num_requests) == (context, requests)
        assert [backend.verify(size * requests) for size in (1, 2, 9)] == [requests, 2 * requests, 9 * requests]
        assert backend.draft() == 5 and backend.draft(2) == 2 and backend.draft(10) == 10
        assert len(backend.logits) == requests and backend.logits[0].shape == (4, 61)
        assert backend.select(4 * requests + 1) == 4 * requests + 1 and backend.select(1) == 1
        assert [backend.commit(size) for size in (1, 3, 8)] == [1, 3, 8]
        assert backend.cache.length == context and backend.drafter is not None and backend.drafter.block_size == 5
    for size in (3, 6):
        with pytest.raises(UsageError, match="shared evenly by 4"):
            backend.verify(size)
    with pytest.raises(UsageError, match="context 513 is beyond"):
        backend.prepare(513)


def test_joint_drafts_are_the_single_drafts(target: Target) -> None:
    features = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    single, drafter = tiny_dflash(target), tiny_dflash(target)
    joint = BatchDrafts(drafter, 3)
    joint.extend(features[:9], once=True)
    joint.extend(features[9:])
    together = joint.draft([5, 6, 7])
    assert joint.joint and len(together) == 3
    for root, logits in zip((5, 6, 7), together, strict=True):
        single.start()
        single.extend(features)
        torch.testing.assert_close(logits, single.draft(root, 12), rtol=1e-4, atol=1e-4)


def test_the_batch_is_a_dimension_of_the_profile(target: Target) -> None:
    """Chosen adaptively: both ends and, since a tiny model's forward costs more with more rows, what lies between."""
    plan = AdaptivePlan(max_verify_tokens=16, max_context_tokens=64, num_requests=(1, 2, 4), samples=2, max_seconds=2.0)
    profile = profile_backend(TransformersBackend(target, tiny_dflash(target)), plan)
    assert {1, 4} <= {cell.num_requests for cell in profile.verify} <= {1, 2, 4}
    assert all(cell.verify_tokens % cell.num_requests == 0 for cell in profile.verify)
    drafts = {(cell.size, cell.context_tokens, cell.num_requests) for cell in profile.stages if cell.stage == "draft"}
    assert {(size, context, requests) for size in (2, 5, 10) for context in (1, 64) for requests in (1, 4)} <= drafts
    assert {cell.stage for cell in profile.stages if cell.num_requests == 4} == {"draft", "select", "commit"}


def test_a_drafter_without_a_batched_form_says_so(target: Target) -> None:
    plan = MeasurePlan(verify_tokens=(4,), context_tokens=(16,), num_requests=(2,), select_nodes=(4,), max_rounds=3)
    profile = profile_backend(TransformersBackend(target, RandomDrafter(61)), plan)
    assert any("r calls in a row" in note for note in profile.notes)


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), Qwen3Config(**SHAPE, head_dim=8), Qwen3MoeConfig(**SHAPE, **EXPERTS)],
                         ids=["llama", "qwen3", "qwen3-moe"])
def test_any_architecture_from_its_configuration(config, tmp_path) -> None:
    """A folder with nothing but config.json is profiled; so is the file itself."""
    config.save_pretrained(tmp_path / "shape-1.5b")
    for place in (tmp_path / "shape-1.5b", tmp_path / "shape-1.5b" / "config.json"):
        backend = TransformersBackend(str(place), None, dtype="float32", random_weights=True)
        assert backend.identity.target == "shape-1.5b" and backend.identity.model_shape is not None
    assert backend.identity.model_shape.get("experts", 0) == getattr(config, "num_experts", 0)
    plan = MeasurePlan(verify_tokens=(1, 4), context_tokens=(1, 8), num_requests=(1, 4), max_rounds=3)
    profile = profile_backend(backend, plan)
    assert {(cell.verify_tokens, cell.num_requests) for cell in profile.verify} == {(1, 1), (4, 1), (4, 4)}


def test_known_configurations_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from decoder.randomweights import read_config

    config = read_config("Qwen/Qwen3-30B-A3B")
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("qwen3_moe", 48, 128)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    for unknown, what in (("nobody/nothing", "hub cannot be reached"), ("./nowhere", "no configuration at")):
        with pytest.raises(TargetError, match=what) as caught:
            Target.load(unknown, random_weights=True)
        assert "config.json" in str(caught.value.hint)


@pytest.fixture(scope="module")
def experts() -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **EXPERTS), dtype=torch.float32), name="experts")


def test_token_ids_are_drawn_anew_for_every_call(experts: Target) -> None:
    backend = TransformersBackend(experts, None)
    backend.prepare(4, 2)
    seen = []
    for _ in range(3):
        backend.verify(16)
        assert backend.verify_token_ids is not None and len(backend.verify_token_ids) == 16
        seen.append(backend.verify_token_ids.tolist())
    assert seen[0] != seen[1] != seen[2] and len(set(seen[0])) > 2


def constant(backend: TransformersBackend) -> None:
    trees = backend.source.trees
    backend.source.trees = lambda *size: [_same(tree) for tree in trees(*size)]  # type: ignore[method-assign]


def _same(tree):
    tree.token_ids[:] = 7
    return tree


def cached(backend: TransformersBackend) -> None:
    backend._run = lambda trees: sum(tree.num_verify_tokens for tree in trees)  # type: ignore[method-assign]


def short(backend: TransformersBackend) -> None:
    trees = backend.source.trees
    backend.source.trees = lambda slots, requests: trees(max(slots - 1, 1), requests)  # type: ignore[method-assign]


@pytest.mark.parametrize(("spoil", "error"), [(constant, ConstantTokens), (cached, NoVerifyCalls), (short, RowsMismatch)])
def test_the_checks_against_being_fooled_are_live(experts: Target, spoil: Callable, error: type[Exception]) -> None:
    """Each spoiled engine is the real one with one thing changed; unspoiled it passes."""
    backend = TransformersBackend(experts, None)
    profile_backend(backend, GRID)
    spoil(backend)
    with pytest.raises(error):
        profile_backend(backend, GRID)


def test_the_note_on_unbatched_drafts_outlives_the_last_place(target: Target) -> None:
    """The reference point, of one request, is measured last; the drafts of two were no less calls in a row."""
    plan = MeasurePlan(verify_tokens=(4,), context_tokens=(16,), num_requests=(1, 2), select_nodes=(4,), max_rounds=3)
    notes = profile_backend(TransformersBackend(target, RandomDrafter(61)), plan).notes
    assert sum("r calls in a row" in note for note in notes) == 1
    alone = profile_backend(TransformersBackend(target, RandomDrafter(61)), GRID).notes
    assert not any("calls in a row" in note for note in alone)


def test_a_mixture_of_experts_says_how_wide_its_experts_are(experts: Target) -> None:
    assert experts.shape["expert_intermediate"] == EXPERTS["moe_intermediate_size"]
    memory = Memory.of(experts.identity(), gpu_bytes=1e9)
    assert memory.weights_bytes == pytest.approx(4 * sum(parameter.numel() for parameter in experts.model.parameters()), rel=0.02)


@pytest.mark.parametrize("device", ["cuda:93", "toaster", ""])
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_device_that_is_not_here_is_wrong_usage(device: str, random_weights: bool, tmp_path) -> None:
    tiny_target().model.save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="cannot be used here") as caught:
        TransformersBackend(str(tmp_path / "model"), None, dtype="float32", device=device, random_weights=random_weights)
    assert "--device cpu" in str(caught.value.hint)
