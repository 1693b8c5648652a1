"""The tree cache: append, commit in place, grow."""

from __future__ import annotations

import pytest
import torch

from decoder.cache import TreeCache
from decoder.errors import TargetError


def rows(first: int, num: int, heads: int = 2, width: int = 3) -> torch.Tensor:
    """Keys whose every value names its row: (1, heads, num, width)."""
    return torch.arange(first, first + num, dtype=torch.float32)[None, None, :, None].expand(1, heads, num, width)


def filled(num_committed: int, num_new: int, capacity: int = 64, layers: int = 3) -> TreeCache:
    cache = TreeCache(layers, capacity)
    for first, num in ((0, num_committed), (num_committed, num_new)):
        for layer in range(layers):
            cache.update(rows(first, num) + 100 * layer, -rows(first, num), layer)
        if first == 0:
            cache.commit_first(num_committed)
    return cache


def content(cache: TreeCache, layer: int = 0) -> list[int]:
    assert cache.store.keys is not None
    return [int(value) - 100 * layer for value in cache.store.keys[layer, 1, : cache.length, 2]]


def test_commit_moves_the_path() -> None:
    """Case 11."""
    cache = filled(10, 5)
    assert cache.commit([0, 2, 4]) == 2
    assert cache.length == 13
    for layer in range(3):
        assert content(cache, layer) == [*range(10), 10, 12, 14]
    assert cache.store.values is not None
    assert cache.store.values[0, 0, 10:13, 0].tolist() == [-10, -12, -14]


def test_overlapping_moves_and_rows_in_place() -> None:
    cache = filled(4, 8)
    assert cache.commit([0, 1, 3, 4, 5, 7]) == 4
    assert content(cache) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 11]
    cache = filled(4, 8)
    assert cache.commit([0, 1, 2]) == 0
    assert content(cache) == list(range(7))


def test_what_is_visible_to_attention() -> None:
    cache = filled(10, 5)
    cache.commit([0, 2])
    keys, values = cache.update(rows(50, 3), rows(60, 3), 0)
    assert keys.shape == values.shape == (1, 2, 15, 3)
    assert keys[0, 0, :, 0].tolist() == [*range(10), 10, 12, 50, 51, 52]
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("capacity", [1, 7, 16])
def test_growth_keeps_everything(capacity: int) -> None:
    cache = filled(10, 5, capacity=capacity)
    cache.commit([0, 2, 4])
    assert content(cache) == [*range(10), 10, 12, 14]
    assert cache.capacity >= 15


def test_reset_and_undo() -> None:
    cache = filled(10, 5)
    cache.commit([0, 2, 4])
    cache.undo(3)
    assert cache.length == 10
    cache.reset()
    assert cache.length == 0
    for layer in range(3):
        cache.update(rows(0, 2), rows(0, 2), layer)
    cache.commit_first(2)
    assert content(cache) == [0, 1]
    with pytest.raises(ValueError):
        cache.undo(3)


@pytest.mark.parametrize("slots", [[0, 2, 2], [2, 1], [-1, 0], [0, 5]])
def test_impossible_slots(slots: list[int]) -> None:
    with pytest.raises(ValueError):
        filled(10, 5).commit(slots)


def test_layers_must_agree_in_shape() -> None:
    cache = TreeCache(2, 8)
    cache.update(rows(0, 2), rows(0, 2), 0)
    with pytest.raises(TargetError, match="layer 1"):
        cache.update(rows(0, 2, heads=3), rows(0, 2, heads=3), 1)
    with pytest.raises(ValueError):
        cache.commit_first(3)
    with pytest.raises(ValueError):
        TreeCache(0)


def test_mask_sizes_in_both_forms() -> None:
    layer = filled(10, 5).layers[0]
    assert layer.get_mask_sizes(5) == (15, 0)
    assert layer.get_mask_sizes(torch.arange(10, 15)) == (15, 0)
    assert layer.get_max_cache_shape() == layer.get_max_length() == -1


def test_a_batch_is_as_many_single_caches() -> None:
    """Three requests side by side, each with its own path, hold what three caches of one request hold."""
    paths = [[0, 1, 2], [0, 2, 4], [0, 3, 4]]
    batch = TreeCache(2, 4, num_requests=3)
    singles = [TreeCache(2, 4) for _ in paths]
    for first, num in ((0, 6), (6, 5)):
        for layer in range(2):
            each = [rows(first + 1000 * (request + 1), num) + 100 * layer for request in range(3)]
            seen, _ = batch.update(torch.cat(each), -torch.cat(each), layer)
            for single, keys, whole in zip(singles, each, seen, strict=True):
                assert torch.equal(single.update(keys, -keys, layer)[0][0], whole)
        if first == 0:
            for cache in (batch, *singles):
                cache.commit_first(num)
    batch.commit_each(paths)
    for single, path in zip(singles, paths, strict=True):
        single.commit(path)
    assert batch.length == 9
    for kind in ("keys", "values"):
        whole = getattr(batch.store, kind).unflatten(0, (2, 3))[:, :, :, :9]
        assert torch.equal(whole, torch.stack([getattr(single.store, kind)[:, :, :9] for single in singles], dim=1))


def test_a_prefix_is_given_to_every_request() -> None:
    source = filled(10, 0)
    batch = TreeCache(3, 4, num_requests=2)
    batch.copy_prefix(source, 7)
    assert batch.length == 7 and batch.store.keys is not None and source.store.keys is not None
    for layer in range(3):
        for request in range(2):
            assert torch.equal(batch.store.keys[2 * layer + request, :, :7], source.store.keys[layer, :, :7])
    with pytest.raises(ValueError, match="one request"):
        source.copy_prefix(batch, 3)


@pytest.mark.parametrize("paths", [[[0, 1]], [[0, 1], [0]], [[0, 5], [0, 1]], [[1, 0], [0, 1]]])
def test_impossible_paths_of_a_batch(paths: list[list[int]]) -> None:
    batch = TreeCache(1, 8, num_requests=2)
    batch.update(rows(0, 3).repeat(2, 1, 1, 1), rows(0, 3).repeat(2, 1, 1, 1), 0)
    with pytest.raises(ValueError):
        batch.commit_each(paths)
