"""Choosing tokens: ties, NaN, filters, and the exact distribution."""

from __future__ import annotations

import pytest
import torch

from decoder.errors import LogitsError, UsageError
from decoder.sampling import Sampling, TokenChooser, _greedy_on_device, greedy_ids, token_probabilities
from decoder.verify import RootTree, accept
from tests.decoder.helpers import PlainTree

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_take_the_lowest_id(dtype: torch.dtype) -> None:
    """Case 10, in plain decoding and in the tree walk alike."""
    logits = torch.tensor([[2.0, 5, 5, 1], [7, 7, 7, 7], [-INF, -INF, 3, 3]], dtype=dtype)
    assert greedy_ids(logits).tolist() == _greedy_on_device(logits).tolist() == [1, 0, 2]
    chooser = TokenChooser(Sampling())
    assert accept(RootTree(), logits[:1], chooser) == ([0], [1])
    tree = PlainTree([9, 2, 1], [-1, 0, 0])
    assert accept(tree, logits[[0, 1, 2]], chooser) == ([0, 2], [1, 2])


def test_ties_in_a_long_row() -> None:
    """Vectorised argmax must not prefer a later lane: two equal maxima at many distances."""
    for first in range(0, 40, 3):
        for gap in (1, 7, 8, 16, 1000):
            row = torch.zeros(1, 4096)
            row[0, [first, first + gap]] = 3.0
            assert greedy_ids(row).tolist() == [first]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_anywhere_raises(temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[2, 4] = NAN
    with pytest.raises(LogitsError):
        TokenChooser(Sampling(temperature)).prepare(logits)
    with pytest.raises(LogitsError):
        _greedy_on_device(logits)


def test_filters() -> None:
    row = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert token_probabilities(row, Sampling(1.0)).tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert token_probabilities(row, Sampling(1.0, top_k=2)).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert token_probabilities(row, Sampling(1.0, top_p=0.7)).tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert token_probabilities(row, Sampling(1.0, top_p=0.71)).tolist() == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert token_probabilities(row, Sampling(1.0, top_p=1e-6)).tolist() == [0, 1, 0, 0]
    assert token_probabilities(row, Sampling(1.0, top_k=9)).tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert token_probabilities(row, Sampling(0.5)).tolist() == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])


def test_impossible_tokens_are_never_drawn() -> None:
    """Case 7, target side: only finite logits can come out."""
    row = torch.full((1, 8), -INF)
    row[0, [2, 5]] = 1.0
    chooser = TokenChooser(Sampling(1.0, seed=3))
    drawn = {chooser.prepare(row).token(0) for _ in range(200)}
    assert drawn == {2, 5}


def test_frequencies_with_two_children() -> None:
    """Case 12: p = (.5, .3, .2), children {0, 1}; resampling without a residual would give .675/.255/.07.

    20,000 draws: six standard errors are .021, so a false alarm has odds below 1 in 10^8.
    """
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(3, 3)
    tree = PlainTree([0, 0, 1], [-1, 0, 0])
    chooser = TokenChooser(Sampling(1.0, seed=1))
    counts = torch.zeros(3)
    for _ in range(20_000):
        counts[accept(tree, logits, chooser)[1][0]] += 1
    assert (counts / counts.sum()).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.021)


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"temperature": NAN}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_senseless_settings(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**settings)  # type: ignore[arg-type]


INFINITE = float("inf")


@pytest.mark.parametrize(("row", "temperature"), [([1.0, INFINITE, 2.0], 1.0), ([-INFINITE] * 3, 1.0), ([1.0, 2.0, 0.0], 1e-308)])
def test_a_row_without_a_distribution_draws_no_token(row: list[float], temperature: float) -> None:
    with pytest.raises(LogitsError, match="no distribution at temperature"):
        TokenChooser(Sampling(temperature)).prepare(torch.tensor([row])).token(0)
