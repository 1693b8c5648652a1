"""The target's embedding, read from safetensors without torch."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from selector.embedding import find_embedding, read_embedding
from selector.errors import ScorerError

NAME = "model.embed_tokens.weight"
TABLE = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)


def write_bfloat16(path, table: np.ndarray, name: str = NAME, cut: int = 0) -> None:
    """A safetensors file by hand: bfloat16 is the upper half of a float32."""
    raw = (table.view(np.uint32) >> 16).astype("<u2").tobytes()[: table.size * 2 - cut]
    about = {"other": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
             name: {"dtype": "BF16", "shape": list(table.shape), "data_offsets": [4, 4 + table.size * 2]}}  # fmt: skip
    header = json.dumps(about).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 + raw)


def test_bfloat16_is_widened(tmp_path):
    write_bfloat16(tmp_path / "model.safetensors", TABLE)
    expected = (TABLE.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for where in (tmp_path, tmp_path / "model.safetensors"):
        np.testing.assert_array_equal(read_embedding(where), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", [NAME, "transformer.wte.weight"])
def test_float32_and_float16_and_usual_names(dtype, name, tmp_path):
    save_file({name: TABLE.astype(dtype), "x": np.zeros(2, np.float32)}, tmp_path / "e.safetensors")
    found = read_embedding(tmp_path / "e.safetensors")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, TABLE.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(read_embedding(tmp_path / "e.safetensors", name), found)


def test_the_part_of_a_split_target_is_found_by_its_index(tmp_path):
    save_file({NAME: TABLE}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", NAME: "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(read_embedding(tmp_path), TABLE)


def test_what_is_no_embedding_is_refused(tmp_path):
    with pytest.raises(ScorerError, match="no embedding at"):
        read_embedding(tmp_path / "missing.safetensors")
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "noise").write_bytes(b"\xff" * 64)
    for name in ("short", "noise"):
        with pytest.raises(ScorerError, match="no readable embedding"):
            read_embedding(tmp_path / name)
    save_file({"x": TABLE, NAME: np.zeros(3, np.float32), "i": np.zeros((2, 2), np.int32)}, tmp_path / "e.safetensors")
    with pytest.raises(ScorerError, match="has no tensor 'y'"):
        read_embedding(tmp_path / "e.safetensors", "y")
    for name in (NAME, "i"):
        with pytest.raises(ScorerError, match="must be a matrix"):
            read_embedding(tmp_path / "e.safetensors", name)
    write_bfloat16(tmp_path / "cut.safetensors", TABLE, cut=6)
    with pytest.raises(ScorerError, match="cut short"):
        read_embedding(tmp_path / "cut.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ScorerError, match="is no index"):
        read_embedding(tmp_path)


def test_values_and_offsets_that_are_none_are_refused(tmp_path):
    path = tmp_path / "e.safetensors"
    for value in (np.nan, np.inf):
        table = TABLE.copy()
        table[3, 1] = value
        save_file({NAME: table}, path)
        with pytest.raises(ScorerError, match="not finite"):
            read_embedding(path)
    for about in ({"shape": [7, 4], "data_offsets": [0, 10**18]}, {"shape": [float("inf"), 4], "data_offsets": [0, 0]},
                  {"shape": [7, 0], "data_offsets": [0, 0]}):  # fmt: skip
        header = json.dumps({NAME: {"dtype": "F32", **about}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(ScorerError):
            read_embedding(path)


def test_the_target_of_this_machine_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    assert find_embedding("toy") is None
    folder = tmp_path / "targets" / "toy"
    folder.mkdir(parents=True)
    save_file({NAME: TABLE}, folder / "model.safetensors")
    assert find_embedding("toy") == folder
    assert find_embedding(str(folder)) == folder
