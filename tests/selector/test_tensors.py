"""One safetensors file with a JSON description: read back as written, everything else refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from profiles.errors import FileFormatError
from selector.errors import ScorerError, TraceError
from selector.scorer import Scorer
from selector.tensors import read_tensors, write_tensors
from selector.trace import Trace


def test_a_file_holds_what_was_written(tmp_path):
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    path = write_tensors(tmp_path / "folder" / "file", {"a": array}, "treebudget.test", 1, {"names": ["x", None]})
    about, tensors = read_tensors(path, "treebudget.test", 2)
    assert about == {"schema": "treebudget.test", "version": 1, "names": ["x", None]}
    assert list(tensors) == ["a"] and tensors["a"].dtype == np.float16
    np.testing.assert_array_equal(tensors["a"], array)
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "none", "treebudget.test", 1)


def test_a_models_weights_are_refused_before_they_are_read(tmp_path):
    """bfloat16, which numpy does not know."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(TraceError, match="is no trace: its description: schema is None"):
        Trace.load(tmp_path / "model.safetensors")
    described = {"treebudget": json.dumps({"schema": "treebudget.trace", "version": 1})}
    header = json.dumps({"__metadata__": described, "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(TraceError, match="is no trace: it cannot be read"):
        Trace.load(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("described", [None, "[]", "7", "{", '{"schema": "treebudget.test"}',
                                       '{"schema": "treebudget.test", "version": 0}',
                                       '{"schema": "treebudget.test", "version": 2}',
                                       '{"schema": "another", "version": 1}'])  # fmt: skip
def test_other_files_are_refused_by_name(tmp_path, described):
    path = tmp_path / "file"
    path.write_bytes(save({"a": np.zeros(1)}, metadata=None if described is None else {"treebudget": described}))
    with pytest.raises(FileFormatError):
        read_tensors(path, "treebudget.test", 1)
    with pytest.raises(TraceError, match=f"{path} is no trace: "):
        Trace.load(path)
    with pytest.raises(ScorerError, match=f"{path} is no scorer: "):
        Scorer.load(path)
