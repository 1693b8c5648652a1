"""Prepacked linear layers give the same products and texts, and models can be built from a configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from decoder.errors import TargetError, UsageError
from decoder.linear import PackedLinear, can_prepack, resolve_linear_form
from decoder.loop import Decoder
from decoder.target import Target
from tests.decoder.helpers import tiny_model

needs_packing = pytest.mark.skipif(not can_prepack(torch.zeros(4, 4)), reason="this torch has no oneDNN linear layers")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_same_for_any_number_of_rows(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for rows in (1, 2, 7, 16, 33, 200):
            x = torch.randn(2, rows, 48)
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=1e-5)


@needs_packing
def test_a_prepacked_target_gives_the_same_text() -> None:
    prompt = [3, 9, 27, 20]
    texts = [Decoder(Target(tiny_model(scale=0.2, tie_word_embeddings=tied), linear=form)).generate(prompt, 24).token_ids
             for tied in (False, True) for form in ("default", "prepacked")]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert not any(type(module) is nn.Linear for module in Target(tiny_model(), linear="prepacked").model.modules())


def test_auto_prepacks_only_where_that_is_possible() -> None:
    assert resolve_linear_form(tiny_model().to(torch.float16), "auto") == "default"
    assert resolve_linear_form(tiny_model(), "auto") == ("prepacked" if can_prepack(torch.zeros(4, 4)) else "default")
    with pytest.raises(UsageError, match="float16"):
        Target(tiny_model().to(torch.float16), linear="prepacked")


def test_a_configuration_alone_makes_a_target(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path / "shape")
    target = Target.load(str(tmp_path / "shape"), dtype="float32", random_weights=True)
    assert target.name == "shape" and len(target.layers) == 3
    assert len(Decoder(target).generate([1, 2, 3], 5).token_ids) == 5
    with pytest.raises(TargetError, match="configuration"):
        Target.load(str(tmp_path / "nothing"), random_weights=True)
