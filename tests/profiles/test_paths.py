from __future__ import annotations

from pathlib import Path

import pytest

from profiles import paths


def test_the_cache_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    assert paths.cache_dir() == tmp_path
    assert paths.default_plan_path() == tmp_path / "plans" / "smollm2-135m_smollm2-135m-dflash_bfloat16.json"
    assert paths.default_trace_path("a/B c", "d", "float32") == tmp_path / "traces" / "b-c_d_float32.safetensors"
    assert paths.default_profile_path(device="NVIDIA H100 80GB").name == "nvidia-h100-80gb_smollm2-135m_bfloat16.json"
    assert paths.default_profile_path().parent == tmp_path / "profiles"
    monkeypatch.delenv("TREEBUDGET_CACHE")
    assert "treebudget" in str(paths.cache_dir())


@pytest.mark.parametrize(
    ("name", "expected"), [("../../etc/passwd", "passwd"), ("/models/My Model/", "my-model"), ("..", "unnamed")]
)
def test_slugs_are_single_safe_names(name, expected):
    assert paths.target_slug(name) == expected and Path(paths.target_slug(name)).name == expected
    assert "x" in paths.device_slug("cpu")
